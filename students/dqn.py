"""DQN as a learner: n-step temporal differences plus an optional distillation term.

``loss = TD + lambda_0 * m * KL(pi_T || softmax(Q / temperature))`` (Agarwal et al. 2022, eq. 2). Alone it is
the DQN of Mnih et al. 2015; with a teacher it is QDagger's student.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reincarnate import acting
from reincarnate.acting import ActRule
from reincarnate.config import RunConfig
from reincarnate.device import Precision, autocast, make_adam
from reincarnate.losses import kl, log_policy, q_targets, td_loss
from reincarnate.networks import Network, build_network, default_options
from reincarnate.ranks import average_gradients
from reincarnate.students.student import (
    QDAGGER_METHOD,
    SCRATCH_METHOD,
    TRANSITIONS,
    BatchSpec,
    StudentEntry,
    lay_out,
    network_name,
)
from reincarnate.types import Batch, EnvSpec, OutputKind, State


class Dqn:
    """Online and target network of one shape, and Adam; satisfies ``Student``.

    Args:
        config: of the run; ``td``, ``distill``, ``optimizer`` and ``network`` are read.
        spec: the environment.
        device: of networks and batches.
        precision: of convolutions and linear layers but the head.
        generator: draws weights and actions, on ``device``.

    Raises:
        UserError: the network cannot take the environment's observations.
    """

    outputs: OutputKind = "q_values"
    batch_spec: BatchSpec = TRANSITIONS

    def __init__(
        self,
        config: RunConfig,
        spec: EnvSpec,
        device: torch.device,
        precision: Precision,
        generator: torch.Generator | None,
    ) -> None:
        self._td, self._lambda = config.td, config.distill.coefficient
        self._device, self._precision, self._generator = device, precision, generator
        self.temperature = config.distill.student_temperature
        self.network_name = network_name(config, spec)
        self.network_options: Mapping[str, Any] = default_options(self.network_name)
        self.network = self._build(spec)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        optimizer = config.optimizer
        self.optimizer = make_adam(
            self.network.parameters(), optimizer.learning_rate, optimizer.adam_eps, device
        )

    def initial_state(self, num_envs: int) -> State:
        """None: the network remembers nothing."""
        return None

    @torch.inference_mode()
    def act(self, obs: Tensor, state: State, explore: ActRule) -> tuple[Tensor, Tensor, State]:
        """Obs [N, *obs_shape] -> action [N] int64, behaviour log-probability [N], None."""
        with autocast(self._device, self._precision):
            q = self.network(obs)
        action, log_prob = acting.act(q, explore, self.temperature, self._generator)
        return action, log_prob, state

    def update(
        self, batch: Batch, teacher_log_policy: Tensor | None, coefficient: Tensor
    ) -> dict[str, Tensor]:
        """One Adam step; metrics are 0-d device tensors (see docs/qdagger.md)."""
        self.optimizer.zero_grad(set_to_none=True)
        q, target = self._values(batch)
        td = td_loss(q, batch.action, target, self._td.loss).mean()
        loss, metrics = td, {"td_loss": td.detach()}
        if teacher_log_policy is not None:
            divergence = kl(teacher_log_policy, log_policy(q, self.temperature)).mean()
            loss = td + self._lambda * coefficient * divergence
            metrics["distill_loss"] = divergence.detach()
            metrics["teacher_agreement"] = _agreement(q, teacher_log_policy)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(self.network.parameters())
        self.optimizer.step()
        q = q.detach()
        return metrics | {"loss": loss.detach(), "q_mean": q.mean(), "q_max": q.amax(dim=1).mean()}

    @torch.no_grad()
    def sync_target(self) -> None:
        """Copy the online network to the target network, in place."""
        torch._foreach_copy_(list(self.target.parameters()), list(self.network.parameters()))

    def set_learning_rate(self, rate: float) -> None:
        """In place, so that a captured update follows."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)

    def state_dict(self) -> dict[str, Any]:
        """Both networks and the optimiser."""
        return {
            "network": self.network.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; before an update is captured, for the optimiser's tensors move."""
        self.network.load_state_dict(state["network"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _build(self, spec: EnvSpec) -> Network:
        network = build_network(
            self.network_name,
            spec.obs_shape,
            spec.num_actions,
            device=self._device,
            generator=self._generator,
            **self.network_options,
        )
        lay_out(network, spec)
        return network

    def _values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Q-values [B, A] at ``obs``, with their gradient, and targets [B].

        In this order: weights that autocast casts and keeps under ``no_grad`` must not serve the forward pass
        that needs their gradient.
        """
        with autocast(self._device, self._precision):
            q = self.network(batch.obs)
            with torch.no_grad():
                next_q = self.target(batch.next_obs)
                selector_q = self.network(batch.next_obs) if self._td.double_q else None
        return q, q_targets(batch.reward, batch.discount, next_q, selector_q)


def _agreement(q: Tensor, teacher_log_policy: Tensor) -> Tensor:
    """Share of the batch where student and teacher prefer the same action."""
    same = q.detach().argmax(dim=1) == teacher_log_policy.argmax(dim=1)
    return same.to(torch.float32).mean()


_READS = (
    *("network", "td", "optimizer", "distill.student_temperature"),
    *("online.epsilon_start", "online.epsilon_end", "online.epsilon_decay_agent_steps"),
    "online.target_update_every_agent_steps",
)
SCRATCH = StudentEntry(
    name="dqn",
    summary="n-step DQN from scratch, no teacher",
    paper="Mnih et al. 2015",
    method=SCRATCH_METHOD,
    factory=Dqn,
    reads=_READS,
)
QDAGGER = StudentEntry(
    name="qdagger-dqn",
    summary="DQN reincarnated from a teacher: offline on its data, then online, with annealed distillation",
    paper="Agarwal et al. 2022, arXiv 2206.01626",
    method=QDAGGER_METHOD,
    factory=Dqn,
    reads=(*_READS, "offline.target_update_every_updates"),
)
