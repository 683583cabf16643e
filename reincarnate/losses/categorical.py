"""Scalars as categorical distributions: the value transform, two-hot targets, read-out, cross-entropy.

A network predicts a reward or a value y as logits over a fixed support in the transformed space h(y), as
MuZero does (Schrittwieser et al. 2020, appendix F) and Muesli after it (Hessel et al. 2021, section 4.5).
So no reward is clipped, and large returns do not swamp small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reincarnate.losses.shapes import require, require_last, wide

#: Weight of the linear part of h; keeps it invertible and its inverse Lipschitz (Pohlen et al. 2018).
HYPERBOLIC_EPS = 1e-3


@dataclass(frozen=True)
class Support:
    """``bins`` atoms, evenly from ``-limit`` to ``limit``, in the space of h.

    The default, 601 bins of width 1, holds returns up to h^-1(300) = 58,706; larger ones are clipped.
    """

    limit: float = 300.0
    bins: int = 601

    def __post_init__(self) -> None:
        if self.bins < 2 or not self.limit > 0:
            raise ValueError(f"a support needs 2 bins or more and a limit above 0: {self.bins}, {self.limit}")

    @property
    def width(self) -> float:
        """Distance of two neighbouring atoms."""
        return 2.0 * self.limit / (self.bins - 1)

    def atoms(self, like: Tensor) -> Tensor:
        """[bins], in the dtype and on the device of ``like``."""
        return torch.linspace(-self.limit, self.limit, self.bins, dtype=like.dtype, device=like.device)


def signed_hyperbolic(x: Tensor, eps: float = HYPERBOLIC_EPS) -> Tensor:
    """``h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x``, elementwise (Pohlen et al. 2018, proposition A.2).

    Written as ``x (1 / (sqrt(|x| + 1) + 1) + eps)``: no difference of near-equal numbers, and the right
    slope, 1/2 + eps, at 0.
    """
    return x * (1.0 / (torch.sqrt(x.abs() + 1.0) + 1.0) + eps)


def signed_parabolic(y: Tensor, eps: float = HYPERBOLIC_EPS) -> Tensor:
    """``h^-1(y) = sign(y) (((sqrt(1 + 4 eps (|y| + 1 + eps)) - 1) / (2 eps))^2 - 1)``, elementwise.

    With ``x >= 0`` and ``u = sqrt(x + 1) - 1``, ``h(x) = y`` reads ``eps u^2 + (1 + 2 eps) u = y``, so
    ``u = 2 y / (1 + 2 eps + sqrt((1 + 2 eps)^2 + 4 eps y))`` and ``x = u (u + 2)``. The textbook form above
    is the same number, but loses four of float32's seven digits near 0.
    """
    slope = 1.0 + 2.0 * eps
    size = y.abs()
    factor = 2.0 / (slope + torch.sqrt(slope * slope + 4.0 * eps * size))  # u / y
    return y * factor * (size * factor + 2.0)


def two_hot(x: Tensor, support: Support) -> Tensor:
    """Weights on the two atoms around ``x`` whose mean is ``x``; 1 on an atom that ``x`` hits.

    ``w_i = max(0, 1 - |x - z_i| / width)`` after clipping x to the support (Schrittwieser et al. 2020,
    appendix F). The differences x - z_i are exact where they matter, so float32 is enough; an index from
    ``floor((x + limit) / width)`` would be off by 3e-5 at 300.

    Args:
        x: [...] floating, in the space of h.
        support: the atoms.

    Returns:
        [..., bins] weights that sum to 1.
    """
    x = wide(x).clamp(-support.limit, support.limit)
    distance = (x.unsqueeze(-1) - support.atoms(x)).abs()
    return (1.0 - distance / support.width).clamp(min=0.0)


def categorical_mean(logits: Tensor, support: Support) -> Tensor:
    """The scalar that logits stand for: ``h^-1(sum_i softmax(l)_i z_i)``.

    Args:
        logits: [..., bins].
        support: the atoms.

    Returns:
        [...] float32 or wider, in units of reward.

    Raises:
        ValueError: another number of bins.
    """
    _require_bins(logits, support)
    probabilities = torch.softmax(wide(logits), dim=-1)
    return signed_parabolic((probabilities * support.atoms(probabilities)).sum(dim=-1))  # no product in bf16


def categorical_loss(logits: Tensor, target: Tensor, support: Support) -> Tensor:
    """Cross-entropy ``- sum_i two_hot(h(y))_i log softmax(l)_i`` per entry, in nats.

    Its lowest value is the entropy of the two-hot target, at most ln 2, not 0; a network that knows nothing
    starts at ln bins, 6.3986 for 601.

    Args:
        logits: [..., bins].
        target: [...] y, in units of reward; no gradient flows into it.
        support: the atoms.

    Returns:
        [...] losses.

    Raises:
        ValueError: shapes that do not agree.
    """
    require("target", target, _require_bins(logits, support))
    weights = two_hot(signed_hyperbolic(wide(target.detach())), support)
    return -(weights * torch.log_softmax(wide(logits), dim=-1)).sum(dim=-1)


def _require_bins(logits: Tensor, support: Support) -> tuple[int, ...]:
    leading = require_last("logits", logits, "bins")
    require("logits", logits, (*leading, support.bins))
    return leading
