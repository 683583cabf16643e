"""How long a run will take on this machine, from a second of trying: said before the work starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from reincarnate.acting import ActRule
from reincarnate.config import RunConfig
from reincarnate.device import synchronize
from reincarnate.envs import make_env
from reincarnate.prepare import Parts


@dataclass(frozen=True)
class Estimate:
    """Seconds of each phase without evaluations; 0 for a phase that the run does not have."""

    collect_seconds: float
    offline_seconds: float
    online_seconds: float

    @property
    def seconds(self) -> float:
        """All phases."""
        return self.collect_seconds + self.offline_seconds + self.online_seconds

    def text(self, preset: str) -> str:
        """One line for the user; names the quick preset where the run takes long."""
        parts = [
            f"{name} {duration(seconds)}"
            for name, seconds in (
                ("collect", self.collect_seconds),
                ("offline", self.offline_seconds),
                ("online", self.online_seconds),
            )
            if seconds
        ]
        hint = "" if preset == "quick" or self.seconds < 3_600 else "; --preset quick takes minutes"
        total, detail = duration(self.seconds), ", ".join(parts)
        return f"about {total} on this machine ({detail}; evaluations come on top){hint}"


def duration(seconds: float) -> str:
    """Words of a length that suits: 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


def estimate(config: RunConfig, parts: Parts, ranks: int = 1) -> Estimate:
    """Time a few vector steps and updates of a throw-away student, and add up the run's phases.

    ``ranks`` play at once; what they need to exchange gradients is not in it.
    """
    environment, student, teacher = _acting_seconds(config, parts)
    update = _seconds(parts.entry.trial_step(config, parts.spec, parts.device, parts.precision), parts, 5)
    envs, online = config.env.num_envs, config.online
    vector_steps = online.agent_steps / (envs * ranks)
    asked = parts.student.batch_spec.agent_steps_per_update(config.optimizer.batch_size)
    every = asked or online.agent_steps_per_update
    updates = max(0, online.agent_steps - online.learning_starts_agent_steps) // every
    advice = teacher * config.distill.stop_fraction if parts.entry.method.distill else 0.0
    offline = parts.entry.method.offline
    return Estimate(
        collect_seconds=config.collect.agent_steps / envs * (environment + teacher) if offline else 0.0,
        offline_seconds=config.offline.updates * update if offline else 0.0,
        online_seconds=vector_steps * (environment + student + advice) + updates * update,
    )


def _acting_seconds(config: RunConfig, parts: Parts) -> tuple[float, float, float]:
    """Seconds per vector step: of the environments, of the student, of the teacher (0 without one)."""
    greedy, teacher = ActRule("greedy"), parts.teacher
    with make_env(parts.spec, config.env.num_envs, 0, config.env.backend) as env:
        step = env.reset()
        action = np.zeros(config.env.num_envs, dtype=np.int64)
        environment = _seconds(lambda: env.step(action), parts)
    obs = torch.from_numpy(step.obs).to(parts.device)
    state = parts.student.initial_state(len(obs))
    student = _seconds(lambda: parts.student.act(obs, state, greedy), parts)

    def ask() -> None:
        if teacher is not None:
            teacher.step(obs, teacher.initial_state(len(obs)))

    return environment, student, _seconds(ask, parts) if teacher else 0.0


def _seconds(work: Callable[[], object], parts: Parts, rounds: int = 20) -> float:
    """Mean seconds of a call, after one that warms up."""
    work()
    synchronize(parts.device)
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    synchronize(parts.device)
    return (time.perf_counter() - started) / rounds
