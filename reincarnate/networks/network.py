"""What every network is: inputs scaled, a trunk that may run in bfloat16, a head in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reincarnate.device import autocast, compute_dtype
from reincarnate.networks.head import CategoricalHead
from reincarnate.networks.normaliser import Normaliser


class Trunk(nn.Module):
    """Observations [B, *obs_shape] float -> features [B, features], after their last activation."""

    features: int


class Network(nn.Module):
    """Trunk and head; the state dict has ``trunk.*``, ``head.*`` and, if it normalises, ``normaliser.*``.

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
    ) -> None:
        super().__init__()
        self.normaliser = normaliser
        self.trunk = trunk
        self.head = (
            nn.Linear(trunk.features, num_outputs)
            if head is None
            else CategoricalHead(trunk.features, num_outputs, **head)
        )

    def forward(self, obs: Tensor) -> Tensor:
        """Outputs [B, num_outputs] float32 of obs [B, *obs_shape]."""
        features = self.trunk(scale(obs) if self.normaliser is None else self.normaliser(obs))
        with autocast(features.device, "fp32"):
            outputs: Tensor = self.head(features.to(self.head.weight.dtype))
        return outputs


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
        elif isinstance(layer, (nn.Conv2d, nn.Linear)):
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters(recurse=False):
                parameter.uniform_(-bound, bound, generator=generator)
