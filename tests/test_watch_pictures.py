"""Pictures of environments: what the policy sees, in colour."""

from __future__ import annotations

import warnings

import cv2
import envpool
import numpy as np
import pytest

from reincarnate.envs import env_spec, make_env


def grey(picture):
    return cv2.resize(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
def test_the_picture_is_what_the_policy_sees_and_changes_nothing(backend: str) -> None:
    spec = env_spec("Breakout-v5", sticky_probability=0.25)
    rng, resets = np.random.default_rng(0), 0
    with make_env(spec, 1, 3, backend, pictures=True) as env, make_env(spec, 1, 3, backend) as plain:
        step, other = env.reset(), plain.reset()
        for _ in range(300):
            [picture] = env.pictures()
            assert picture.shape == (210, 160, 3)
            assert picture.dtype == np.uint8
            np.testing.assert_array_equal(step.obs, other.obs)
            np.testing.assert_array_equal(step.raw_reward, other.raw_reward)
            if not step.game_over[0]:  # a game that ends within a frame skip leaves the policy an old picture
                off = np.abs(grey(picture).astype(int) - step.obs[0, -1])
                # EnvPool greys each frame before the maximum, Stable-Baselines3 after it
                assert off.max() == 0 if backend == "gymnasium" else (off > 3).mean() < 0.01
            action = rng.integers(0, 2, 1)  # the bat stands still
            step, other = env.step(action), plain.step(action)
            resets += int(step.reset.sum())
            if resets == 2:
                break
        assert resets == 2  # lives were lost, and the pictures went on with the game
        with pytest.raises(RuntimeError, match="without pictures"):
            plain.pictures()


def space_invaders(frame_skip):
    """EnvPool itself, which can show the newest frame."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = envpool.make(
            "SpaceInvaders-v5",
            env_type="gymnasium",
            num_envs=1,
            seed=9,
            frame_skip=frame_skip,
            episodic_life=True,
            render_mode="rgb_array",
        )
    pool.reset()
    return pool


@pytest.mark.parametrize("frame_skip", [1, 4])
def test_the_picture_has_what_the_newest_frame_has_and_what_flickers(frame_skip: int) -> None:
    own, more = space_invaders(frame_skip), 0
    with make_env(env_spec("SpaceInvaders-v5", frame_skip=frame_skip), 1, 9, pictures=True) as env:
        env.reset()
        for i in range(60):
            picture, newest = env.pictures()[0], own.render()[0]
            assert (picture >= newest).all()
            more += int((picture > newest).any())
            env.step(np.array([i % 6]))
            own.step(np.array([i % 6], dtype=np.int32))
    assert more == 0 if frame_skip == 1 else more > 10


def test_vector_games_are_drawn_by_envpool_without_other_packages() -> None:
    with make_env(env_spec("CartPole-v1"), 2, 0, pictures=True) as env:
        env.reset()
        pictures = env.pictures()
    assert pictures.shape == (2, 400, 600, 3)
    assert (pictures[:, 0, 0] == 255).all()
