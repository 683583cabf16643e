"""What a teacher is: a frozen network, what its weights assume, and where it came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reincarnate import acting
from reincarnate.acting import ActRule
from reincarnate.networks import Network, build_network
from reincarnate.types import EnvSpec, OutputKind, State


@dataclass(frozen=True)
class TeacherSpec:
    """What the weights are and what they assume; enough to build the network and the environments."""

    env: EnvSpec
    outputs: OutputKind  # what the head gives: Q-values or policy logits
    network: str  # a name that build_network knows
    network_options: dict[str, Any]  # its options, plain JSON values
    algorithm: str  # what trained it, e.g. "dqn", "ppo", "qdagger-dqn"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self) | {"env": self.env.to_dict()}

    def build(self, device: torch.device | str = "cpu") -> Network:
        """A network of this shape, its weights drawn at random (``"meta"``: without any).

        Raises:
            UserError: a network or an option that does not exist.
        """
        return build_network(
            self.network, self.env.obs_shape, self.env.num_actions, device=device, **self.network_options
        )


@dataclass(frozen=True)
class Reported:
    """A return that somebody claims for this teacher."""

    mean: float
    source: str  # where the claim stands, e.g. "model card"
    std: float | None = None
    n: int | None = None  # games behind it
    act: str | None = None  # acting rule it was measured with, e.g. "epsilon=0.01"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        spread = "" if self.std is None else f" ± {self.std:.1f}"
        return f"{self.mean:.1f}{spread} ({self.source})"


@dataclass(frozen=True)
class TeacherCard:
    """Where a teacher came from."""

    ref: str  # as the user gave it
    resolved: str  # what it turned out to be: repository, folder or bundled name
    revision: str | None  # commit of a Hub repository
    file: str  # name of the file inside it
    sha256: str
    format: str  # a name of reincarnate.teachers.formats.FORMATS
    reported: Reported | None = None
    assumed: dict[str, str] = field(default_factory=dict)  # EnvSpec field -> why this value is believed

    @property
    def name(self) -> str:
        """What lines call it: a repository as it was resolved, what is on this machine as it was named."""
        return self.ref if self.revision is None else self.resolved


class Teacher:
    """A policy that does not learn any more.

    ``temperature`` turns outputs into a policy, softmax(outputs / temperature); it starts as 0.1 for
    Q-values and 1.0 for policy logits and may be set.
    """

    def __init__(self, spec: TeacherSpec, card: TeacherCard, state_dict: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.card = card
        self.temperature = acting.default_temperature(spec.outputs)
        network = spec.build("meta")
        network.load_state_dict(dict(state_dict), strict=True, assign=True)
        self.network = network.eval().requires_grad_(False)
        self._policy_sha256: str | None = None

    def to(self, device: torch.device | str) -> Teacher:
        """Move the weights; returns this teacher."""
        self.network.to(device)
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.network.parameters()).device

    @property
    def policy_sha256(self) -> str:
        """64 hex digits that no other policy has: of the file's hash, the network's shape, all its numbers.

        Beside some checkpoints lie statistics of observations, which are part of the policy and not of the
        file.
        """
        if self._policy_sha256 is None:  # the weights are frozen
            spec = self.spec
            what = [self.card.sha256, spec.network, spec.network_options, spec.outputs]
            digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
            for name, value in sorted(self.network.state_dict().items()):
                digest.update(name.encode())
                digest.update(value.cpu().contiguous().numpy().tobytes())
            self._policy_sha256 = digest.hexdigest()
        return self._policy_sha256

    @torch.inference_mode()
    def outputs(self, obs: Tensor) -> Tensor:
        """Raw Q-values or policy logits [B, A] float32 of obs [B, *obs_shape] (uint8 pixels or float32)."""
        outputs: Tensor = self.network(obs.to(self.device, non_blocking=True))
        return outputs.float()

    @property
    def recurrent(self) -> bool:
        """Whether what it does depends on what it saw before: then only :meth:`step` works."""
        return self.network.core is not None

    def initial_state(self, num_envs: int) -> State:
        """State [N, 2, units] of ``num_envs`` environments at the start of a game; None if feed-forward."""
        return self.network.initial_state(num_envs)

    @torch.inference_mode()
    def step(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Raw outputs [N, A] float32 of obs [N, *obs_shape], and the next state."""
        if not self.recurrent:
            return self.outputs(obs), state
        outputs, state = self.network.step(obs.to(self.device, non_blocking=True), state)
        return outputs.float(), state

    @torch.no_grad()  # not inference mode: losses may keep the result for their backward pass
    def log_policy(self, outputs: Tensor, temperature: float | None = None) -> Tensor:
        """Log-probabilities [B, A] float32 of outputs [B, A], at the teacher's temperature unless given."""
        chosen = self.temperature if temperature is None else temperature
        return torch.log_softmax(outputs.float() / chosen, dim=1)

    def act(self, obs: Tensor, rule: ActRule, generator: torch.Generator | None) -> Tensor:
        """Actions [B] int64 for obs [B, *obs_shape]; ``generator`` lives on the teacher's device."""
        return acting.act(self.outputs(obs), rule, self.temperature, generator)[0]

    def to_json(self) -> dict[str, Any]:
        """What ``teacher.json`` and ``teachers show --json`` hold; plain JSON values."""
        card = dataclasses.asdict(self.card)
        order = ("ref", "resolved", "revision", "file", "sha256", "format")
        return {name: card[name] for name in order} | {
            "policy_sha256": self.policy_sha256,
            "algorithm": self.spec.algorithm,
            "architecture": _architecture(self.spec),
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "env": self.spec.env.to_dict(),
            "reported": card["reported"],
            "assumed": card["assumed"],
        }


def _architecture(spec: TeacherSpec) -> str:
    """E.g. ``nature`` or ``mlp (hidden=[120, 84], activation=relu)``."""
    options = ", ".join(f"{name}={value}" for name, value in spec.network_options.items())
    return f"{spec.network} ({options})" if options else spec.network
