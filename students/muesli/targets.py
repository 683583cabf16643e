"""From the target network and a batch to everything that the losses take as constant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reincarnate.config_muesli import MuesliConfig
from reincarnate.losses import (
    AdvantageMoment,
    Support,
    UnrollTargets,
    advantage_centre,
    advantage_scale,
    categorical_mean,
    clipped_ratio,
    cmpo_log_policy,
    masked_mean,
    mix_prior,
    one_step_q,
    retrace_returns,
    sample_actions,
    sampled_cmpo_weights,
    trace_weights,
    unroll_targets,
    update_moment,
    value_target,
)
from reincarnate.networks import MuesliNetwork
from reincarnate.types import SequenceBatch


@dataclass(frozen=True)
class Prior:
    """What the target network says at all T rows of B sequences."""

    log_policy: Tensor  # [B, T, A]
    value: Tensor  # [B, T] its value head at the state itself
    q: Tensor  # [B, T, A] its model, one step ahead


@dataclass(frozen=True)
class Targets:
    """Constants of one update, at the R = T - 1 rows that have a return (cmpo and samples: at all T)."""

    returns: Tensor  # [B, R]
    value: Tensor  # [B, R] what the value heads learn
    valid: Tensor  # [B, R] bool
    step_advantage: Tensor  # [B, R] of the action taken, for the policy gradient
    advantage: Tensor  # [B, T, A] of every action, for CMPO
    cmpo: Tensor  # [B, T, A] log-policy
    sampled: tuple[Tensor, Tensor] | None  # actions and weights [B, T, N], in the sampled form
    unroll: UnrollTargets  # [B, R, K]
    sigma: Tensor  # 0-d
    mean_weight: Tensor  # 0-d, mean importance weight


@torch.no_grad()
def prior_of(target: MuesliNetwork, batch: SequenceBatch, support: Support, discount: float) -> Prior:
    """One pass of the target network, and its model expanded by every action."""
    root = target(batch.obs, batch.state, batch.game_start)
    model = target.expand(root.features.flatten(0, 1))
    q = one_step_q(
        categorical_mean(model.reward_logits, support),
        categorical_mean(model.value_logits, support),
        discount,
    )
    return Prior(
        torch.log_softmax(root.policy_logits, dim=2),
        categorical_mean(root.value_logits, support),
        q.view(*batch.action.shape, -1),
    )


@torch.no_grad()
def make_targets(
    settings: MuesliConfig,
    batch: SequenceBatch,
    prior: Prior,
    online_log_policy: Tensor,
    moment: AdvantageMoment,
    generator: torch.Generator | None = None,
) -> Targets:
    """Returns, advantages, policies and model targets; ``moment`` is updated first, then used.

    Args:
        settings: of the update.
        batch: B sequences of T rows.
        prior: of the same batch.
        online_log_policy: [B, T, A], read without gradient.
        moment: changed in place.
        generator: draws the actions of the sampled form.
    """
    taken = batch.action.unsqueeze(2)
    valid = batch.executed[:, :-1]
    policy = prior.log_policy if settings.retrace_policy == "prior" else online_log_policy.detach()
    log_pi, log_mu = (x.gather(2, taken)[..., 0] for x in (policy, batch.behaviour_log_policy))
    returns = _returns(settings, batch, prior, policy, log_pi, log_mu)
    value = prior.value[:, :-1]
    update_moment(moment, returns - value, valid, settings.advantage_decay)
    sigma = advantage_scale(moment, settings.advantage_eps)
    if not settings.normalise_advantage:
        sigma = torch.ones_like(sigma)
    baseline = prior.q.gather(2, taken)[:, :-1, 0] if settings.leave_one_out else value
    level = prior.value
    if settings.centre_advantage:
        baseline = baseline + advantage_centre(moment)
        level = (prior.log_policy.exp() * prior.q).sum(dim=2)
    advantage = (prior.q - level.unsqueeze(2)) / sigma
    mixed = mix_prior(
        prior.log_policy, batch.behaviour_log_policy, settings.prior_behaviour, settings.prior_uniform
    )
    learnt = value_target(returns, value, log_pi[:, :-1], log_mu[:, :-1], settings.value_target)
    return Targets(
        returns=returns,
        value=learnt,
        valid=valid,
        step_advantage=(returns - baseline) / sigma,
        advantage=advantage,
        cmpo=cmpo_log_policy(mixed, advantage, settings.clip),
        sampled=_samples(settings, mixed, advantage, generator),
        unroll=unroll_targets(
            batch.reward[:, :-1],
            learnt,
            valid,
            batch.terminal[:, :-1],
            batch.truncated[:, :-1],
            settings.unroll_steps,
        ),
        sigma=sigma,
        mean_weight=masked_mean(clipped_ratio(log_pi, log_mu), batch.executed),
    )


def _returns(
    settings: MuesliConfig,
    batch: SequenceBatch,
    prior: Prior,
    policy: Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
) -> Tensor:
    """Retrace at rows 0..T-2, over the target network's q-values (Hessel et al. 2021, section 4.4).

    Without the model's q, v stands for both V and q: V-trace's returns with an unclipped last step.
    """
    expected = q = prior.value
    if settings.retrace_q:
        expected = (policy.exp() * prior.q).sum(dim=2)
        q = prior.q.gather(2, batch.action.unsqueeze(2))[..., 0]
    traces = trace_weights(log_pi, log_mu, batch.executed, settings.trace_lambda)
    discount = settings.discount * (~batch.terminal[:, :-1]).to(q.dtype)
    return retrace_returns(q[:, 1:-1], expected[:, 1:], batch.reward[:, :-1], discount, traces[:, 1:-1])


def _samples(
    settings: MuesliConfig, mixed: Tensor, advantage: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor] | None:
    if settings.cmpo_samples is None:
        return None
    action = sample_actions(mixed, settings.cmpo_samples, generator)
    weight = sampled_cmpo_weights(advantage.gather(2, action), settings.clip, settings.cmpo_z_init)
    return action, weight
