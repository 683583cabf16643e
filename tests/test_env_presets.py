"""Environments whose settings go by a name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from reincarnate.config import EnvConfig, override, preset
from reincarnate.envs import env_spec, make_env, preset_spec
from reincarnate.errors import UserError
from reincarnate.prepare import environment
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import EnvSpec


def test_machado_is_the_protocol_of_published_results() -> None:
    spec = preset_spec("ALE/Breakout-v5", "machado", None)
    assert spec == EnvSpec(
        "Breakout-v5",
        "atari",
        18,
        (4, 96, 96),
        full_action_set=True,
        noop_max=1,
        fire_reset=False,
        sticky_probability=0.25,
        episodic_life=False,
        reward_clip=False,
        max_agent_steps=27_000,
    )


def test_single_fields_win_over_the_preset() -> None:
    spec = preset_spec("Breakout-v5", "machado", 84, reward_clip=True, full_action_set=False)
    assert (spec.obs_shape, spec.num_actions, spec.reward_clip) == ((4, 84, 84), 4, True)
    assert preset_spec("Breakout-v5", None, None) == env_spec("Breakout-v5")
    assert preset_spec("Breakout-v5", None, 64).obs_shape == (4, 64, 64)


def test_vectors_have_none_of_it() -> None:
    assert preset_spec("CartPole-v1", "machado", 96) == env_spec("CartPole-v1")
    assert preset_spec("CartPole-v1", "machado", None, max_agent_steps=9).max_agent_steps == 9


def lives_that_ended_episodes(spec: EnvSpec) -> tuple[int, float]:
    """How many in 400 random steps of two games, and the largest reward."""
    rng, found, most = np.random.default_rng(0), 0, 0.0
    with make_env(spec, 2, seed=3) as env:
        assert env.reset().obs.shape == (2, *spec.obs_shape)
        for _ in range(400):
            step = env.step(rng.integers(spec.num_actions, size=2))
            found += int((step.terminal & ~step.game_over).sum())
            most = max(most, float(step.reward.max()))
    return found, most


def test_a_game_is_played_so() -> None:
    """A lost life ends nothing, rewards are the game's own, all 18 actions are taken."""
    spec = preset_spec("Seaquest-v5", "machado", None)
    ended, most = lives_that_ended_episodes(spec)
    assert ended == 0
    assert most >= 20  # of a shark
    other = dataclasses.replace(spec, episodic_life=True, reward_clip=True)
    ended, most = lives_that_ended_episodes(other)
    assert ended > 0
    assert most == 1


def test_the_paper_plays_it_and_a_teachers_environment_wins() -> None:
    assert preset("paper", scratch=True, student="muesli").env.preset == "machado"
    assert preset("paper", student="muesli").env.preset is None
    assert preset("paper", student="qdagger-muesli").env.preset is None
    teacher = load_teacher("bundled/CartPole-dqn")
    for name, value in (("preset", "machado"), ("image_size", 96)):
        with pytest.raises(UserError, match=f"env.{name} is for runs without a teacher"):
            environment(EnvConfig(**{name: value}), teacher)
    assert environment(EnvConfig(id="Pong", preset="machado"), None).num_actions == 18


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UserError, match=r"env.preset must be one of machado, got 'machodo'"):
        override(preset("quick"), {"env.preset": "machodo"})
    with pytest.raises(UserError, match=r"env.image_size must be greater than 0"):
        override(preset("quick"), {"env.image_size": 0})
