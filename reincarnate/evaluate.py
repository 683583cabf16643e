"""Whole games on the raw score: a policy in, :class:`~reincarnate.types.Returns` out.

Every environment plays the same number of games and none is cut short. Stopping at the first so many games
to finish, of all environments together, would favour the short ones (bad games in Breakout, good ones in
Acrobot); so extra games of environments that are through with their quota are ignored instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from reincarnate import acting
from reincarnate.acting import ActRule
from reincarnate.device import beside_environments
from reincarnate.envs import make_env
from reincarnate.errors import UserError
from reincarnate.types import Backend, EnvSpec, Policy, Returns, State, VectorEnv, Wrappers

#: Games finished, games wanted, mean raw return of the finished ones (0 before the first).
GameProgress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class RandomPolicy:
    """Uniform over ``num_actions`` actions; its return is G_random."""

    num_actions: int
    generator: torch.Generator

    def initial_state(self, num_envs: int) -> State:
        """None: nothing to remember."""
        return None

    def act(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Obs [N, ...] -> action [N] int64 on the generator's device."""
        device = self.generator.device
        action = torch.randint(self.num_actions, (len(obs),), generator=self.generator, device=device)
        return action, state


class Recalls(Protocol):
    """What gives outputs from observations and a memory; a teacher does."""

    def initial_state(self, num_envs: int) -> State:
        """At the start of a game, or None."""

    def step(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Obs [N, *obs_shape] -> raw outputs [N, A] and the next state."""


@dataclass(frozen=True)
class RecurrentPolicy:
    """Raw outputs that may depend on a memory, under an acting rule: any teacher."""

    source: Recalls
    rule: ActRule
    temperature: float  # of ``sample``
    generator: torch.Generator | None  # on the device of the outputs

    def initial_state(self, num_envs: int) -> State:
        """The source's own."""
        return self.source.initial_state(num_envs)

    def act(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Obs [N, *obs_shape] -> action [N] int64 and the next state."""
        outputs, state = self.source.step(obs, state)
        return acting.act(outputs, self.rule, self.temperature, self.generator)[0], state


@dataclass(frozen=True)
class OutputsPolicy:
    """A network's raw outputs under an acting rule: a teacher, or a feed-forward student."""

    outputs_fn: Callable[[Tensor], Tensor]  # obs [N, *obs_shape] -> Q-values or logits [N, A]
    rule: ActRule
    temperature: float  # of ``sample``
    generator: torch.Generator | None  # on the device of the outputs

    def initial_state(self, num_envs: int) -> State:
        """None: nothing to remember."""
        return None

    def act(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Obs [N, *obs_shape] -> action [N] int64."""
        action, _ = acting.act(self.outputs_fn(obs), self.rule, self.temperature, self.generator)
        return action, state


def evaluate(
    policy: Policy,
    spec: EnvSpec,
    games: int,
    *,
    num_envs: int,
    seed: int,
    device: torch.device | str = "cpu",
    backend: Backend = "envpool",
    wrappers: Wrappers = "common",
    progress: GameProgress | None = None,
) -> Returns:
    """Undiscounted raw returns of exactly ``games`` whole games, ordered by environment.

    A game goes on over lost lives (with the resets that the EnvSpec asks for) until game over or the
    environment's own limit, ``spec.max_agent_steps``; truncated games count.

    Args:
        policy: acts on observations [N, *obs_shape] on ``device``, in inference mode.
        spec: the environment; its life-loss resets stay on, its reward clipping does not matter here.
        games: how many games in all.
        num_envs: at most so many play at once: the largest number that divides ``games``.
        seed: of the first environment; environment i has ``seed + i``.
        device: where the observations go.
        backend: which implementation of the environment.
        wrappers: whose wrappers the gymnasium backend puts around an Atari game.
        progress: called after every vector step; it may raise to stop the evaluation.

    Raises:
        UserError: no games were asked for, or the environment cannot be made.
    """
    if games < 1:
        raise UserError(f"an evaluation needs at least 1 game, got {games}")
    lanes = lanes_for(games, num_envs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(beside_environments(torch.device(device)))
        envs = [
            stack.enter_context(make_env(spec, size, seed + first, backend, wrappers))
            for first, size in group_lanes(lanes)
        ]
        returns = play_games(policy, envs, games // lanes, device=device, progress=progress)
    return Returns.from_games([score for lane in returns for score in lane])


def lanes_for(games: int, num_envs: int) -> int:
    """The most environments, up to ``num_envs``, that share ``games`` equally.

    Raises:
        UserError: no environments.
    """
    if num_envs < 1:
        raise UserError(f"the number of environments must be at least 1, got {num_envs}")
    return max(count for count in range(1, min(num_envs, games) + 1) if games % count == 0)


def group_lanes(lanes: int) -> list[tuple[int, int]]:
    """First environment and size of the groups that take turns: two, so that acting and stepping overlap."""
    half = lanes // 2
    return [(0, lanes - half), (lanes - half, half)] if lanes >= 4 else [(0, lanes)]


@torch.inference_mode()
def play_games(
    policy: Policy,
    envs: Sequence[VectorEnv],
    quota: int,
    *,
    device: torch.device | str = "cpu",
    progress: GameProgress | None = None,
) -> list[list[float]]:
    """The raw returns of the first ``quota`` games of each environment, in the order they were played.

    The policy acts for one vector environment while the others step. One of them keeps stepping until all
    its environments are through; what they play beyond their quota is ignored.
    """
    tables = [_Table(policy, env, quota, torch.device(device)) for env in envs]
    wanted = quota * sum(env.num_envs for env in envs)
    for table in tables:
        table.begin()
    playing = tables
    while playing:
        for table in playing:
            table.finish()
            if not table.through:
                table.begin()
            if progress is not None:
                scores = [score for each in tables for lane in each.returns for score in lane]
                progress(len(scores), wanted, sum(scores) / max(len(scores), 1))
        playing = [table for table in playing if not table.through]
    return [lane for table in tables for lane in table.returns]


class _Table:
    """The games of one vector environment."""

    def __init__(self, policy: Policy, env: VectorEnv, quota: int, device: torch.device) -> None:
        self._policy, self._env, self._quota, self._device = policy, env, quota, device
        self._state = policy.initial_state(env.num_envs)
        self._step = env.reset()
        self._scores = np.zeros(env.num_envs, dtype=np.float64)
        self.returns: list[list[float]] = [[] for _ in range(env.num_envs)]

    @property
    def through(self) -> bool:
        """Whether every environment has played its quota."""
        return all(len(lane) == self._quota for lane in self.returns)

    def begin(self) -> None:
        """Act, and start the environments."""
        obs = torch.from_numpy(self._step.obs).to(self._device)
        action, self._state = self._policy.act(obs, self._state)
        self._env.send(action.cpu().numpy())

    def finish(self) -> None:
        """Wait for the environments, and count the games that ended."""
        self._step = step = self._env.recv()
        self._scores += step.raw_reward
        for lane in np.flatnonzero(step.game_over):
            if len(self.returns[lane]) < self._quota:
                self.returns[lane].append(float(self._scores[lane]))
            self._scores[lane] = 0.0
        if step.game_start.any():
            initial = self._policy.initial_state(self._env.num_envs)
            start = torch.from_numpy(step.game_start).to(self._device)
            self._state = restart_state(self._state, initial, start)


def restart_state(state: State, initial: State, game_start: Tensor) -> State:
    """The state with the rows of new games replaced by ``initial`` ones; leaves [N, ...], mask [N] bool."""

    def chosen(old: Tensor, new: Tensor) -> Tensor:
        mask = game_start.reshape(-1, *[1] * (old.dim() - 1)).to(old.device)
        return torch.where(mask, new, old)

    return pytree.tree_map(lambda old, new: chosen(old, new) if torch.is_tensor(old) else old, state, initial)
