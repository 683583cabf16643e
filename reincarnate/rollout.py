"""Environments stepped with a policy, as complete replay rows and finished games.

One row per environment and vector step: the observation, the action taken at it, and the outcome.
``begin`` acts and starts the environments, ``finish`` waits for them, so a learner can work in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reincarnate.replay import RowBatch
from reincarnate.types import EnvStep, VectorEnv


@dataclass(frozen=True)
class Acted:
    """What a policy did at n observations, and how likely it was."""

    action: Tensor  # [n] int64
    behaviour_log_prob: Tensor  # [n] float32
    epsilon: float
    teacher_outputs: Tensor | None  # [n, A] float32 raw, or None where no teacher is asked any more
    behaviour_log_policy: Tensor | None = None  # [n, A] float32 of all actions, where the buffer holds it
    state: Tensor | None = None  # [n, *state_shape] before the observation, where the buffer holds it


#: Observations [n, *obs_shape] and the step they came with (its reset flags) -> actions.
ActFunction = Callable[[Tensor, EnvStep], Acted]


@dataclass(frozen=True)
class Game:
    """A finished game."""

    env_id: int
    raw_return: float


@dataclass(frozen=True)
class Outcome:
    """One vector step, complete."""

    lanes: npt.NDArray[np.int64]  # [n]
    rows: RowBatch  # n rows
    agent_steps: int  # actions that were executed; rows of a reset are not
    games: tuple[Game, ...]  # games that ended


class Rollout:
    """Steps ``env`` with ``act``; keeps each game's raw return so far.

    Its environments are lanes ``first_lane`` and up of the replay.
    """

    def __init__(self, env: VectorEnv, act: ActFunction, device: torch.device, first_lane: int = 0) -> None:
        self._env, self._act, self._device, self._first = env, act, device, first_lane
        self._step = env.reset()
        self._acted: Acted | None = None
        self._returns = np.zeros(env.num_envs, dtype=np.float64)

    def begin(self) -> None:
        """Act at the current observations and start the environments."""
        obs = torch.from_numpy(self._step.obs).to(self._device)
        self._acted = self._act(obs, self._step)
        self._env.send(self._acted.action.cpu().numpy())

    def finish(self) -> Outcome:
        """Wait for the environments: the rows of the observations that :meth:`begin` acted at.

        Raises:
            RuntimeError: :meth:`begin` was not called.
        """
        if self._acted is None:
            raise RuntimeError("finish() before begin()")
        before, acted, after = self._step, self._acted, self._env.recv()
        self._step, self._acted = after, None
        executed = ~after.reset
        return Outcome(
            before.env_ids + self._first,
            self._rows(before, acted, after),
            int(executed.sum()),
            self._finished_games(after),
        )

    def step(self) -> Outcome:
        """``begin`` then ``finish``."""
        self.begin()
        return self.finish()

    def _rows(self, before: EnvStep, acted: Acted, after: EnvStep) -> RowBatch:
        return RowBatch(
            frame=before.obs[:, -1] if self._env.spec.kind == "atari" else before.obs,
            action=acted.action,
            reward=after.reward,
            raw_reward=after.raw_reward,
            terminal=after.terminal,
            truncated=after.truncated,
            executed=~after.reset,
            game_start=before.game_start,
            teacher_outputs=acted.teacher_outputs,
            behaviour_log_prob=acted.behaviour_log_prob,
            epsilon=np.full(len(before.env_ids), acted.epsilon, dtype=np.float32),
            behaviour_log_policy=acted.behaviour_log_policy,
            state=acted.state,
        )

    def _finished_games(self, after: EnvStep) -> tuple[Game, ...]:
        self._returns[after.env_ids] += after.raw_reward
        ended = after.env_ids[
            after.game_over
        ]  # a game may end inside a reset, on the row that opens the next
        games = tuple(Game(self._first + int(i), float(self._returns[i])) for i in ended)
        self._returns[ended] = 0.0
        return games
