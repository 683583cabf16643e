"""The check that opens every loss: a wrong shape would broadcast in silence."""

from __future__ import annotations

import torch
from torch import Tensor


def require(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has exactly ``shape``; reads no values."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def require_matrix(name: str, tensor: Tensor, sizes: str = "B, A") -> tuple[int, int]:
    """Both sizes of ``tensor``, called ``sizes``; ValueError if it has another rank."""
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have shape [{sizes}], got {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def require_last(name: str, tensor: Tensor, size: str) -> tuple[int, ...]:
    """Leading sizes of ``tensor`` [..., size]; ValueError if it is a scalar. ``size`` names the last one."""
    if tensor.dim() < 1:
        raise ValueError(f"{name} must have shape [..., {size}], got []")
    return tuple(tensor.shape[:-1])


def wide(tensor: Tensor) -> Tensor:
    """Float64 as it is, every other dtype as float32: soft-maxes and sums lose too much in bfloat16."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
