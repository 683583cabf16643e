"""The IMPALA CNN, deep variant (Espeholt et al. 2018, figure 3 right, without its LSTM)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reincarnate.errors import UserError
from reincarnate.networks.network import Trunk

PoolPadding = Literal["torch", "same"]


class ResidualBlock(nn.Module):
    """``x + conv2(relu(conv1(relu(x))))``, 3x3 convolutions that keep the size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        out: Tensor = self.conv2(F.relu(self.conv1(F.relu(x)), inplace=True))
        return out.add_(x)


class Section(nn.Module):
    """3x3 convolution, 3x3 max-pool with stride 2, two residual blocks."""

    def __init__(self, channels_in: int, channels: int, pool_padding: PoolPadding) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(channels), ResidualBlock(channels))
        self.pool_padding = pool_padding

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, channels, ceil(H / 2), ceil(W / 2)]."""
        out: Tensor = self.blocks(pool(self.conv(x), self.pool_padding))
        return out


class ImpalaTrunk(Trunk):
    """Sections, ReLU, a linear layer, ReLU; then the ``neck``, if any: linear layers with ReLU.

    Names: ``sections.i.conv``, ``sections.i.blocks.j.conv1``, ``.conv2``, ``neck.i`` and ``fc``, which
    reads the features in the order C, H, W. Any image size fits.

    ``pool_padding``: ``"torch"`` pads each side by 1; ``"same"`` pads as JAX and TensorFlow do, which on
    an even size is nothing at the near side and 1 at the far side: other values from the same weights.
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden: int = 256,
        channels: Sequence[int] = (16, 32, 32),
        pool_padding: PoolPadding = "torch",
        neck: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if pool_padding not in ("torch", "same"):
            raise UserError(f"pool_padding must be torch or same, got {pool_padding!r}")
        frames, height, width = obs_shape
        sizes = [frames, *channels]
        self.sections = nn.Sequential(
            *(Section(before, after, pool_padding) for before, after in pairwise(sizes))
        )
        for _ in channels:
            height, width = (height + 1) // 2, (width + 1) // 2
        self.fc = nn.Linear(sizes[-1] * height * width, hidden)
        widths = [hidden, *neck]
        self.neck = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.features = widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, features] of x [B, frames, height, width]."""
        x = F.relu(self.sections(x), inplace=True)
        x = F.relu(self.fc(x.flatten(1)), inplace=True)
        for layer in self.neck:
            x = F.relu(layer(x), inplace=True)
        return x


def pool(x: Tensor, padding: PoolPadding) -> Tensor:
    """3x3 max-pool with stride 2: [B, C, H, W] -> [B, C, ceil(H / 2), ceil(W / 2)]."""
    if x.device.type == "cpu" and not torch.is_grad_enabled():
        return _pool_by_axes(x, padding)
    if padding == "torch":
        return F.max_pool2d(x, 3, stride=2, padding=1)
    height, width = x.shape[-2:]  # the ceiling opens a window over the far edge, which is padding there
    return F.max_pool2d(x, 3, stride=2, padding=(height % 2, width % 2), ceil_mode=True)


def _pool_by_axes(x: Tensor, padding: PoolPadding) -> Tensor:
    """The same values without the indices that a gradient needs.

    PyTorch's CPU kernel writes an int64 index per output, and handles 16 bfloat16 channels one by one.
    """
    by_rows = _max_of_three(x.permute(0, 2, 3, 1), 1, padding)
    return _max_of_three(by_rows, 2, padding).permute(0, 3, 1, 2)


def _max_of_three(x: Tensor, axis: int, padding: PoolPadding) -> Tensor:
    """Maxima of windows of three with stride 2 along ``axis`` of [B, H, W, C]."""
    at = (slice(None),) * axis
    even, odd = x[(*at, slice(0, None, 2))], x[(*at, slice(1, None, 2))]
    size, pairs = even.shape[axis], odd.shape[axis]
    out = torch.maximum(even.narrow(axis, 0, pairs), odd)
    if size > pairs:
        out = torch.cat([out, even.narrow(axis, pairs, 1)], axis)
    if padding == "same" and size == pairs:  # windows begin at even pixels, else one before
        rest, third = out.narrow(axis, 0, size - 1), even.narrow(axis, 1, size - 1)
    else:
        rest, third = out.narrow(axis, 1, size - 1), odd.narrow(axis, 0, size - 1)
    torch.maximum(rest, third, out=rest)
    return out
