"""Small networks of Muesli's, what they see and do, and PyTorch's own LSTM as an oracle of their LSTM."""

from __future__ import annotations

import pytest
import torch

from reincarnate.networks import MuesliNetwork, build_muesli_network
from reincarnate.networks.lstm import Lstm

from random_tensors import generator

IMAGE, VECTOR = (3, 20, 24), (5,)
A = 4
every_kind = pytest.mark.parametrize(
    ("kind", "core"), [("vector", 9), ("vector", None), ("image", 9), ("image", None)]
)


def build(kind: str = "vector", core: int | None = 9, seed: int = 0, **options) -> MuesliNetwork:
    name, shape = ("mlp", VECTOR) if kind == "vector" else ("impala", IMAGE)
    trunk = {"hidden": (8,)} if kind == "vector" else {"hidden": 8, "channels": (3, 5)}
    return build_muesli_network(
        name, shape, A, generator=generator(seed), core=core, model=7, bins=21, trunk=trunk, **options
    )


def observations(*shape: int, kind: str = "vector", seed: int = 0) -> torch.Tensor:
    if kind == "image":
        return torch.randint(0, 256, (*shape, *IMAGE), dtype=torch.uint8, generator=generator(seed))
    return torch.randn(*shape, *VECTOR, generator=generator(seed))


def chosen(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, A, shape, generator=generator(seed))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def torch_lstm(lstm: Lstm) -> torch.nn.LSTM:
    """PyTorch's own, with the same weights."""
    other = torch.nn.LSTM(lstm.weight_ih.shape[1], lstm.units, batch_first=True)
    with torch.no_grad():
        other.weight_ih_l0.copy_(lstm.weight_ih)
        other.weight_hh_l0.copy_(lstm.weight_hh)
        other.bias_ih_l0.copy_(lstm.bias)
        other.bias_hh_l0.zero_()
    return other
