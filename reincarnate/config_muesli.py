"""Every number of Muesli, with where it comes from, and every ablation as a switch: ``--set muesli.*``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from reincarnate.errors import UserError


@dataclass(frozen=True)
class MuesliConfig:
    """Update, network and data. "confirmed": in the paper's main text; the rest is second-hand or a choice.

    Seen values are documented in docs/students/muesli.md.
    """

    discount: float = 0.995  # second-hand
    trace_lambda: float = 0.95  # second-hand, for the paper's large setting; unknown for the small one
    retrace_q: bool = True  # false: returns bootstrap from v, not from the model's q (figure 6a)
    retrace_policy: Literal["prior", "online"] = "prior"  # the paper does not name it
    value_target: Literal["returns", "clipped_rho"] = "returns"  # the paper does not say
    unroll_steps: int = 5  # K, confirmed
    num_roots: int | None = None  # states per sequence that the model is unrolled from; None: all of them
    advantage_decay: float = 0.99  # beta of the running second moment, second-hand
    advantage_eps: float = 1e-12  # second-hand
    normalise_advantage: bool = True
    centre_advantage: bool = (
        False  # minus its running mean; of CMPO minus its mean over actions. Not the paper's
    )
    policy_gradient: bool = True  # false: the policy learns from one-step q-values alone (figure 6a)
    leave_one_out: bool = False  # beta-LOO correction of the clipped weights
    cmpo: bool = True  # false: plain policy gradient
    cmpo_clip: float | None = 1.0  # c, confirmed; None: advantages are not clipped
    cmpo_weight: float = 1.0  # lambda, confirmed
    cmpo_samples: int | None = None  # None: all actions; the paper's small setting has 16, second-hand
    cmpo_z_init: float = 1.0  # confirmed
    prior_behaviour: float = 0.03  # share of the behaviour's policy in the prior, second-hand
    prior_uniform: float = 0.003  # share of the uniform policy, second-hand
    model_policy: bool = True  # false: the model has no policy head (figure 7a)
    policy_weight: float = 3.0  # of policy gradient, regulariser and model policy; uncertain: 1 or 3
    value_weight: float = 0.25  # second-hand
    reward_weight: float = 1.0  # second-hand
    target_rate: float = 0.1  # of the target network's average after every update, second-hand
    weight_decay: float = 0.0  # second-hand, of the small setting
    max_update: float | None = 1.0  # of Adam's step before the learning rate; None: Adam. Second-hand
    sequence_length: int = 30  # rows T of a sequence, the last one only to bootstrap; second-hand
    replay_fraction: float = 0.75  # of a batch; the rest is fresh, each row used once. Confirmed
    core_units: int | None = None  # of the LSTM that reads the trunk; None: none. The paper's agent has one
    model_units: int = 512  # of the model's LSTM; 1024 second-hand
    bins: int = 601  # of rewards and values, second-hand
    support_limit: float = 300.0  # second-hand
    normalise_observations: bool = True  # of vectors, by running mean and variance; images are not
    wide_trunk: bool = False  # impala of (64, 128, 128, 64) channels, 512 features; second-hand

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"muesli.{name} must be greater than 0, got {value!r}")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise UserError(f"muesli.{name} must be 0 or more, got {getattr(self, name)!r}")
        for name in ("discount", "trace_lambda", "advantage_decay", "target_rate", "replay_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"muesli.{name} must be between 0 and 1, got {getattr(self, name)!r}")
        shares = (self.prior_behaviour, self.prior_uniform)
        if min(shares) < 0 or sum(shares) > 1 or math.isnan(sum(shares)):
            raise UserError(f"muesli.prior_behaviour and prior_uniform must be shares, got {shares}")
        for name, least in (("sequence_length", 2), ("bins", 2)):
            if getattr(self, name) < least:
                raise UserError(f"muesli.{name} must be at least {least}, got {getattr(self, name)!r}")
        for name, most in _AT_MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise UserError(f"muesli.{name} must be at most {most:,}, got {value!r}")

    @property
    def clip(self) -> float:
        """``cmpo_clip``, infinite where there is none."""
        return math.inf if self.cmpo_clip is None else self.cmpo_clip

    @property
    def largest_update(self) -> float:
        """``max_update``, infinite where there is none."""
        return math.inf if self.max_update is None else self.max_update


_POSITIVE = (
    "unroll_steps",
    "num_roots",
    "cmpo_clip",
    "cmpo_samples",
    "cmpo_z_init",
    "max_update",
    "core_units",
    "model_units",
    "support_limit",
)

_NOT_NEGATIVE = (
    "advantage_eps",
    "cmpo_weight",
    "policy_weight",
    "value_weight",
    "reward_weight",
    "weight_decay",
)

#: Networks and batches larger than any machine holds.
_AT_MOST = {
    "sequence_length": 100_000,
    "unroll_steps": 1_000,
    "cmpo_samples": 65_536,
    "core_units": 16_384,
    "model_units": 16_384,
    "bins": 100_000,
}

# What the students called muesli have in a preset beyond or instead of the common settings.
_UPDATE: dict[str, Any] = {
    "optimizer.learning_rate": 3e-4,
    "optimizer.learning_rate_final": 0.0,
    "optimizer.adam_eps": 1e-8,
    "optimizer.schedule": "linear",
    "distill.student_temperature": 1.0,
    "online.learning_starts_agent_steps": 0,
}
_QUICK: dict[str, Any] = _UPDATE | {
    "muesli.discount": 0.99,
    "muesli.bins": 61,
    "muesli.support_limit": 30.0,
}
# Few updates: a heavy value loss and a young buffer keep the critic near the policy.
_QUICK_SCRATCH: dict[str, Any] = _QUICK | {
    "optimizer.batch_size": 4,
    "optimizer.learning_rate": 5e-4,
    "online.agent_steps": 150_000,
    "online.replay_capacity_agent_steps": 5_000,
    "muesli.sequence_length": 32,
    "muesli.policy_weight": 1.0,
    "muesli.value_weight": 16.0,
    "muesli.centre_advantage": True,
    "muesli.model_units": 64,
    "muesli.num_roots": 8,
}
# Few minutes on images: 128 frames an update, the model from some of them.
_QUICK_QDAGGER: dict[str, Any] = _QUICK | {
    "optimizer.batch_size": 8,
    "optimizer.learning_rate": 5e-4,
    "offline.updates": 2_000,
    "online.agent_steps": 20_000,
    "muesli.sequence_length": 16,
    "muesli.model_units": 128,
    "muesli.num_roots": 5,
}
_DEFAULT: dict[str, Any] = _UPDATE | {"optimizer.batch_size": 32, "muesli.core_units": 256}
_PAPER: dict[str, Any] = _UPDATE | {
    "optimizer.batch_size": 96,
    "online.agent_steps": 50_000_000,
    "online.replay_capacity_agent_steps": 1_500_000,
    "muesli.core_units": 512,
    "muesli.model_units": 1024,
    "muesli.wide_trunk": True,
    "muesli.cmpo_samples": 16,
}
MUESLI_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "muesli": {
        "quick": _QUICK_SCRATCH,
        "default": _DEFAULT,
        "paper": _PAPER,
    },
    "qdagger-muesli": {
        "quick": _QUICK_QDAGGER,
        "default": _DEFAULT | {"offline.updates": 50_000},
        "paper": _PAPER | {"online.agent_steps": 2_500_000, "offline.updates": 100_000},
    },
}
# Without a teacher, whose environment would win: that of the published results.
MUESLI_ENVIRONMENT: dict[str, dict[str, Any]] = {"paper": {"env.preset": "machado"}}
