"""Dopamine's networks in flax, written anew for one observation [H, W, C] as it calls them, and its bundles.

All but Iqn return action-values [A]. Names of layers are flax's own automatic ones, as in Dopamine.
"""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import frozen_dict

from reincarnate.teachers.formats import Checkpoint, Hints, detect_and_read

IMAGE = np.zeros((84, 84, 4), np.uint8)
INIT = nn.initializers.variance_scaling(1.0, "fan_in", "uniform")


def convolved(x: Any) -> Any:
    for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        x = nn.relu(nn.Conv(features, (kernel, kernel), strides=(stride, stride))(x))
    return x.reshape(-1)


class Stack(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(self.features, (3, 3), padding="SAME")(x)
        x = nn.max_pool(x[None], (3, 3), strides=(2, 2), padding="SAME")[0]
        for _ in range(2):
            before = x
            for _ in range(2):
                x = nn.Conv(self.features, (3, 3), padding="SAME")(nn.relu(x))
            x = x + before
        return x


class Encoder(nn.Module):
    """Dopamine lists its stacks in ``setup``, the reincarnating paper's code makes them on the way."""

    listed: bool

    def setup(self) -> None:
        if self.listed:
            self._stacks = [Stack(features) for features in (16, 32, 32)]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for stack in self._stacks if self.listed else (Stack(features) for features in (16, 32, 32)):
            x = stack(x)
        return nn.relu(x)


class Noisy(nn.Module):
    """A noisy layer whose noise is off; its deviations are parameters all the same."""

    features: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shape = (x.shape[0], self.features)
        zeros, ones = nn.initializers.zeros, nn.initializers.ones
        kernel, _ = self.param("kernel_mu", INIT, shape), self.param("kernel_sigma", ones, shape)
        bias, _ = self.param("bias_mu", zeros, shape[1:]), self.param("bias_sigma", ones, shape[1:])
        return x @ kernel + bias


class NoisyNetwork(Noisy):
    """Under Dopamine's name, from which the automatic names come."""


class AtariNetwork(nn.Module):
    """Nature or Impala; ``kind`` dqn, rainbow, quantile; dueling and noisy as in the full Rainbow."""

    actions: int
    kind: str = "dqn"
    atoms: int = 1
    v_max: float = 10.0
    hidden: int = 512
    encoder_kind: str = "nature"
    dueling: bool = False
    noisy: bool = False

    def setup(self) -> None:
        if self.encoder_kind != "nature":
            self.encoder = Encoder(self.encoder_kind == "listed")

    def dense(self, features: int) -> nn.Module:
        return NoisyNetwork(features) if self.noisy else nn.Dense(features, kernel_init=INIT)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x.astype(jnp.float32) / 255.0
        x = convolved(x) if self.encoder_kind == "nature" else self.encoder(x).reshape(-1)
        x = nn.relu(self.dense(self.hidden)(x))
        outputs = self.dense(self.actions * self.atoms)(x).reshape(self.actions, self.atoms)
        if self.dueling:
            value = self.dense(self.atoms)(x).reshape(1, self.atoms)
            outputs = value + outputs - outputs.mean(axis=0, keepdims=True)
        if self.kind != "rainbow":
            return outputs.mean(axis=1)
        support = jnp.linspace(-self.v_max, self.v_max, self.atoms)
        return jnp.sum(support * nn.softmax(outputs), axis=1)


class Iqn(nn.Module):
    """Called with the taus [K], which Dopamine draws inside; returns the quantile values [K, A]."""

    actions: int
    hidden: int = 512
    embedding: int = 64

    @nn.compact
    def __call__(self, x: Any, taus: Any) -> Any:
        x = convolved(x.astype(jnp.float32) / 255.0)
        index = jnp.arange(1, self.embedding + 1).astype(jnp.float32)
        cosines = jnp.cos(index * np.pi * taus[:, None])
        x = x[None] * nn.relu(nn.Dense(x.shape[0], kernel_init=INIT)(cosines))
        x = nn.relu(nn.Dense(self.hidden, kernel_init=INIT)(x))
        return nn.Dense(self.actions, kernel_init=INIT)(x)


class ClassicNetwork(nn.Module):
    actions: int
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    hidden: int = 512
    atoms: int = 1
    v_max: float = 10.0

    def setup(self) -> None:
        self.layers = [nn.Dense(self.hidden) for _ in range(2)]
        self.final_layer = nn.Dense(self.actions * self.atoms)

    def __call__(self, x: Any) -> Any:
        x = x.astype(jnp.float32).reshape(-1)
        if self.low is not None:
            x = 2.0 * (x - jnp.array(self.low)) / (jnp.array(self.high) - jnp.array(self.low)) - 1.0
        for layer in self.layers:
            x = nn.relu(layer(x))
        outputs = self.final_layer(x).reshape(self.actions, self.atoms)
        if self.atoms == 1:
            return outputs[:, 0]
        return jnp.sum(jnp.linspace(-self.v_max, self.v_max, self.atoms) * nn.softmax(outputs), axis=1)


def parameters(module: nn.Module, *inputs: Any, seed: int = 0) -> Any:
    """JAX arrays with flax's names and shapes, drawn by numpy at the scale of He's rule, biases too."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        fan_in = np.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 100
        return jnp.asarray(rng.normal(0.0, np.sqrt(2.0 / fan_in), leaf.shape).astype(np.float32))

    return jax.tree_util.tree_map(draw, jax.eval_shape(module.init, jax.random.PRNGKey(0), *inputs))


def bundle(params: Any, *, optimizer: bool = True) -> dict[str, Any]:
    """What the runner gives to the checkpointer, in Dopamine's order."""
    data: dict[str, Any] = {
        "state": np.zeros((84, 84, 4), np.uint8),
        "training_steps": 1_000_000,
        "online_params": params,
    }
    if optimizer:
        data["optimizer_state"] = optax.adam(6.25e-5, eps=1.5e-4).init(params)
    data["target_params"] = jax.tree_util.tree_map(jnp.zeros_like, params)  # to be told from the online ones
    data["current_iteration"] = 199
    data["logs"] = {"iteration_0": {"train_average_return": [np.float64(1.5)], "num_episodes": [3]}}
    return data


def save(path: Path, data: Any, protocol: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(data, file, protocol=protocol)
    return path


def play(module: nn.Module, params: Any, obs: Any, *inputs: Any) -> Any:
    """Action-values [B, A] of obs [B, C, H, W], one observation at a time under vmap, as Dopamine plays."""

    def one(each: Any) -> Any:
        return module.apply(params, each, *inputs)

    return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(np.moveaxis(obs, 1, -1) if obs.ndim == 4 else obs)))


