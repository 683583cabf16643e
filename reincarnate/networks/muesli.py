"""Muesli's network (Hessel et al. 2021, section 5): representation, heads, and a model to unroll.

The representation is a trunk, with an LSTM behind it if wanted; policy and value are read from it, which is
all that acting needs. The model is another LSTM that reads actions and predicts rewards, values and policies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reincarnate.device import autocast
from reincarnate.errors import UserError
from reincarnate.networks.build import build_network, default_options
from reincarnate.networks.lstm import Lstm, cell_step
from reincarnate.networks.network import Network, Trunk, initialise, scale
from reincarnate.networks.normaliser import Normaliser

#: Standard deviation of the heads' weights: at the start every policy and every distribution is near uniform.
HEAD_STD = 1e-2


@dataclass(frozen=True)
class RootOutputs:
    """What the network says at states, [B, T] of them."""

    features: Tensor  # [B, T, F] float32, h(s): where the model starts
    policy_logits: Tensor  # [B, T, A]
    value_logits: Tensor  # [B, T, bins]
    state: Tensor | None  # [B, 2, units] after the last step; None without an LSTM


@dataclass(frozen=True)
class ModelOutputs:
    """What the model says after one or more actions; [...] is [N, K] when unrolled, [N, S] when expanded."""

    reward_logits: Tensor  # [..., bins]
    value_logits: Tensor  # [..., bins]
    policy_logits: Tensor  # [..., A]


class Model(nn.Module):
    """The dynamics LSTM and its heads: ``initial``, ``lstm``, ``reward``, ``value``, ``policy``.

    Its cell starts as a linear function of h(s), normalised to mean 0 and variance 1 over its units, its
    hidden state as the tanh of that (section 4.4 says that the initial state depends on h(s); the tanh is
    that of a later agent of the same group). Without the normalisation values that rise drive the cell into
    saturation within some hundred updates, and the model says the same of every state. Actions enter one-hot.
    """

    def __init__(self, features: int, num_actions: int, units: int, bins: int) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.initial = nn.Linear(features, units)
        self.lstm = Lstm(num_actions, units)
        self.reward = nn.Linear(units, bins)
        self.value = nn.Linear(units, bins)
        self.policy = nn.Linear(units, num_actions)

    def unroll(self, features: Tensor, actions: Tensor) -> ModelOutputs:
        """K steps from every root: features [N, F], actions [N, K] int64 -> outputs [N, K, ...]."""
        state = self._start(features)
        hidden = []
        for read in self.lstm.read(self._one_hot(actions)).unbind(dim=1):
            state = self.lstm(read, state)
            hidden.append(state[:, 0])
        return self._outputs(torch.stack(hidden, dim=1))

    def expand(self, features: Tensor, actions: Tensor | None = None) -> ModelOutputs:
        """One step for several actions of each root; the product with the state is shared by all of them.

        Args:
            features: [N, F].
            actions: [N, S] int64; None is every action, S = A.

        Returns:
            Outputs [N, S, ...].
        """
        hidden, cell = self._start(features).unbind(dim=1)
        if actions is None:
            every = torch.arange(self.num_actions, device=features.device)
            actions = every.expand(len(features), self.num_actions)
        gates = self.lstm.read(self._one_hot(actions)) + self.lstm.recall(hidden)[:, None]
        return self._outputs(cell_step(gates, cell[:, None])[0])

    def _start(self, features: Tensor) -> Tensor:
        cell = nn.functional.layer_norm(self.initial(features), (self.lstm.units,))
        return torch.stack((torch.tanh(cell), cell), dim=1)

    def _one_hot(self, actions: Tensor) -> Tensor:
        every = torch.arange(self.num_actions, device=actions.device)
        return (actions.unsqueeze(-1) == every).to(self.lstm.weight_ih.dtype)

    def _outputs(self, hidden: Tensor) -> ModelOutputs:
        return ModelOutputs(self.reward(hidden), self.value(hidden), self.policy(hidden))


class MuesliNetwork(nn.Module):
    """``trunk``, ``core`` (an LSTM, if wanted), ``policy``, ``value`` and ``model``.

    With an LSTM h(s) is the trunk's output beside the LSTM's: alone the latter saturates while values rise,
    and heads that see nothing else learn next to nothing (docs/students/muesli.md).

    Under :func:`reincarnate.device.autocast` only the trunk runs in bfloat16; recurrences and heads stay in
    float32. With ``feedback`` the LSTM also reads the previous action, one-hot, and the previous reward,
    squashed by h; both are zero at the first step of a game.
    """

    def __init__(
        self,
        trunk: Trunk,
        num_actions: int,
        *,
        core: int | None,
        model: int,
        bins: int,
        feedback: bool,
        normaliser: Normaliser | None = None,
    ) -> None:
        super().__init__()
        if feedback and core is None:
            raise UserError("feedback of actions and rewards needs an LSTM; set core, or feedback to false")
        self.num_actions, self.feedback, self.normaliser = num_actions, feedback, normaliser
        self.trunk = trunk
        extra = num_actions + 1 if feedback else 0
        self.core = None if core is None else Lstm(trunk.features + extra, core)
        self.features = trunk.features if core is None else trunk.features + core
        self.policy = nn.Linear(self.features, num_actions)
        self.value = nn.Linear(self.features, bins)
        self.model = Model(self.features, num_actions, model, bins)

    def initial_state(self, size: int) -> Tensor | None:
        """[size, 2, units] zeros, or None without an LSTM."""
        return None if self.core is None else self.core.initial_state(size)

    def forward(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> RootOutputs:
        """Everything but the model, at every step of B sequences.

        Args:
            obs: [B, T, *obs_shape].
            state: [B, 2, units] before the first step; None is the start of a game.
            first: [B, T] bool, the observations that begin a game; None is none of them.
            previous: with ``feedback``, action [B, T] int64 and reward [B, T] (squashed) that led to each
                observation.

        Returns:
            [B, T, ...] and the state after the last step.
        """
        batch, time = obs.shape[:2]
        flat = obs.flatten(0, 1)
        features = self.trunk(scale(flat) if self.normaliser is None else self.normaliser(flat))
        with autocast(features.device, "fp32"):
            features = features.to(self.value.weight.dtype).unflatten(0, (batch, time))
            if self.core is not None:
                features, state = self._recur(features, state, first, previous)
            return RootOutputs(features, self.policy(features), self.value(features), state)

    def step(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Acting, one forward pass: obs [N, *obs_shape] -> policy logits [N, A] and the next state.

        The other arguments are those of :meth:`forward` without T.
        """
        out = self(
            obs[:, None],
            state,
            None if first is None else first[:, None],
            None if previous is None else (previous[0][:, None], previous[1][:, None]),
        )
        return out.policy_logits[:, 0], out.state

    def unroll(self, features: Tensor, actions: Tensor) -> ModelOutputs:
        """:meth:`Model.unroll` in float32."""
        with autocast(features.device, "fp32"):
            return self.model.unroll(features, actions)

    def expand(self, features: Tensor, actions: Tensor | None = None) -> ModelOutputs:
        """:meth:`Model.expand` in float32."""
        with autocast(features.device, "fp32"):
            return self.model.expand(features, actions)

    def _recur(
        self,
        features: Tensor,
        state: Tensor | None,
        first: Tensor | None,
        previous: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        assert self.core is not None
        if first is None:
            first = torch.zeros(features.shape[:2], dtype=torch.bool, device=features.device)
        if state is None:
            state = self.core.initial_state(len(features))
        read = features
        if self.feedback:
            read = torch.cat([features, self._feedback(first, previous)], dim=2)
        hidden, state = self.core.sequence(read, state, first)
        return torch.cat((features, hidden), dim=2), state

    def _feedback(self, first: Tensor, previous: tuple[Tensor, Tensor] | None) -> Tensor:
        if previous is None:
            raise ValueError("a network with feedback needs the previous actions and rewards")
        action, reward = previous
        every = torch.arange(self.num_actions, device=action.device)
        known = torch.cat([action.unsqueeze(-1) == every, reward.unsqueeze(-1)], dim=2)
        return known * ~first.unsqueeze(-1)


def build_muesli_network(
    name: str,
    obs_shape: Sequence[int],
    num_actions: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    core: int | None = 512,
    model: int = 1024,
    bins: int = 601,
    feedback: bool = False,
    normalise: Mapping[str, Any] | None = None,
    trunk: Mapping[str, Any] | None = None,
) -> MuesliNetwork:
    """A freshly drawn network.

    The paper's for Atari is ``impala`` on [3, 96, 96] with ``trunk={"channels": (64, 128, 128, 64),
    "hidden": 512}`` and the defaults here; these sizes are second-hand (see docs/students/muesli.md).

    Args:
        name: of the trunk, one of :data:`reincarnate.networks.NETWORKS`.
        obs_shape: [frames, height, width] for images, [features] for mlp.
        num_actions: A.
        device: where the parameters live.
        generator: draws the weights, on ``device``.
        core: units of the LSTM behind the trunk; None is a feed-forward representation.
        model: units of the model's LSTM.
        bins: of rewards and values.
        feedback: the LSTM also reads the previous action and reward.
        normalise: of observations, by statistics that the learner keeps (mlp alone); see ``build_network``.
        trunk: options of the trunk; those of :func:`reincarnate.networks.build_network`.

    Raises:
        UserError: what the trunk refuses, a size below 1, or feedback without an LSTM.
    """
    for what, size in (("core", core), ("model", model)):
        if size is not None and size < 1:
            raise UserError(f"{what} must have at least 1 unit, got {size}")
    options = dict(trunk or {}) | ({} if normalise is None else {"normalise": normalise})
    whole = build_network(name, obs_shape, num_actions, device="meta", **options)
    with torch.device("meta"):  # draws nothing from the global generator
        network = MuesliNetwork(
            whole.trunk,
            num_actions,
            core=core,
            model=model,
            bins=bins,
            feedback=feedback,
            normaliser=whole.normaliser,
        )
    if torch.device(device).type != "meta":
        network.to_empty(device=device)
        initialise_muesli(network, generator)
    return network


def muesli_options(name: str, **changes: Any) -> dict[str, Any]:
    """Every option of :func:`build_muesli_network` as plain JSON values, to be saved beside the weights."""
    trunk = default_options(name) | dict(changes.pop("trunk", None) or {})
    options = {"core": 512, "model": 1024, "bins": 601, "feedback": False}
    for option in changes:
        if option not in options:
            raise UserError(f"a Muesli network has no option {option!r}; known: trunk, {', '.join(options)}")
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in trunk.items()}
    return options | changes | {"trunk": plain}


