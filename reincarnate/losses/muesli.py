"""Muesli's policy losses (Hessel et al. 2021, arXiv 2104.06159): policy gradient and CMPO regulariser.

Everything that comes from the target network, and every return, advantage and weight, is a constant here:
gradients flow into ``log_policy`` alone. Leading sizes [...] are those of the batch, [B] or [B, T].
``advantage`` means divided by its running scale (:mod:`reincarnate.losses.advantage`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reincarnate.losses.distill import kl
from reincarnate.losses.retrace import clipped_ratio
from reincarnate.losses.shapes import require, require_last


def one_step_q(reward: Tensor, value: Tensor, discount: float) -> Tensor:
    """``q(s, a) = r_1(s, a) + gamma v_1(s, a)`` of the target network's model (Hessel et al. 2021, eq. 14).

    gamma is the same everywhere: the model says itself that a game ends, by v_1 = 0.

    Args:
        reward: [..., A] predicted for each action.
        value: [..., A] predicted for the state behind each action.
        discount: gamma.

    Returns:
        [..., A].

    Raises:
        ValueError: shapes that do not agree.
    """
    require("value", value, tuple(reward.shape))
    return reward + discount * value


def mix_prior(
    log_target: Tensor, log_behaviour: Tensor, behaviour: float = 0.03, uniform: float = 0.003
) -> Tensor:
    """Log of ``(1 - b - u) pi_target + b pi_b + u / A``, the prior inside pi_CMPO.

    A little of what acted and of chance keeps actions alive that the target network has given up (weights
    of another implementation that cites the paper's appendix F.2; unconfirmed).

    Args:
        log_target: [..., A] log-policy of the target network.
        log_behaviour: [..., A] log-policy that acted.
        behaviour: b.
        uniform: u.

    Returns:
        [..., A] log-policy.

    Raises:
        ValueError: shapes that do not agree, or weights that are no probabilities.
    """
    require("log_behaviour", log_behaviour, tuple(log_target.shape))
    rest = 1.0 - behaviour - uniform
    if min(rest, behaviour, uniform) < 0:
        raise ValueError(f"weights must be 0 or more and sum to at most 1, got {behaviour} and {uniform}")
    mixture = rest * log_target.exp() + behaviour * log_behaviour.exp() + uniform / log_target.shape[-1]
    return mixture.log()


def cmpo_log_policy(log_prior: Tensor, advantage: Tensor, clip: float = 1.0) -> Tensor:
    """``pi_CMPO(a|s) = pi_prior(a|s) exp(clip(adv(s, a), -c, c)) / z(s)`` (Hessel et al. 2021, eq. 9).

    Its total variation from the prior never exceeds tanh(c / 2), whatever the advantages (theorem 4.1).

    Args:
        log_prior: [..., A] log-policy; -inf is an action that is never taken.
        advantage: [..., A] ``(q(s, a) - v(s)) / sigma``.
        clip: c.

    Returns:
        [..., A] log-policy, without gradient.

    Raises:
        ValueError: shapes that do not agree.
    """
    require("advantage", advantage, tuple(log_prior.shape))
    return torch.log_softmax(log_prior.detach() + advantage.detach().clamp(-clip, clip), dim=-1)


def cmpo_loss(cmpo: Tensor, log_policy: Tensor) -> Tensor:
    """``KL(pi_CMPO || pi)`` per state, over all actions: the regulariser (Hessel et al. 2021, section 4.2).

    Also the model's policy loss (eq. 13). The target stands first; MPO has the other direction.

    Args:
        cmpo: [..., A] of :func:`cmpo_log_policy`.
        log_policy: [..., A] of the online network, or of its model.

    Returns:
        [...] nats, 0 or more.

    Raises:
        ValueError: shapes that do not agree.
    """
    require("log_policy", log_policy, tuple(cmpo.shape))
    leading, actions = require_last("cmpo", cmpo, "A"), cmpo.shape[-1]
    return kl(cmpo.detach().reshape(-1, actions), log_policy.reshape(-1, actions)).reshape(leading)


def sample_actions(log_policy: Tensor, samples: int, generator: torch.Generator | None = None) -> Tensor:
    """``samples`` actions per state, independent, by the Gumbel-max trick (nothing is read by the host).

    Args:
        log_policy: [..., A].
        samples: N.
        generator: on the policy's device; None uses PyTorch's own.

    Returns:
        [..., N] int64.
    """
    leading, actions = require_last("log_policy", log_policy, "A"), log_policy.shape[-1]
    shape = (*leading, samples, actions)
    noise = torch.empty(shape, dtype=log_policy.dtype, device=log_policy.device)
    noise.exponential_(generator=generator)
    return (log_policy.detach().unsqueeze(-2) - noise.log()).argmax(dim=-1)


def sampled_cmpo_weights(advantage: Tensor, clip: float = 1.0, z_init: float = 1.0) -> Tensor:
    """``e_k / z_k`` with ``e_k = exp(clip(adv(s, a_k)))`` and ``z_k = (z_init + sum_{j != k} e_j) / N``.

    The normaliser leaves out the sample's own weight, so that it is independent of it (Hessel et al. 2021,
    eq. 12). With one sample z is z_init: that action's exp(clip(adv)) alone.

    Args:
        advantage: [..., N] of actions that the prior drew.
        clip: c.
        z_init: a guess of z(s), worth one sample.

    Returns:
        [..., N], without gradient.
    """
    samples = advantage.shape[-1]
    weights = advantage.detach().clamp(-clip, clip).exp()
    others = z_init + weights.sum(dim=-1, keepdim=True) - weights
    return weights * samples / others


def sampled_cmpo_loss(log_policy: Tensor, action: Tensor, weight: Tensor) -> Tensor:
    """``- (1 / N) sum_k w_k log pi(a_k|s)`` per state: CMPO's regulariser from samples of the prior.

    Hessel et al. 2021, eq. 11; KL(pi_CMPO || pi) up to the entropy of pi_CMPO, which has no gradient. The
    minus sign follows from that KL.

    Args:
        log_policy: [..., A].
        action: [..., N] int64 of :func:`sample_actions`.
        weight: [..., N] of :func:`sampled_cmpo_weights`.

    Returns:
        [...].

    Raises:
        ValueError: shapes that do not agree.
    """
    leading = require_last("log_policy", log_policy, "A")
    require("action", action, (*leading, action.shape[-1]))
    require("weight", weight, tuple(action.shape))
    return -(weight.detach() * log_policy.gather(-1, action)).mean(dim=-1)


def policy_gradient_loss(
    log_policy: Tensor, action: Tensor, advantage: Tensor, log_behaviour: Tensor
) -> Tensor:
    """``- min(1, pi(a|s) / mu(a|s)) adv log pi(a|s)`` per step, with the weight as a constant.

    Its gradient is ``- min(1, pi / mu) adv grad log pi(a|s)``: the estimator of Hessel et al. 2021, eq. 10,
    with the importance weight clipped to [0, 1].

    Args:
        log_policy: [..., A] of the online network.
        action: [...] int64, taken.
        advantage: [...] ``(G - v(s)) / sigma``.
        log_behaviour: [...] log-probability of ``action`` under the policy that acted.

    Returns:
        [...].

    Raises:
        ValueError: shapes that do not agree.
    """
    leading = require_last("log_policy", log_policy, "A")
    for name, tensor in (("action", action), ("advantage", advantage), ("log_behaviour", log_behaviour)):
        require(name, tensor, leading)
    chosen = log_policy.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return -clipped_ratio(chosen, log_behaviour) * advantage.detach() * chosen


def expected_advantage_loss(log_policy: Tensor, advantage: Tensor) -> Tensor:
    """``- sum_a pi(a|s) adv(s, a)`` per state.

    The all-action half of the leave-one-out policy gradient (beta-LOO, Gruslys et al. 2018, eq. 2), which
    corrects the bias of clipped weights; the other half is :func:`policy_gradient_loss` with the advantage
    ``(G - q(s, a)) / sigma`` of the action taken.

    Args:
        log_policy: [..., A].
        advantage: [..., A].

    Returns:
        [...].

    Raises:
        ValueError: shapes that do not agree.
    """
    require("advantage", advantage, tuple(log_policy.shape))
    return -(log_policy.exp() * advantage.detach()).sum(dim=-1)


def largest_total_variation(clip: float) -> float:
    """``tanh(c / 2)``: how far pi_CMPO can be from its prior (Hessel et al. 2021, theorem 4.1)."""
    return math.tanh(clip / 2.0)
