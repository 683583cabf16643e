"""Muesli as a learner: networks, optimiser and running scale; one update from a batch of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reincarnate import acting
from reincarnate.acting import ActRule
from reincarnate.config_muesli import MuesliConfig
from reincarnate.device import Precision, autocast
from reincarnate.losses import AdvantageMoment, Support, action_windows
from reincarnate.networks import MuesliNetwork, average_, target_of
from reincarnate.students.muesli.objective import distillation, muesli_losses
from reincarnate.students.muesli.optimizer import ClippedAdam
from reincarnate.students.muesli.targets import make_targets, prior_of
from reincarnate.types import OutputKind, SequenceBatch


class Muesli:
    """Online network, and its average that acts and gives the targets.

    Args:
        network: freshly built, on its device.
        settings: of the update.
        support: of rewards and values; as many bins as the network has.
        learning_rate: of the first update.
        eps: of Adam.
        precision: of the trunk.
        distill_weight: lambda_0 of the teacher's KL.
        generator: draws actions and samples, on the network's device.
    """

    outputs: OutputKind = "policy_logits"
    temperature = 1.0

    def __init__(
        self,
        network: MuesliNetwork,
        settings: MuesliConfig,
        *,
        support: Support,
        learning_rate: float = 3e-4,
        eps: float = 1e-8,
        precision: Precision = "fp32",
        distill_weight: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self.online, self.target = network, target_of(network)
        self.network: nn.Module = self.target  # what acts, and what is saved as the student
        self._settings, self._support = settings, support
        self._precision, self._generator = precision, generator
        self._distill = distill_weight
        self._device = next(network.parameters()).device
        self.moment = AdvantageMoment.zero(self._device)
        self.seen = torch.zeros((), dtype=torch.float64, device=self._device)  # observations normalised by
        self.optimizer = ClippedAdam(
            network.parameters(),
            learning_rate,
            eps=eps,
            weight_decay=settings.weight_decay,
            max_update=settings.largest_update,
        )

    def initial_state(self, num_envs: int) -> Tensor | None:
        """[num_envs, 2, units] zeros; None for a feed-forward network."""
        return self.target.initial_state(num_envs)

    @torch.no_grad()
    def play(
        self, obs: Tensor, state: Tensor | None, game_start: Tensor, explore: ActRule
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One forward pass of the target network, no search (Hessel et al. 2021, section 5).

        Args:
            obs: [N, *obs_shape].
            state: [N, 2, units], or None.
            game_start: [N] bool, where the state is reset.
            explore: usually ``sample``.

        Returns:
            action [N] int64, behaviour log-policy [N, A] under sampling, the next state.
        """
        with autocast(self._device, self._precision):
            logits, state = self.target.step(obs, state, game_start)
        action, _ = acting.act(logits, explore, self.temperature, self._generator)
        return action, torch.log_softmax(logits, dim=1), state

    def update(
        self, batch: SequenceBatch, teacher_log_policy: Tensor | None, coefficient: Tensor
    ) -> dict[str, Tensor]:
        """One step; metrics are 0-d device tensors. ``teacher_log_policy`` is [B, T, A] or None."""
        self.optimizer.zero_grad()
        self._observe(batch)
        with autocast(self._device, self._precision):
            root = self.online(batch.obs, batch.state, batch.game_start)
            prior = prior_of(self.target, batch, self._support, self._settings.discount)
        online = torch.log_softmax(root.policy_logits, dim=2)
        targets = make_targets(self._settings, batch, prior, online, self.moment, self._generator)
        losses = muesli_losses(
            self._settings, self.online, root, batch, targets, self._support, self._generator
        )
        loss = losses.total(self._settings)
        metrics = {f"{name}_loss": value.detach() for name, value in vars(losses).items()}
        if teacher_log_policy is not None:
            divergence = distillation(teacher_log_policy, root, batch)
            loss = loss + self._distill * coefficient * divergence
            metrics["distill_loss"] = divergence.detach()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        average_(self.target, self.online, self._settings.target_rate)
        entropy = -(online.exp() * online).sum(dim=2).mean().detach()
        return metrics | {
            "loss": loss.detach(),
            "sigma": targets.sigma,
            "entropy": entropy,
            "importance_weight": targets.mean_weight,
            "value_mean": prior.value.mean(),
        }

    def _observe(self, batch: SequenceBatch) -> None:
        """Both networks normalise by what was learnt from so far."""
        ours, theirs = self.online.normaliser, self.target.normaliser
        if ours is None or theirs is None:
            return
        ours.observe(batch.obs.flatten(0, 1), self.seen)
        theirs.mean.copy_(ours.mean)
        theirs.variance.copy_(ours.variance)

    def bare_passes(self, batch: SequenceBatch) -> None:
        """Both networks over the batch and the model from its roots, forward and back; nothing is learnt."""
        self.optimizer.zero_grad()
        with autocast(self._device, self._precision):
            root = self.online(batch.obs, batch.state, batch.game_start)
            with torch.no_grad():
                self.target.expand(
                    self.target(batch.obs, batch.state, batch.game_start).features.flatten(0, 1)
                )
        roots = min(self._settings.num_roots or batch.action.shape[1], batch.action.shape[1] - 1)
        actions = action_windows(batch.action, self._settings.unroll_steps)[:, :roots]
        model = self.online.unroll(root.features[:, :roots].flatten(0, 1), actions.flatten(0, 1))
        outputs = (root.policy_logits, root.value_logits, *vars(model).values())
        torch.stack([each.sum() for each in outputs]).sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()

    def set_learning_rate(self, rate: float) -> None:
        """In place, so that a captured update follows."""
        self.optimizer.rate.fill_(rate)

    def state_dict(self) -> dict[str, Any]:
        """Both networks, the optimiser and the running scale."""
        return {
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "moment": self.moment.state_dict(),
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, in place."""
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.moment.load_state_dict(state["moment"])
        self.seen.copy_(state["seen"])
