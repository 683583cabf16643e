"""Observations normalised by running statistics: frozen with the weights, or still followed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reincarnate.errors import UserError


class Normaliser(nn.Module):
    """``clip((obs - mean) / sqrt(variance + epsilon), -clip, clip)`` per feature.

    Buffers ``mean`` and ``variance`` [features] float32, which the state dict holds.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, features: int, *, epsilon: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__()
        if epsilon < 0 or clip <= 0:
            raise UserError(f"normalisation needs epsilon >= 0 and clip > 0, got {epsilon} and {clip}")
        self.epsilon, self.clip = epsilon, clip
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))

    def forward(self, obs: Tensor) -> Tensor:
        """Obs [B, features] -> the same shape."""
        scaled: Tensor = (obs - self.mean) / torch.sqrt(self.variance + self.epsilon)
        return scaled.clamp(-self.clip, self.clip)

    @torch.no_grad()
    def observe(self, obs: Tensor, seen: Tensor) -> None:
        """Take obs [n, features] into mean and variance (Chan et al. 1979), in place.

        ``seen``, 0-d float64, counts the observations so far and is changed too; 0 at first.
        """
        rows, count = obs.double(), len(obs)
        total = seen + count
        delta = rows.mean(dim=0) - self.mean
        within = self.variance * seen + rows.var(dim=0, unbiased=False) * count
        self.variance.copy_((within + delta.square() * seen * count / total) / total)
        self.mean.add_((delta * count / total).float())
        seen.copy_(total)
