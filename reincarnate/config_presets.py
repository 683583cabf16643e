"""The presets: by name, the settings in which each differs from the fields' own defaults."""

from __future__ import annotations

from typing import Any

PRESET_SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {
        # On a CPU a Nature CNN makes five updates in the time of one of IMPALA's, and with so few updates a
        # higher learning rate than the others' brings it at least as far.
        "network": "light",
        "optimizer.learning_rate": 3e-4,
        "env.num_envs": 8,
        "evaluate.games": 16,
        "collect.agent_steps": 40_000,
        "offline.updates": 2_500,
        "offline.target_update_every_updates": 500,
        "offline.evaluations": 1,
        "online.agent_steps": 10_000,
        "online.learning_starts_agent_steps": 1_000,
        "online.replay_capacity_agent_steps": 10_000,
        "online.agent_steps_per_update": 8,
        "online.target_update_every_agent_steps": 2_000,
        "online.evaluations": 1,
        # Each environment ends about one game in so short a phase: m has nothing to go by, the teacher stays.
        "distill.stop_fraction": 1.0,
    },
    "default": {},
    "paper": {
        "env.num_envs": 8,
        "evaluate.games": 100,
        "collect.agent_steps": 1_000_000,
        "collect.epsilon_start": 0.01,
        "collect.epsilon_end": 0.01,
        "offline.updates": 1_000_000,
        "online.agent_steps": 2_500_000,
    },
    "cleanrl": {
        "env.num_envs": 1,
        "evaluate.games": 10,
        "collect.agent_steps": 500_000,
        "collect.epsilon_start": 1.0,
        "collect.epsilon_end": 0.01,
        "collect.epsilon_decay_agent_steps": 500_000,
        "offline.updates": 500_000,
        "offline.target_update_every_updates": 1_000,
        "online.agent_steps": 10_000_000,
        "online.learning_starts_agent_steps": 80_000,
        "online.epsilon_start": 1.0,
        "online.epsilon_end": 0.01,
        "online.epsilon_decay_agent_steps": 1_000_000,
        "online.target_update_every_agent_steps": 1_000,
        "td.n_step": 1,
        "td.loss": "mse",
        "distill.coefficient": 1.0,
        "distill.student_temperature": 1.0,
        "distill.teacher_temperature": 1.0,
        "optimizer.learning_rate": 1e-4,
        "optimizer.learning_rate_final": 1e-4,
        "optimizer.adam_eps": 1e-8,
    },
}
#: A student that no teacher prepares starts to explore at random.
EXPLORATION: dict[str, dict[str, Any]] = {
    "quick": {"online.epsilon_start": 1.0, "online.epsilon_decay_agent_steps": 2_000},
    "default": {"online.epsilon_start": 1.0, "online.epsilon_decay_agent_steps": 250_000},
    "paper": {"online.epsilon_start": 1.0, "online.epsilon_decay_agent_steps": 50_000},
    "cleanrl": {},
}
#: Without a teacher the paper's own environment applies; with one, the teacher's environment wins.
ENVIRONMENT: dict[str, dict[str, Any]] = {
    "paper": {"env.sticky_probability": 0.25, "env.episodic_life": False},
}
