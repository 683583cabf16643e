"""Muesli as students: from scratch, and reincarnated from a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reincarnate.acting import ActRule
from reincarnate.config import RunConfig
from reincarnate.config_muesli import MuesliConfig
from reincarnate.device import Precision
from reincarnate.errors import UserError
from reincarnate.losses import Support
from reincarnate.networks import Network, acting_network, build_muesli_network, default_options
from reincarnate.replay import Extras
from reincarnate.students.muesli.learner import Muesli
from reincarnate.students.student import (
    QDAGGER_METHOD,
    SCRATCH_METHOD,
    BatchSpec,
    StudentEntry,
    lay_out,
    network_name,
)
from reincarnate.types import EnvSpec, State


class MuesliStudent(Muesli):
    """The learner under the settings of a run; satisfies ``SequenceStudent``.

    The student that is evaluated and saved is the acting part of the *target* network: trunk, LSTM and
    policy, as a network of the common kind. The model is in checkpoints only.

    Args:
        config: of the run; ``muesli``, ``distill``, ``optimizer`` and ``network`` are read.
        spec: the environment.
        device: of networks and batches.
        precision: of the trunk.
        generator: draws weights, actions and samples, on ``device``.

    Raises:
        UserError: the network cannot take the environment's observations.
    """

    network: Network

    def __init__(
        self,
        config: RunConfig,
        spec: EnvSpec,
        device: torch.device,
        precision: Precision,
        generator: torch.Generator | None,
    ) -> None:
        muesli = config.muesli
        self.network_name = network_name(config, spec)
        trunk = _trunk_options(self.network_name, muesli.wide_trunk)
        core = {} if muesli.core_units is None else {"core": muesli.core_units}
        normalise = {"epsilon": 1e-8, "clip": 10.0} if _normalises(self.network_name, muesli) else None
        statistics = {} if normalise is None else {"normalise": normalise}
        self.network_options: Mapping[str, Any] = trunk | core | statistics
        self.batch_spec = BatchSpec(muesli.sequence_length, muesli.replay_fraction, extras(config, spec))
        network = build_muesli_network(
            self.network_name,
            spec.obs_shape,
            spec.num_actions,
            device=device,
            generator=generator,
            core=muesli.core_units,
            model=muesli.model_units,
            bins=muesli.bins,
            trunk=trunk,
            normalise=normalise,
        )
        lay_out(network, spec)
        super().__init__(
            network,
            muesli,
            support=Support(muesli.support_limit, muesli.bins),
            learning_rate=config.optimizer.learning_rate,
            eps=config.optimizer.adam_eps,
            precision=precision,
            distill_weight=config.distill.coefficient,
            generator=generator,
        )
        self.network = acting_network(self.target)

    def act(self, obs: Tensor, state: State, explore: ActRule) -> tuple[Tensor, Tensor, State]:
        """Obs [N, *obs_shape] -> action [N] int64, its log-probability [N] when sampled, the next state."""
        action, log_policy, state = self.act_with_policy(obs, state, explore)
        return action, log_policy.gather(1, action[:, None])[:, 0], state

    def act_with_policy(self, obs: Tensor, state: State, explore: ActRule) -> tuple[Tensor, Tensor, State]:
        """As :meth:`act`, with the log-policy [N, A]; who calls it has reset the state at game starts."""
        going_on = torch.zeros(len(obs), dtype=torch.bool, device=obs.device)
        return self.play(obs, state, going_on, explore)

    def sync_target(self) -> None:
        """Nothing: the target network follows at every update."""


def extras(config: RunConfig, spec: EnvSpec) -> Extras:
    """Muesli's own play is stored with its whole policy and its memory."""
    units = config.muesli.core_units
    return Extras(behaviour_log_policy=True, state_shape=None if units is None else (2, units))


def _normalises(network: str, settings: MuesliConfig) -> bool:
    return network == "mlp" and settings.normalise_observations


def _trunk_options(name: str, wide: bool) -> dict[str, Any]:
    if not wide:
        return default_options(name)
    if name == "mlp":
        return default_options(name)  # there are no channels
    if name != "impala":
        raise UserError(f"muesli.wide_trunk is a form of the impala network, not of {name}; leave one out")
    return default_options(name) | {"channels": [64, 128, 128, 64], "hidden": 512}


# It samples its actions, has its own discount, and its target network follows at every update.
_READS = ("network", "muesli", "optimizer")
SCRATCH = StudentEntry(
    name="muesli",
    summary="Muesli from scratch: policy gradient with a learnt model, no teacher",
    paper="Hessel et al. 2021, arXiv 2104.06159",
    method=SCRATCH_METHOD,
    factory=MuesliStudent,
    extras=extras,
    reads=_READS,
)
QDAGGER = StudentEntry(
    name="qdagger-muesli",
    summary="Muesli reincarnated from a teacher: offline on its data, then online, annealed distillation",
    paper="Hessel et al. 2021, arXiv 2104.06159; Agarwal et al. 2022, arXiv 2206.01626",
    method=QDAGGER_METHOD,
    factory=MuesliStudent,
    extras=extras,
    reads=_READS,
)
