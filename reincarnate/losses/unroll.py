"""What a model that is unrolled K steps from each state should predict there, and where it counts.

Sequences are rows of one environment: s_t, the action a_t taken at it, and its outcome. A row is ``valid``
if its action was executed and its successor is known. Rows that only hold the observation at which a game
ended are not, nor are any after a truncation, until the next game.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reincarnate.losses.retrace import clipped_ratio
from reincarnate.losses.shapes import require, require_matrix

ValueTargetKind = Literal["returns", "clipped_rho"]


@dataclass(frozen=True)
class UnrollTargets:
    """Targets of steps k = 1..K from every root t, [B, T, K]; where a mask is off, nothing is known."""

    reward: Tensor  # [B, T, K] r_{t+k}; 0 past the end of a game
    reward_mask: Tensor  # [B, T, K] bool
    value: Tensor  # [B, T, K] y_{t+k}; 0 at the end of a game and past it
    value_mask: Tensor  # [B, T, K] bool
    policy_mask: Tensor  # [B, T, K] bool: s_{t+k} is a state at which an action was taken


def later(x: Tensor, steps: int) -> Tensor:
    """``x[:, t + steps]`` at t; zeros (False) past the end. [B, T, ...] -> the same shape."""
    gone = torch.zeros_like(x[:, :steps])
    return torch.cat([x[:, steps:], gone], dim=1)


def action_windows(action: Tensor, steps: int) -> Tensor:
    """``a_t .. a_{t+K-1}`` of every root: [B, T] -> [B, T, K].

    Past the end they begin again at the front: past a game's end any action will do, and elsewhere nothing
    is learnt from them.
    """
    return torch.stack([action.roll(-k, dims=1) for k in range(steps)], dim=2)


def state_windows(x: Tensor, steps: int) -> Tensor:
    """``x_{t+1} .. x_{t+K}`` of every root, zeros past the end: [B, T, ...] -> [B, T, K, ...]."""
    return torch.stack([later(x, k) for k in range(1, steps + 1)], dim=2)


def unroll_targets(
    reward: Tensor, value: Tensor, valid: Tensor, terminal: Tensor, truncated: Tensor, steps: int
) -> UnrollTargets:
    """Targets of K model steps (Hessel et al. 2021, section 4.3) across the ends of games.

    A game that ended for good is an absorbing state: reward and value are 0 from there on, and no policy is
    learnt. Past a truncation or the end of the sequence nothing is known.

    Args:
        reward: [B, T] that followed the action of each row.
        value: [B, T] value target of each row's state.
        valid: [B, T] bool.
        terminal: [B, T] bool, the row's action ended the game for good.
        truncated: [B, T] bool, the row's action met a time limit.
        steps: K.

    Returns:
        Targets and masks [B, T, K], without gradient.

    Raises:
        ValueError: shapes that do not agree, or K < 1.
    """
    shape = require_matrix("reward", reward, "B, T")
    for name, tensor in (
        ("value", value),
        ("valid", valid),
        ("terminal", terminal),
        ("truncated", truncated),
    ):
        require(name, tensor, shape)
    if steps < 1:
        raise ValueError(f"a model is unrolled at least 1 step, got {steps}")
    rows = []
    alive, absorbed = valid, torch.zeros_like(valid)
    for k in range(1, steps + 1):
        ends, cut = later(terminal, k - 1), later(truncated, k - 1)
        reward_mask = alive | absorbed
        absorbed = absorbed | (alive & ends)
        reached = alive & ~ends & ~cut & later(valid, k)
        rows.append((alive, reward_mask, absorbed, reached))
        alive = reached
    executed, reward_mask, absorbed, reached = (
        torch.stack(column, dim=2) for column in zip(*rows, strict=True)
    )
    rewards = torch.stack([later(reward, k) for k in range(steps)], dim=2).detach()
    values = state_windows(value, steps).detach()
    return UnrollTargets(
        reward=torch.where(executed, rewards, 0.0),
        reward_mask=reward_mask,
        value=torch.where(reached, values, 0.0),
        value_mask=reached | absorbed,
        policy_mask=reached,
    )


def value_target(
    returns: Tensor, value: Tensor, log_pi: Tensor, log_mu: Tensor, kind: ValueTargetKind = "returns"
) -> Tensor:
    """What the value heads learn at a state: G, or ``v + min(1, pi / mu) (G - v)``.

    G is the return of the action taken, so as a target of V it leans to the behaviour's policy;
    ``clipped_rho`` takes only as much of it as the target policy would (what a later agent of the paper's
    authors does). The paper does not say which.

    Args:
        returns: [...] of :func:`reincarnate.losses.retrace_returns`.
        value: [...] the target network's v(s).
        log_pi: [...] of the action taken, under the target policy.
        log_mu: [...] of the action taken, under the policy that acted.
        kind: ``returns`` or ``clipped_rho``.

    Returns:
        [...], without gradient.

    Raises:
        ValueError: shapes that do not agree, or another kind.
    """
    require("value", value, tuple(returns.shape))
    require("log_pi", log_pi, tuple(returns.shape))
    if kind == "returns":
        return returns.detach()
    if kind == "clipped_rho":
        return (value + clipped_ratio(log_pi, log_mu) * (returns - value)).detach()
    raise ValueError(f"kind must be returns or clipped_rho, got {kind!r}")


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the entries where ``mask`` holds, 0-d; 0 if there are none. The caller's one reduction.

    By the number of valid entries, not by the size of the tensor, or short games would weigh less.
    """
    require("mask", mask, tuple(x.shape))
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)