@torch.no_grad()
def initialise_muesli(network: MuesliNetwork, generator: torch.Generator | None) -> None:
    """``initial`` and an MLP as every network here, LSTMs by :meth:`Lstm.initialise`, heads N(0, 0.01^2).

    A trunk of convolutions is drawn N(0, 1 / fan_in) with biases of 0, as haiku and flax have it by default
    (the paper's agent is in JAX). PyTorch's default has a third of that variance in every layer: so little
    of an image is left at the end that heads near zero take hundreds of updates to see any of it.
    """
    initialise(network, generator)
    layers = [layer for layer in network.trunk.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    if any(isinstance(layer, nn.Conv2d) for layer in layers):
        for layer in layers:
            layer.weight.normal_(0.0, layer.weight[0].numel() ** -0.5, generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
    model = network.model
    for head in (network.policy, network.value, model.reward, model.value, model.policy):
        head.weight.normal_(0.0, HEAD_STD, generator=generator)
        head.bias.zero_()


def acting_network(network: MuesliNetwork) -> Network:
    """The part that acts, as a network of its own that shares the parameters: trunk, core and policy."""
    core = network.core
    with torch.device("meta"):
        acting = Network(network.trunk, network.num_actions, core=None if core is None else core.units)
    acting.core, acting.head, acting.normaliser = core, network.policy, network.normaliser
    return acting


def target_of(network: MuesliNetwork) -> MuesliNetwork:
    """A copy without gradient, equal at first: theta_prior (Hessel et al. 2021, section 4.1)."""
    return copy.deepcopy(network).requires_grad_(False)


@torch.no_grad()
def average_(target: nn.Module, online: nn.Module, rate: float) -> None:
    """``theta_prior <- (1 - rate) theta_prior + rate theta``, in place, as a captured update needs it."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), rate)
