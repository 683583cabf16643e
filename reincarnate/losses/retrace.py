"""Returns of off-policy sequences: Retrace and its truncated importance weights.

Letters: K steps of a sequence, from time t-1 = 0..K-1 to t = 1..K. ``discount_t`` is gamma, or 0 where the
game ended for good at t; a time limit keeps it at gamma, and cuts the trace instead (see ``trace_weights``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from reincarnate.losses.shapes import require, require_matrix


def clipped_ratio(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """``min(1, pi(a|s) / mu(a|s))``, elementwise and without gradient.

    The weight of Retrace (Munos et al. 2016, eq. 4) and of Muesli's policy gradient (Hessel et al. 2021,
    eq. 10, with the weight clipped to [0, 1]). Clipped before the exponential, so that it cannot overflow.
    A gradient through it would vanish wherever pi > mu, where the policy gradient is needed most.

    Args:
        log_pi: [...] log-probability of the action taken, under the policy that is evaluated.
        log_mu: [...] the same under the policy that acted.

    Returns:
        [...] from 0 to 1.

    Raises:
        ValueError: shapes that do not agree.
    """
    require("log_mu", log_mu, tuple(log_pi.shape))
    return (log_pi - log_mu).detach().clamp(max=0.0).exp()


def trace_weights(log_pi: Tensor, log_mu: Tensor, valid: Tensor, lambda_: float) -> Tensor:
    """Retrace's coefficients ``c_t = lambda min(1, pi(a_t|s_t) / mu(a_t|s_t))``, 0 where not ``valid``.

    A step is valid if its action was executed and its successor is known. The observation that a game was
    cut off at (a time limit) is stored, but no action follows it: c = 0 there makes the step before it
    bootstrap from V of that observation, and keeps the next game out. Munos et al. 2016, eq. 4.

    Args:
        log_pi: [B, T].
        log_mu: [B, T].
        valid: [B, T] bool.
        lambda_: 0 to 1.

    Returns:
        [B, T], without gradient.

    Raises:
        ValueError: shapes that do not agree.
    """
    require("log_mu", log_mu, require_matrix("log_pi", log_pi, "B, T"))
    require("valid", valid, tuple(log_pi.shape))
    return torch.where(valid, lambda_ * clipped_ratio(log_pi, log_mu), 0.0)


def retrace_returns(q_t: Tensor, v_t: Tensor, r_t: Tensor, discount_t: Tensor, c_t: Tensor) -> Tensor:
    """``G_{t-1} = r_t + d_t (V(s_t) + c_t (G_t - q(s_t, a_t)))``, and ``G_{K-1} = r_K + d_K V(s_K)``.

    Munos et al. 2016, eq. 3; with Muesli's one-step model values as q and V (Hessel et al. 2021, section
    4.4). Not off by a power: each step multiplies by its own discount.

    Args:
        q_t: [B, K-1] of the actions taken at 1..K-1.
        v_t: [B, K] ``sum_a pi(a|s) q(s, a)`` at 1..K.
        r_t: [B, K] rewards that follow the actions at 0..K-1.
        discount_t: [B, K].
        c_t: [B, K-1], of :func:`trace_weights`; 0 cuts the trace.

    Returns:
        [B, K] returns of the actions at 0..K-1, without gradient.

    Raises:
        ValueError: shapes that do not agree, or K = 0.
    """
    batch, steps = require_matrix("r_t", r_t, "B, K")
    if steps < 1:
        raise ValueError(f"r_t must hold at least one step, got {list(r_t.shape)}")
    for name, tensor, length in (
        ("v_t", v_t, steps),
        ("discount_t", discount_t, steps),
        ("q_t", q_t, steps - 1),
        ("c_t", c_t, steps - 1),
    ):
        require(name, tensor, (batch, length))
    with torch.no_grad():
        expected = r_t + discount_t * v_t
        decay = discount_t[:, :-1] * c_t
        returns = [expected[:, -1]]
        for now in range(steps - 2, -1, -1):
            error = returns[-1] - q_t[:, now]
            returns.append(torch.addcmul(expected[:, now], decay[:, now], error))
        return torch.stack(returns[::-1], dim=1)
