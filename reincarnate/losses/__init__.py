"""Losses: pure functions, batched in, per example out."""

from reincarnate.losses.advantage import AdvantageMoment, advantage_centre, advantage_scale, update_moment
from reincarnate.losses.categorical import (
    Support,
    categorical_loss,
    categorical_mean,
    signed_hyperbolic,
    signed_parabolic,
    two_hot,
)
from reincarnate.losses.distill import kl, log_policy
from reincarnate.losses.muesli import (
    cmpo_log_policy,
    cmpo_loss,
    expected_advantage_loss,
    largest_total_variation,
    mix_prior,
    one_step_q,
    policy_gradient_loss,
    sample_actions,
    sampled_cmpo_loss,
    sampled_cmpo_weights,
)
from reincarnate.losses.retrace import clipped_ratio, retrace_returns, trace_weights
from reincarnate.losses.td import q_targets, td_loss
from reincarnate.losses.unroll import (
    UnrollTargets,
    action_windows,
    later,
    masked_mean,
    state_windows,
    unroll_targets,
    value_target,
)

__all__ = [
    "AdvantageMoment",
    "Support",
    "UnrollTargets",
    "action_windows",
    "advantage_centre",
    "advantage_scale",
    "categorical_loss",
    "categorical_mean",
    "clipped_ratio",
    "cmpo_log_policy",
    "cmpo_loss",
    "expected_advantage_loss",
    "kl",
    "largest_total_variation",
    "later",
    "log_policy",
    "masked_mean",
    "mix_prior",
    "one_step_q",
    "policy_gradient_loss",
    "q_targets",
    "retrace_returns",
    "sample_actions",
    "sampled_cmpo_loss",
    "sampled_cmpo_weights",
    "signed_hyperbolic",
    "signed_parabolic",
    "state_windows",
    "td_loss",
    "trace_weights",
    "two_hot",
    "unroll_targets",
    "update_moment",
    "value_target",
]
