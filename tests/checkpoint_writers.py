"""CleanRL's networks, written anew from their architecture, and the real writers of its checkpoints.

The PyTorch ones need nothing; the flax ones are made by functions that import flax when called, so that
tests can skip where it is not installed.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def nature_side(side: int) -> int:
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        side = (side - kernel) // stride + 1
    return side


def torch_nature(stack: int, height: int, width: int, actions: int, hidden: int = 512) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(stack, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * nature_side(height) * nature_side(width), hidden),
        nn.ReLU(),
        nn.Linear(hidden, actions),
    )


def torch_mlp(
    features: int, hidden: tuple[int, int], actions: int, activation: type[nn.Module]
) -> nn.Sequential:
    first, second = hidden
    return nn.Sequential(
        nn.Linear(features, first),
        activation(),
        nn.Linear(first, second),
        activation(),
        nn.Linear(second, actions),
    )


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding="same")
        self.conv1 = nn.Conv2d(channels, channels, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv1(self.conv0(x.relu()).relu())


class _Section(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding="same")
        self.res_block0 = _Residual(channels)
        self.res_block1 = _Residual(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_block1(self.res_block0(nn.functional.max_pool2d(self.conv(x), 3, 2, padding=1)))


def torch_impala(stack: int, side: int, actions: int) -> nn.Sequential:
    return nn.Sequential(
        _Section(stack, 16),
        _Section(16, 32),
        _Section(32, 32),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(32 * (-(-side // 8)) ** 2, 256),
        nn.ReLU(),
        nn.Linear(256, actions),
    )


def prefixed(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in module.state_dict().items()}


def save_dqn(path: Path, network: nn.Module) -> Path:
    """As CleanRL's Q networks: one Sequential called ``network``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(OrderedDict(prefixed(network, "network")), path)
    return path


def flax_nature(actions: int | None, hidden: int = 512) -> Any:
    """flax module; ``None``: the trunk alone, as CleanRL's PPO has it."""
    import flax.linen as fnn
    import jax.numpy as jnp

    class Nature(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
            for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                x = fnn.relu(fnn.Conv(channels, (kernel, kernel), (stride, stride), padding="VALID")(x))
            x = fnn.relu(fnn.Dense(hidden)(x.reshape((x.shape[0], -1))))
            return x if actions is None else fnn.Dense(actions)(x)

    return Nature()


def flax_impala(actions: int) -> Any:
    import flax.linen as fnn
    import jax.numpy as jnp

    class ResidualBlock(fnn.Module):
        channels: int

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            y = fnn.Conv(self.channels, (3, 3))(fnn.relu(x))
            return x + fnn.Conv(self.channels, (3, 3))(fnn.relu(y))

    class ConvSequence(fnn.Module):
        channels: int

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            x = fnn.max_pool(fnn.Conv(self.channels, (3, 3))(x), (3, 3), strides=(2, 2), padding="SAME")
            x = ResidualBlock(self.channels)(x)  # one by one: flax numbers modules as they are made
            return ResidualBlock(self.channels)(x)

    class Impala(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
            for channels in (16, 32, 32):
                x = ConvSequence(channels)(x)
            x = fnn.relu(fnn.Dense(256)(fnn.relu(x).reshape((x.shape[0], -1))))
            return fnn.Dense(actions)(x)

    return Impala()


def flax_dense(*sizes: int) -> Any:
    """Dense layers with ReLU between them."""
    import flax.linen as fnn

    class Dense(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            for size in sizes[:-1]:
                x = fnn.relu(fnn.Dense(size)(x))
            return fnn.Dense(sizes[-1])(x)

    return Dense()


def flax_params(module: Any, obs: Any, seed: int) -> Any:
    """Random float32 parameters of the module's shapes, about the size that an initialiser gives."""
    import jax

    shapes = jax.eval_shape(module.init, jax.random.PRNGKey(0), obs)
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        scale = 0.1 if leaf.ndim == 1 else (1.5 / np.prod(leaf.shape[:-1])) ** 0.5
        return (rng.standard_normal(leaf.shape) * scale).astype(np.float32)

    return jax.tree_util.tree_map(draw, shapes)


def save_flax(path: Path, tree: Any) -> Path:
    """With flax's own writer."""
    import flax.serialization

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(flax.serialization.to_bytes(tree))
    return path
