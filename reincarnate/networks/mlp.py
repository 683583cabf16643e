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

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh}


class MlpTrunk(Trunk):
    """Linear layers ``layers.0``, ``layers.1``, ... each followed by the activation.

    CleanRL's DQN has hidden sizes (120, 84) with ReLU, its PPO (64, 64) with tanh.
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden: Sequence[int] = (256, 256),
        activation: Literal["relu", "tanh"] = "relu",
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise UserError(f"activation must be relu or tanh, got {activation!r}")
        sizes = [*obs_shape, *hidden]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.activation = _ACTIVATIONS[activation]
        self.features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, hidden[-1]] of x [B, obs]."""
        for layer in self.layers:
            x = self.activation(layer(x))
        return x
