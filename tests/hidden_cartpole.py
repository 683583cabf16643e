"""CartPole whose velocities are not shown: what to do depends on what was seen before."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

NAME = "HiddenCartPole-v1"


class HiddenCartPole(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Position and angle, [2] float32."""

    def __init__(self, **options: Any) -> None:
        super().__init__(CartPoleEnv(**options))
        space = self.env.observation_space
        assert isinstance(space, gymnasium.spaces.Box)
        self.observation_space = gymnasium.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)

    def observation(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Without the velocities."""
        return observation[[0, 2]]


def register() -> None:
    """Make the name known to gymnasium, and so to runs with ``env.backend=gymnasium``."""
    if NAME not in gymnasium.registry:
        gymnasium.register(NAME, HiddenCartPole, max_episode_steps=500)
