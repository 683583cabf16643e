"""The gymnasium backend against the pipelines of Stable-Baselines3 and CleanRL, bit for bit."""

import ale_py
import cv2
import gymnasium
import numpy as np
import pytest
from stable_baselines3.common import atari_wrappers
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from reincarnate.envs import make_env
from reincarnate.types import EnvSpec

SPEC = EnvSpec("Breakout-v5", "atari", 4, (4, 84, 84))
SEED, AGENT_STEPS = 7, 260  # random play loses some lives and ends a game


def emulator():
    gymnasium.register_envs(ale_py)
    return gymnasium.make("BreakoutNoFrameskip-v4")


def stable_baselines3():
    """What ``make_atari_env`` and ``VecFrameStack`` build."""
    return VecFrameStack(DummyVecEnv([lambda: atari_wrappers.AtariWrapper(emulator())]), 4)


def cleanrl():
    """The wrappers of dqn_atari.py in their order; gym's gray was OpenCV's, gymnasium's is another."""
    env = atari_wrappers.NoopResetEnv(emulator(), noop_max=30)
    env = atari_wrappers.EpisodicLifeEnv(atari_wrappers.MaxAndSkipEnv(env, skip=4))
    env = atari_wrappers.ClipRewardEnv(atari_wrappers.FireResetEnv(env))
    env = gymnasium.wrappers.ResizeObservation(env, (84, 84))
    space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    env = gymnasium.wrappers.TransformObservation(
        env, lambda obs: cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY), space
    )
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def actions():
    return np.random.default_rng(0).integers(0, 4, AGENT_STEPS)


def played(wrappers, wanted, spec=SPEC, seed=SEED):
    with make_env(spec, 1, seed, "gymnasium", wrappers) as env:
        steps = [env.reset()]
        for action in wanted:
            steps.append(env.step(np.array([action])))
            while steps[-1].terminal[0] or steps[-1].truncated[0]:
                steps.append(env.step(np.array([0])))  # the reset that is due
        return steps


def compare(steps, reset, step):
    """Rows against ``reset() -> obs`` and ``step(action) -> obs, reward`` of an oracle that resets itself."""
    np.testing.assert_array_equal(steps[0].obs[0], reset())
    rows = iter(steps[1:])
    for action in actions():
        row = next(rows)
        obs, reward = step(action)
        assert row.reward[0] == reward
        if row.terminal[0]:
            row = next(rows)
            assert row.reset[0]
        np.testing.assert_array_equal(row.obs[0], obs)
    assert sum(bool(row.reset[0]) for row in steps) >= 6
    assert sum(bool(row.game_start[0]) for row in steps) >= 2


def test_stable_baselines3s_vector_environment():
    env = stable_baselines3()
    env.seed(SEED)

    def step(action):
        obs, reward, _, _ = env.step(np.array([action]))
        return obs[0].transpose(2, 0, 1), reward[0]

    compare(played("sb3", actions()), lambda: env.reset()[0].transpose(2, 0, 1), step)
    env.close()


def test_cleanrls_wrappers():
    env = cleanrl()

    def step(action):
        obs, reward, terminated, truncated, _ = env.step(action)
        return (env.reset()[0] if terminated or truncated else obs), reward

    compare(played("cleanrl", actions()), lambda: env.reset(seed=SEED)[0], step)
    env.close()


def test_the_sources_pixels_differ_by_one_gray_level_and_their_stacks_after_a_reset():
    steps = {name: played(name, actions()) for name in ("common", "sb3", "cleanrl")}
    lost = next(i for i, row in enumerate(steps["common"]) if i and row.reset[0] and not row.game_start[0])
    newest = {name: np.stack([row.obs[0, -1] for row in rows]).astype(int) for name, rows in steps.items()}
    np.testing.assert_array_equal(newest["common"], newest["sb3"])
    assert np.abs(newest["common"] - newest["cleanrl"]).max() == 1
    common, sb3, other = (steps[name][lost].obs[0] for name in ("common", "sb3", "cleanrl"))
    np.testing.assert_array_equal(common[:-1], steps["common"][lost - 1].obs[0, 1:])
    assert not sb3[:-1].any()
    assert (other == other[-1]).all()


@pytest.mark.parametrize("wrappers", ["sb3", "cleanrl"])
def test_size_and_resets_follow_the_spec(wrappers):
    spec = EnvSpec("Breakout-v5", "atari", 4, (2, 60, 64), fire_reset=False, episodic_life=False)
    steps = played(wrappers, [0] * 5, spec)
    assert steps[-1].obs.shape == (1, 2, 60, 64)
    assert not any(row.terminal[0] for row in steps)
