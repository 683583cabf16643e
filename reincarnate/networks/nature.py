"""The Nature CNN (Mnih et al. 2015, Methods, "Model architecture")."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from reincarnate.errors import UserError
from reincarnate.networks.mlp import Activation, activation_function
from reincarnate.networks.network import Trunk

#: Kernel and stride of the three convolutions.
CONVOLUTIONS = ((8, 4), (4, 2), (3, 1))
Padding = Literal["valid", "same"]


class NatureTrunk(Trunk):
    """Three convolutions (8/4, 4/2, 3/1) and a linear layer, ReLU after each; then the ``neck``, if any.

    Names: ``conv1``, ``conv2``, ``conv3``, ``fc``, ``neck.i``. ``fc`` reads the features in order C, H, W.

    ``padding``: ``valid`` has none, as in the paper and nearly everywhere; ``same`` pads as flax does by
    default (more at the far side where it is uneven), as Dopamine's JAX agents were trained.
    ``neck``: sizes of further linear layers, each followed by ``neck_activation`` (Stable-Baselines3's
    ``net_arch`` behind its CNN).
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden: int = 512,
        padding: Padding = "valid",
        neck: Sequence[int] = (),
        neck_activation: Activation = "relu",
    ) -> None:
        super().__init__()
        if padding not in ("valid", "same"):
            raise UserError(f"padding must be valid or same, got {padding!r}")
        frames, height, width = obs_shape
        self.conv1 = nn.Conv2d(frames, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)
        self.fc = nn.Linear(64 * _last_size(height, padding) * _last_size(width, padding), hidden)
        sizes = [hidden, *neck]
        self.neck = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.neck_activation = activation_function(neck_activation)
        self.padding = padding
        self.features = sizes[-1]

    def convolved(self, x: Tensor) -> Tensor:
        """Image features [B, 64, H, W] of x [B, frames, height, width]."""
        for conv in (self.conv1, self.conv2, self.conv3):
            if self.padding == "same":
                x = pad_same(x, conv.kernel_size[0], conv.stride[0])
            x = F.relu(conv(x), inplace=True)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, features] of x [B, frames, height, width]."""
        x = F.relu(self.fc(self.convolved(x).flatten(1)), inplace=True)
        for layer in self.neck:
            x = self.neck_activation(layer(x))
        return x


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zeros around [B, C, H, W] for a convolution to ceil(size / stride); the odd one at the far side."""
    (top, bottom), (left, right) = (_same_pads(size, kernel, stride) for size in x.shape[-2:])
    return F.pad(x, (left, right, top, bottom)) if top + bottom + left + right else x


def _same_pads(size: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _last_size(size: int, padding: Padding) -> int:
    """Pixels that a side of ``size`` has after the three convolutions."""
    if padding == "valid" and size < 36:
        raise UserError(f"the nature network needs images of at least 36x36 pixels, got a side of {size}")
    for kernel, stride in CONVOLUTIONS:
        size = -(-size // stride) if padding == "same" else (size - kernel) // stride + 1
    return size
