"""What tests draw from a seed: float64, to be compared with other implementations."""

import torch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed)) * scale


def log_policy(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.log_softmax(normal(*shape, seed=seed, scale=scale), dim=-1)


def actions(*shape: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, size, shape, generator=generator(seed))
