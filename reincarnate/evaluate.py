"""Whole games on the raw score: a policy in, :class:`~reincarnate.types.Returns` out.

Every environment plays the same number of games and none is cut short. Stopping at the first so many games
to finish, of all environments together, would favour the short ones (bad games in Breakout, good ones in
Acrobot); so extra games of environments that are through with their quota are ignored instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from reincarnate import acting
from reincarnate.acting import ActRule
from reincarnate.envs import make_env
from reincarnate.errors import UserError
from reincarnate.types import Backend, EnvSpec, Policy, Returns, State, VectorEnv

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
        progress: called after every vector step; it may raise to stop the evaluation.

    Raises:
        UserError: no games were asked for, or the environment cannot be made.
    """
    if games < 1:
        raise UserError(f"an evaluation needs at least 1 game, got {games}")
    lanes = lanes_for(games, num_envs)
    with make_env(spec, lanes, seed, backend) as env:
        returns = play_games(policy, env, games // lanes, device=device, progress=progress)
    return Returns.from_games([score for lane in returns for score in lane])


def lanes_for(games: int, num_envs: int) -> int:
    """The most environments, up to ``num_envs``, that share ``games`` equally.

    Raises:
        UserError: no environments.
    """
    if num_envs < 1:
        raise UserError(f"the number of environments must be at least 1, got {num_envs}")
    return max(count for count in range(1, min(num_envs, games) + 1) if games % count == 0)


@torch.inference_mode()
def play_games(
    policy: Policy,
    env: VectorEnv,
    quota: int,
    *,
    device: torch.device | str = "cpu",
    progress: GameProgress | None = None,
) -> list[list[float]]:
    """The raw returns of the first ``quota`` games of each environment, in the order they were played.

    All environments keep stepping until the last is through; what they play beyond their quota is ignored.
    """
    returns: list[list[float]] = [[] for _ in range(env.num_envs)]
    scores = np.zeros(env.num_envs, dtype=np.float64)
    total, wanted = 0.0, quota * env.num_envs
    done = 0
    step, state = env.reset(), policy.initial_state(env.num_envs)
    while done < wanted:
        action, state = policy.act(torch.from_numpy(step.obs).to(device), state)
        step = env.step(action.cpu().numpy())
        scores += step.raw_reward
        for lane in np.flatnonzero(step.game_over):
            if len(returns[lane]) < quota:
                returns[lane].append(float(scores[lane]))
                total, done = total + float(scores[lane]), done + 1
            scores[lane] = 0.0
        if step.game_start.any():
            state = restart_state(
                state, policy.initial_state(env.num_envs), torch.from_numpy(step.game_start).to(device)
            )
        if progress is not None:
            progress(done, wanted, total / max(done, 1))
    return returns


def restart_state(state: State, initial: State, game_start: Tensor) -> State:
    """The state with the rows of new games replaced by ``initial`` ones; leaves [N, ...], mask [N] bool."""

    def chosen(old: Tensor, new: Tensor) -> Tensor:
        mask = game_start.reshape(-1, *[1] * (old.dim() - 1)).to(old.device)
        return torch.where(mask, new, old)

    return pytree.tree_map(lambda old, new: chosen(old, new) if torch.is_tensor(old) else old, state, initial)
