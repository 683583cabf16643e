"""Losses: pure functions, batched in, per example out."""

from reincarnate.losses.distill import kl, log_policy
from reincarnate.losses.td import q_targets, td_loss

__all__ = ["kl", "log_policy", "q_targets", "td_loss"]
