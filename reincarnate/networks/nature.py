"""The Nature CNN (Mnih et al. 2015, Methods, "Model architecture")."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from reincarnate.errors import UserError
from reincarnate.networks.network import Trunk


class NatureTrunk(Trunk):
    """Three VALID convolutions (8/4, 4/2, 3/1) and a linear layer, ReLU after each.

    Names: ``conv1``, ``conv2``, ``conv3``, ``fc``. ``fc`` reads the features in the order C, H, W.
    """

    def __init__(self, obs_shape: Sequence[int], hidden: int = 512) -> None:
        super().__init__()
        frames, height, width = obs_shape
        self.conv1 = nn.Conv2d(frames, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)
        self.fc = nn.Linear(64 * _last_size(height) * _last_size(width), hidden)
        self.features = hidden

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, hidden] of x [B, frames, height, width]."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x), inplace=True)
        return F.relu(self.fc(x.flatten(1)), inplace=True)


def _last_size(size: int) -> int:
    """Pixels that a side of ``size`` has after the three convolutions."""
    if size < 36:
        raise UserError(f"the nature network needs images of at least 36x36 pixels, got a side of {size}")
    return ((size - 8) // 4 + 1 - 4) // 2 + 1 - 2
