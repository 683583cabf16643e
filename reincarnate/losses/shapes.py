"""The check that opens every loss: a wrong shape would broadcast in silence."""

from __future__ import annotations

from torch import Tensor


def require(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has exactly ``shape``; reads no values."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def require_matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    """Sizes [B, A] of ``tensor``; ValueError if it has another rank."""
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have shape [B, A], got {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]
