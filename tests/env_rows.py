"""Environments that are played at random, and what every row of an EnvStep must keep to."""

import itertools

import numpy as np
import pytest

from reincarnate.envs import make_env
from reincarnate.types import EnvSpec, EnvStep

BREAKOUT = EnvSpec("Breakout-v5", "atari", 4, (4, 84, 84), max_agent_steps=150)
CARTPOLE = EnvSpec("CartPole-v1", "vector", 2, (4,), max_agent_steps=12)
BACKENDS = pytest.mark.parametrize("backend", ["envpool", "gymnasium"])


def random_actions(spec, num_envs, steps, seed=0):
    return np.random.default_rng(seed).integers(0, spec.num_actions, (steps, num_envs))


def play(spec, actions, seed=3, backend="envpool"):
    """The reset's step and one step per row of actions."""
    with make_env(spec, actions.shape[1], seed, backend) as env:
        return [env.reset(), *(env.step(action) for action in actions)]


def flags_of(step, i):
    """All that a row says beside its observation."""
    return (
        step.reward[i],
        step.raw_reward[i],
        step.terminal[i],
        step.truncated[i],
        step.game_over[i],
        step.reset[i],
        step.game_start[i],
    )


def hidden_end(step):
    return step.game_over & step.reset


def check_rows(spec: EnvSpec, steps: list[EnvStep]) -> None:
    """The contract of EnvStep, row by row."""
    first, num_envs = steps[0], len(steps[0].env_ids)
    assert first.reset.all()
    assert first.game_start.all()
    assert not (first.terminal | first.truncated | first.game_over).any()
    agent_steps = np.zeros(num_envs, int)
    for before, step in itertools.pairwise(steps):
        check_types(spec, step)
        episode_over, game_over = before.terminal | before.truncated, before.game_over & ~before.reset
        np.testing.assert_array_equal(step.reset, episode_over)
        np.testing.assert_array_equal(step.game_start, game_over | hidden_end(step))
        assert not (step.terminal & step.truncated).any()
        assert not (step.reset & (step.terminal | step.truncated)).any()
        assert (step.game_over | ~step.truncated).all()
        assert not step.reward[step.reset].any()
        assert not step.raw_reward[step.reset].any()
        agent_steps = np.where(step.game_start, 0, agent_steps + ~step.reset)
        np.testing.assert_array_equal(step.game_over[agent_steps == spec.max_agent_steps], True)
        assert (agent_steps[step.truncated] == spec.max_agent_steps).all()


def check_types(spec, step):
    n = len(step.env_ids)
    assert step.env_ids.tolist() == list(range(n))
    assert step.obs.shape == (n, *spec.obs_shape)
    assert step.obs.dtype == (np.uint8 if spec.kind == "atari" else np.float32)
    assert step.reward.dtype == step.raw_reward.dtype == np.float32
    for name in ("terminal", "truncated", "game_over", "reset", "game_start"):
        flags = getattr(step, name)
        assert flags.dtype == np.bool_, name
        assert flags.shape == (n,), name


def check_stacks(steps):
    """A game's first stack is one frame; any other stack, a new life's too, is the old one and one more."""
    for before, step in itertools.pairwise(steps):
        for i, start in enumerate(step.game_start):
            older = step.obs[i, :1] if start else before.obs[i, 1:]
            expected = np.broadcast_to(older, (3, 84, 84)) if start else older
            np.testing.assert_array_equal(step.obs[i, 1:] if start else step.obs[i, :-1], expected)
