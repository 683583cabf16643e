"""Muesli's loss: policy gradient, CMPO, and a model of policies, values and rewards K steps ahead.

``L = w_pol (L_PG + lambda L_KL + L_m) + 0.25 L_v + L_r`` (Hessel et al. 2021, section 4; weights: settings).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reincarnate.config_muesli import MuesliConfig
from reincarnate.losses import (
    Support,
    action_windows,
    categorical_loss,
    cmpo_loss,
    expected_advantage_loss,
    kl,
    masked_mean,
    policy_gradient_loss,
    sampled_cmpo_loss,
    state_windows,
)
from reincarnate.networks import ModelOutputs, MuesliNetwork, RootOutputs
from reincarnate.students.muesli.targets import Targets
from reincarnate.types import SequenceBatch


@dataclass(frozen=True)
class Losses:
    """0-d, each a mean over the entries that count; what a run logs by name."""

    policy_gradient: Tensor
    cmpo: Tensor
    model_policy: Tensor
    value: Tensor
    reward: Tensor

    def total(self, settings: MuesliConfig) -> Tensor:
        """The sum that is minimised, without distillation."""
        policy = self.policy_gradient + settings.cmpo_weight * self.cmpo + self.model_policy
        return (
            settings.policy_weight * policy
            + settings.value_weight * self.value
            + settings.reward_weight * self.reward
        )


def muesli_losses(
    settings: MuesliConfig,
    network: MuesliNetwork,
    root: RootOutputs,
    batch: SequenceBatch,
    targets: Targets,
    support: Support,
    generator: torch.Generator | None = None,
) -> Losses:
    """All terms from the online network's outputs at the batch's T rows.

    ``generator`` chooses the roots where ``num_roots`` says so.
    """
    log_policy = torch.log_softmax(root.policy_logits[:, :-1], dim=2)
    zero = log_policy.new_zeros(())
    root_value = categorical_loss(root.value_logits[:, :-1], targets.value, support)
    chosen = _choose_roots(settings.num_roots, targets.valid, generator)
    model = _unroll(settings, network, root, batch, chosen)
    unroll, mask = targets.unroll, targets.valid
    value = categorical_loss(model.value_logits, _pick(unroll.value, chosen), support)
    reward = categorical_loss(model.reward_logits, _pick(unroll.reward, chosen), support)
    values = torch.cat([root_value.flatten(), value.flatten()])
    value_mask = torch.cat([mask.flatten(), _pick(unroll.value_mask, chosen).flatten()])
    return Losses(
        policy_gradient=_policy_gradient(settings, log_policy, batch, targets)
        if settings.policy_gradient
        else zero,
        cmpo=_regulariser(log_policy, targets) if settings.cmpo else zero,
        model_policy=_model_policy(settings, model, targets, chosen) if settings.model_policy else zero,
        value=masked_mean(values, value_mask),
        reward=masked_mean(reward, _pick(unroll.reward_mask, chosen)),
    )


def distillation(teacher_log_policy: Tensor, root: RootOutputs, batch: SequenceBatch) -> Tensor:
    """``KL(pi_T || pi)``, mean over the rows with an action; teacher [B, T, A] -> 0-d."""
    log_policy = torch.log_softmax(root.policy_logits, dim=2)
    per_row = kl(teacher_log_policy.flatten(0, 1), log_policy.flatten(0, 1))
    return masked_mean(per_row, batch.executed.flatten())


def _policy_gradient(
    settings: MuesliConfig, log_policy: Tensor, batch: SequenceBatch, targets: Targets
) -> Tensor:
    action = batch.action[:, :-1]
    log_mu = batch.behaviour_log_policy[:, :-1].gather(2, action.unsqueeze(2))[..., 0]
    loss = policy_gradient_loss(log_policy, action, targets.step_advantage, log_mu)
    if settings.leave_one_out:
        loss = loss + expected_advantage_loss(log_policy, targets.advantage[:, :-1])
    return masked_mean(loss, targets.valid)


def _regulariser(log_policy: Tensor, targets: Targets) -> Tensor:
    if targets.sampled is None:
        loss = cmpo_loss(targets.cmpo[:, :-1], log_policy)
    else:
        action, weight = targets.sampled
        loss = sampled_cmpo_loss(log_policy, action[:, :-1], weight[:, :-1])
    return masked_mean(loss, targets.valid)


def _model_policy(
    settings: MuesliConfig, model: ModelOutputs, targets: Targets, chosen: Tensor | None
) -> Tensor:
    """``mean_k KL(pi_CMPO(s_{t+k}), pi_k)``: the target belongs to the state that really came (eq. 13)."""

    def at_roots(x: Tensor) -> Tensor:
        return _pick(state_windows(x[:, :-1], settings.unroll_steps), chosen)

    log_policy = torch.log_softmax(model.policy_logits, dim=-1)
    if targets.sampled is None:
        loss = cmpo_loss(at_roots(targets.cmpo), log_policy)
    else:
        action, weight = targets.sampled
        loss = sampled_cmpo_loss(log_policy, at_roots(action), at_roots(weight))
    return masked_mean(loss, _pick(targets.unroll.policy_mask, chosen))


def _unroll(
    settings: MuesliConfig,
    network: MuesliNetwork,
    root: RootOutputs,
    batch: SequenceBatch,
    chosen: Tensor | None,
) -> ModelOutputs:
    """The model from every chosen root, all in one batch: outputs [B, roots, K, ...]."""
    features = _pick(root.features[:, :-1], chosen)
    actions = _pick(action_windows(batch.action[:, :-1], settings.unroll_steps), chosen)
    out = network.unroll(features.flatten(0, 1), actions.flatten(0, 1))
    shape = features.shape[:2]
    return ModelOutputs(
        out.reward_logits.view(*shape, settings.unroll_steps, -1),
        out.value_logits.view(*shape, settings.unroll_steps, -1),
        out.policy_logits.view(*shape, settings.unroll_steps, -1),
    )


def _choose_roots(num_roots: int | None, valid: Tensor, generator: torch.Generator | None) -> Tensor | None:
    """Rows [B, num_roots] to unroll from, without repetition, valid ones first; None: all of them."""
    if num_roots is None or num_roots >= valid.shape[1]:
        return None
    draws = torch.rand(valid.shape, generator=generator, device=valid.device)
    return torch.where(valid, draws, 2.0).argsort(dim=1)[:, :num_roots]


def _pick(x: Tensor, chosen: Tensor | None) -> Tensor:
    """x [B, R, ...] at rows chosen [B, roots]."""
    if chosen is None:
        return x
    index = chosen.reshape(*chosen.shape, *(1,) * (x.dim() - 2)).expand(*chosen.shape, *x.shape[2:])
    return x.gather(1, index)
