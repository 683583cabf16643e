"""What every network is: inputs scaled, a trunk that may run in bfloat16, a head in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reincarnate.device import autocast, compute_dtype
from reincarnate.errors import UserError
from reincarnate.networks.head import CategoricalHead
from reincarnate.networks.lstm import Lstm
from reincarnate.networks.normaliser import Normaliser


class Trunk(nn.Module):
    """Observations [B, *obs_shape] float -> features [B, features], after their last activation."""

    features: int


class Network(nn.Module):
    """Trunk and head; the state dict has ``trunk.*``, ``head.*`` and, if it normalises, ``normaliser.*``.

    A recurrent one has an LSTM between them, ``core.*``, beside whose output the head sees the trunk's:
    :meth:`step` takes and returns its state.

    ``forward`` takes obs [B, *obs_shape], uint8 (divided by 255 here) or floating (normalised where the
    weights were trained so, else taken as it is), and returns [B, num_outputs] float32: Q-values or policy
    logits, as the weights' origin says. Under :func:`reincarnate.device.autocast` only the trunk runs in
    bfloat16: its spacing is 0.125 at Q = 20, which is wider than the gaps between actions.
    """

    def __init__(
        self,
        trunk: Trunk,
        num_outputs: int,
        head: Mapping[str, Any] | None = None,
        normaliser: Normaliser | None = None,
        core: int | None = None,
    ) -> None:
        super().__init__()
        self.normaliser = normaliser
        self.trunk = trunk
        self.core = None if core is None else Lstm(trunk.features, core)
        features = trunk.features if core is None else trunk.features + core
        self.head = (
            nn.Linear(features, num_outputs)
            if head is None
            else CategoricalHead(features, num_outputs, **head)
        )

    def forward(self, obs: Tensor) -> Tensor:
        """Outputs [B, num_outputs] float32 of obs [B, *obs_shape].

        Raises:
            UserError: the network is recurrent, so that a single observation does not say what it gives.
        """
        if self.core is not None:
            raise UserError(
                "this network has a memory (an LSTM) and cannot be asked about single observations"
            )
        return self.step(obs, None)[0]

    def initial_state(self, size: int) -> Tensor | None:
        """[size, 2, units] zeros, with which games begin; None for a feed-forward network."""
        return None if self.core is None else self.core.initial_state(size)

    def step(self, obs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, num_outputs] float32 of obs [B, *obs_shape] and the next state [B, 2, units]."""
        features = self.trunk(scale(obs) if self.normaliser is None else self.normaliser(obs))
        with autocast(features.device, "fp32"):
            features = features.to(self.head.weight.dtype)
            if self.core is not None:
                assert state is not None
                state = self.core(self.core.read(features), state)
                features = torch.cat((features, state[:, 0]), dim=1)
            outputs: Tensor = self.head(features)
        return outputs, state


def scale(obs: Tensor) -> Tensor:
    """Pixels [B, ...] uint8 -> obs / 255 in the trunk's dtype; floating observations pass unchanged.

    Images come out channels-last, which is what convolutions do fastest on CPU and on tensor cores. Under
    autocast the pixels go to bfloat16 at once: it holds 0..255 exactly, so the quotient is the same.
    """
    if obs.dtype != torch.uint8:
        return obs
    pixels = obs.to(compute_dtype(obs.device)).div_(255.0)
    return pixels.contiguous(memory_format=torch.channels_last) if obs.dim() == 4 else pixels


@torch.no_grad()
def initialise(network: nn.Module, generator: torch.Generator | None) -> None:
    """Draw every convolution and linear layer from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), biases too.

    That is PyTorch's default, which CleanRL's DQN and QDagger scripts rely on, with the generator passed in.
    """
    for layer in network.modules():
        if isinstance(layer, Normaliser):
            layer.mean.zero_()
            layer.variance.fill_(1.0)
        elif isinstance(layer, Lstm):
            layer.initialise(generator)
        elif isinstance(layer, (nn.Conv2d, nn.Linear)):
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters(recurse=False):
                parameter.uniform_(-bound, bound, generator=generator)
