"""Real observations for comparing networks: games played by chance and by a bundled teacher."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reincarnate.envs import env_spec, make_env
from reincarnate.teachers.zoo import load_teacher

COUNT = 10_000


@functools.cache
def cartpole(count: int = COUNT) -> npt.NDArray[np.float32]:
    """[count, 4] float32, half of them of a teacher's games, which last."""
    return _played("CartPole-v1", count, "bundled/CartPole-dqn")


@functools.cache
def breakout(side: int, count: int = COUNT) -> npt.NDArray[np.uint8]:
    """[count, 4, side, side] uint8; at the usual side of 84, a teacher plays half of them."""
    return _played("Breakout-v5", count, "bundled/Breakout-dqn" if side == 84 else None, (4, side, side))


def _played(
    env_id: str, count: int, teacher_ref: str | None, obs_shape: tuple[int, ...] | None = None
) -> npt.NDArray[Any]:
    teacher = load_teacher(teacher_ref) if teacher_ref else None
    rng, num_envs = np.random.default_rng(0), 20
    collected: list[npt.NDArray[Any]] = []
    with make_env(env_spec(env_id, obs_shape=obs_shape), num_envs, seed=1) as envs:
        step = envs.reset()
        while len(collected) * num_envs < count:
            collected.append(step.obs.copy())
            action = rng.integers(0, envs.spec.num_actions, num_envs)
            if teacher is not None:
                half = num_envs // 2
                action[:half] = teacher.outputs(torch.from_numpy(step.obs[:half].copy())).argmax(1).numpy()
                action[rng.random(num_envs) < 0.05] = 1  # FIRE, so that no game stalls
            step = envs.step(action)
    return np.concatenate(collected)[:count]
