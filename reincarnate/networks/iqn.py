"""The implicit quantile network (Dabney et al. 2018), read as the mean over its quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reincarnate.errors import UserError
from reincarnate.networks.nature import NatureTrunk, Padding

_MAX_TAUS = 65_536  # the cosines of all are held at once
_TAUS_AT_ONCE = 8  # so many copies of the image features are held at a time


class IqnTrunk(NatureTrunk):
    """Nature's convolutions; their features times an embedding of a quantile fraction tau; ``fc``; the mean.

    Names: Nature's, and ``embedding``, whose rows stand in the order C, H, W of the features.

    The head is linear, so that its values of the mean features over taus are the mean of its quantile values:
    the action-value (equation 3 there, with beta the identity). The paper's agent draws a few taus at each
    step; here they are the midpoints of ``taus`` equal intervals, which makes the action-value exact to the
    quadrature and the same each time.

    ``embedding``: cosines of tau, cos(pi i tau) for i = 1..embedding, as Dopamine has them (the paper's
    equation 4 begins with i = 0).
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden: int = 512,
        padding: Padding = "valid",
        embedding: int = 64,
        taus: int = 64,
    ) -> None:
        super().__init__(obs_shape, hidden, padding)
        if embedding < 1 or not 1 <= taus <= _MAX_TAUS:
            raise UserError(
                f"embedding and taus must be at least 1, taus at most {_MAX_TAUS}; got {embedding}, {taus}"
            )
        self.embedding = nn.Linear(embedding, self.fc.in_features)
        self.taus = taus

    def forward(self, x: Tensor) -> Tensor:
        """Mean features [B, hidden] of x [B, frames, height, width]."""
        image = self.convolved(x).flatten(1).unsqueeze(1)  # [B, 1, F]
        total = image.new_zeros(len(x), self.features, dtype=torch.float32)
        for cosines in torch.split(self._cosines(x.device), _TAUS_AT_ONCE):
            weights = F.relu(self.embedding(cosines))  # [taus, F]
            total += F.relu(self.fc(image * weights)).sum(dim=1, dtype=torch.float32)
        return total / self.taus

    def _cosines(self, device: torch.device) -> Tensor:
        """[taus, embedding] cos(pi i tau) at the midpoints."""
        tau = (torch.arange(self.taus, device=device) + 0.5) / self.taus
        index = torch.arange(1, self.embedding.in_features + 1, device=device)
        return torch.cos(math.pi * tau[:, None] * index)
