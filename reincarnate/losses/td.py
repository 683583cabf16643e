"""Temporal-difference losses of Q-values."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from reincarnate.losses.shapes import require, require_matrix


def q_targets(reward: Tensor, discount: Tensor, next_q: Tensor, selector_q: Tensor | None = None) -> Tensor:
    """n-step Q-learning targets: ``y = R + d * max_a Q'(s', a)``.

    R is the discounted sum of the rewards up to s' and d = gamma^k, 0 when a terminal lies between; both
    are settled where the batch is made. With ``selector_q`` the action is chosen by one network and valued
    by the other (double Q-learning): ``y = R + d * Q'(s', argmax_a Q(s', a))``.

    Mnih et al. 2015, algorithm 1; n steps: Sutton and Barto 2018, eq. 7.1; van Hasselt et al. 2016, eq. 4.

    Args:
        reward: [B] float.
        discount: [B] float.
        next_q: [B, A] of the target network at s'; no gradient should flow into it.
        selector_q: [B, A] of the online network at s', or None.

    Returns:
        [B] targets.

    Raises:
        ValueError: shapes that do not agree.
    """
    batch, actions = require_matrix("next_q", next_q)
    require("reward", reward, (batch,))
    require("discount", discount, (batch,))
    if selector_q is None:
        return reward + discount * next_q.amax(dim=1)
    require("selector_q", selector_q, (batch, actions))
    return reward + discount * next_q.gather(1, selector_q.argmax(dim=1, keepdim=True))[:, 0]


def td_loss(q: Tensor, action: Tensor, target: Tensor, kind: Literal["huber", "mse"] = "huber") -> Tensor:
    """Loss of ``delta = Q(s, a) - y`` per example.

    ``huber``: ``delta^2 / 2`` where ``|delta| <= 1``, else ``|delta| - 1/2`` (Mnih et al. 2015, Methods: the
    error term clipped to [-1, 1]). ``mse``: ``delta^2``, without the half, as CleanRL has it.

    Args:
        q: [B, A] of the online network at s.
        action: [B] int64.
        target: [B], without gradient.
        kind: ``huber`` or ``mse``.

    Returns:
        [B] losses.

    Raises:
        ValueError: shapes that do not agree, or another kind.
    """
    batch, _ = require_matrix("q", q)
    require("action", action, (batch,))
    require("target", target, (batch,))
    chosen = q.gather(1, action[:, None])[:, 0]
    if kind == "huber":
        return F.huber_loss(chosen, target, reduction="none", delta=1.0)
    if kind == "mse":
        return F.mse_loss(chosen, target, reduction="none")
    raise ValueError(f"kind must be huber or mse, got {kind!r}")