def read(path: Path, data: Any, hints: Hints | None = None) -> Checkpoint:
    """What is read of ``data``, pickled."""
    return detect_and_read(save(path, data), hints)


@functools.cache
def bundle_of(outputs: int) -> dict[str, Any]:
    """A small network's bundle with numpy arrays, for what needs no JAX; not to be changed."""
    rng = np.random.default_rng(0)
    shapes = {"Conv_0": (8, 8, 4, 32), "Conv_1": (4, 4, 32, 64), "Conv_2": (3, 3, 64, 64)}
    shapes |= {"Dense_0": (7744, 4), "Dense_1": (4, outputs)}
    params = {
        name: {"kernel": rng.normal(size=shape).astype(np.float32), "bias": np.zeros(shape[-1], np.float32)}
        for name, shape in shapes.items()
    }
    return {"state": IMAGE, "training_steps": 1, "online_params": {"params": params}}


class FrozenDict:
    """flax's FrozenDict as of early 2021: slots, and no rule of its own for pickling."""

    __slots__ = ("_dict", "_hash")

    def __init__(self, values: dict[str, Any]) -> None:
        self._dict, self._hash = values, None


def slotted(patch: Any, params: dict[str, Any]) -> Any:
    """As such a one."""
    patch.setattr(FrozenDict, "__module__", frozen_dict.__name__)
    patch.setattr(frozen_dict, "FrozenDict", FrozenDict)
    return FrozenDict(params)
