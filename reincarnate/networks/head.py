"""The categorical head of C51 and Rainbow: a distribution over returns, read out as its mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reincarnate.errors import UserError


class CategoricalHead(nn.Linear):
    """Linear layer to ``num_actions x atoms`` logits, read as Q-values (Bellemare et al. 2017, section 4).

    ``weight`` has the rows of action 0 first, all its atoms, then those of action 1, ... The support is
    ``linspace(v_min, v_max, atoms)``.
    """

    def __init__(self, features: int, num_actions: int, *, atoms: int, v_min: float, v_max: float) -> None:
        if atoms < 2 or not v_min < v_max:
            raise UserError(
                f"a categorical head needs 2 atoms or more and v_min < v_max: {atoms}, {v_min}, {v_max}"
            )
        super().__init__(features, num_actions * atoms)
        self.atoms, self.v_min, self.v_max = atoms, v_min, v_max

    def log_probs(self, features: Tensor) -> Tensor:
        """Features [B, F] -> log-probabilities of the atoms [B, A, atoms]."""
        logits = super().forward(features).view(len(features), -1, self.atoms)
        return torch.log_softmax(logits, dim=2)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, F] -> Q-values [B, A]."""
        support = torch.linspace(self.v_min, self.v_max, self.atoms, device=features.device)
        return (self.log_probs(features).exp() * support).sum(dim=2)
