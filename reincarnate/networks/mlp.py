"""Multi-layer perceptron for vector observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reincarnate.errors import UserError
from reincarnate.networks.network import Trunk

Activation = Literal["relu", "tanh", "elu", "gelu", "leaky_relu", "silu", "sigmoid"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "elu": F.elu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name.

    Raises:
        UserError: there is none.
    """
    if name not in ACTIVATIONS:
        raise UserError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


class MlpTrunk(Trunk):
    """Linear layers ``layers.0``, ``layers.1``, ... each followed by the activation.

    CleanRL's DQN has hidden sizes (120, 84) with ReLU, its PPO (64, 64) with tanh.
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden: Sequence[int] = (256, 256),
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        sizes = [*obs_shape, *hidden]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.activation = activation_function(activation)
        self.features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, hidden[-1]] of x [B, obs]."""
        for layer in self.layers:
            x = self.activation(layer(x))
        return x
