"""From a file's arrays to the canonical state dict: keys, ranks, shapes, transposes and sizes, all checked.

A reader says which key becomes which canonical name and which axes it permutes (:class:`Entry`). Sizes
that the file alone knows (frames, hidden units, actions) are read off the shapes; then the network is built
without memory and every shape is compared with it. Whatever does not fit is one UserError that names file,
key, what was expected and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.networks import NetworkName, build_network
from reincarnate.networks.nature import CONVOLUTIONS

_DEFAULT_SIDE = 84


@dataclass(frozen=True)
class Convention:
    """How a library lays out and names its weights."""

    conv: tuple[int, ...]  # kernel.permute(conv) is [out, in, height, width]
    dense: tuple[int, ...]  # kernel.permute(dense) is [out, in]
    flatten: Literal["chw", "hwc"]  # order in which the first dense layer reads image features
    separator: str  # between the parts of a key
    weight: str  # last part of a kernel's key


TORCH = Convention((0, 1, 2, 3), (0, 1), "chw", ".", "weight")
FLAX = Convention((3, 2, 0, 1), (1, 0), "hwc", "/", "kernel")


@dataclass(frozen=True)
class Entry:
    """One array of a file."""

    key: str  # its name in the file, for messages
    array: Tensor  # as stored
    axes: tuple[int, ...]  # array.permute(axes) is PyTorch's layout

    @classmethod
    def of(cls, convention: Convention, canonical: str, key: str, array: Tensor) -> Entry:
        """The array at ``key``, which becomes the parameter ``canonical``."""
        if canonical.endswith(".bias"):
            return cls(key, array, (0,))
        return cls(key, array, convention.conv if "conv" in canonical else convention.dense)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in PyTorch's layout; only after the rank was checked."""
        return tuple(self.array.shape[axis] for axis in self.axes)


@dataclass(frozen=True)
class Layers:
    """Everything a file says about one network."""

    path: Path
    network: NetworkName
    convention: Convention
    entries: Mapping[str, Entry]  # canonical parameter name -> array
    options: Mapping[str, Any]  # network options that no shape tells


@dataclass(frozen=True)
class Weights:
    """A network's weights with the sizes that they imply."""

    network: NetworkName
    options: dict[str, Any]  # for build_network
    obs_shape: tuple[int, ...]
    num_outputs: int
    state_dict: dict[str, Tensor]  # float32, contiguous, canonical names
    image_sides: tuple[int, int] | None = None  # smallest and largest side that fit; None if it was given


def refuse_keys(path: Path, found: Collection[str], expected: Collection[str], what: str) -> None:
    """Raise UserError unless exactly the expected keys are there."""
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    if missing or unknown:
        parts = [
            f"{word} {_some(keys)}" for word, keys in (("missing", missing), ("unknown", unknown)) if keys
        ]
        counts = f"expected {len(expected)}, found {len(found)}"
        raise UserError(f"{path}: not the keys of {what}: {counts}; {'; '.join(parts)}")


def check_shape(path: Path, entry: Entry, expected: tuple[int | None, ...]) -> None:
    """Raise UserError unless an entry has this shape in PyTorch's layout (None: any size)."""
    if entry.array.ndim != len(entry.axes):
        raise UserError(
            f"{path}: {entry.key}: expected {len(entry.axes)} axes, found shape {_shape(entry.array)}"
        )
    if any(size not in (None, actual) for size, actual in zip(expected, entry.shape, strict=True)):
        stored = dict(zip(entry.axes, expected, strict=True))  # back in the file's own layout
        words = ["any" if stored[axis] is None else str(stored[axis]) for axis in sorted(stored)]
        raise UserError(f"{path}: {entry.key}: expected [{', '.join(words)}], found {_shape(entry.array)}")


def assemble(layers: Layers, image_size: tuple[int, int] | None = None) -> Weights:
    """Check the arrays against the network that their sizes imply and bring them to its layout.

    Args:
        layers: What the file holds.
        image_size: Height and width of the observations, where known; the weights may leave it open.

    Raises:
        UserError: shapes that do not belong together, numbers that are not finite or not floating.
    """
    for entry in layers.entries.values():
        _check_numbers(layers.path, entry)
        check_shape(layers.path, entry, (None,) * len(entry.axes))
    num_outputs = _num_outputs(layers)
    obs_shape, sides = _observation_shape(layers, image_size)
    options = _sizes(layers)
    expected = build_network(layers.network, obs_shape, num_outputs, device="meta", **options).state_dict()
    for name, entry in layers.entries.items():
        check_shape(layers.path, entry, tuple(expected[name].shape))
    state = {name: _to_torch(name, layers, obs_shape) for name in expected}
    return Weights(layers.network, options, obs_shape, num_outputs, state, sides)


def check_finite(path: Path, key: str, values: Tensor) -> None:
    """Raise UserError where an array holds NaN or infinity."""
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise UserError(f"{path}: {key}: {bad} of {values.numel()} weights are NaN or infinite")


def _check_numbers(path: Path, entry: Entry) -> None:
    if not entry.array.dtype.is_floating_point:
        raise UserError(f"{path}: {entry.key}: expected floating-point weights, found {entry.array.dtype}")
    if entry.array.numel() == 0:
        raise UserError(f"{path}: {entry.key}: empty, shape {_shape(entry.array)}")
    check_finite(path, entry.key, entry.array.float())  # what is finite in float64 may overflow here


def _num_outputs(layers: Layers) -> int:
    """Actions: a categorical head has a row per action and atom."""
    entry, head = layers.entries["head.weight"], layers.options.get("head")
    actions, rest = divmod(entry.shape[0], head["atoms"] if head else 1)
    if rest or not actions:
        raise UserError(
            f"{layers.path}: {entry.key}: {entry.shape[0]} outputs are not {head and head['atoms']} atoms "
            "for each action"
        )
    return actions


def _sizes(layers: Layers) -> dict[str, Any]:
    """Options of build_network: hidden units and channels from the shapes, the rest from the reader."""
    options = dict(layers.options)
    if layers.network == "mlp":
        return {"hidden": _rows(layers, "trunk.layers")} | options
    sizes: dict[str, Any] = {"hidden": layers.entries["trunk.fc.weight"].shape[0]}
    if layers.network == "impala":
        count = sum(name.endswith(".conv.weight") for name in layers.entries)
        sizes["channels"] = [layers.entries[f"trunk.sections.{i}.conv.weight"].shape[0] for i in range(count)]
    if neck := _rows(layers, "trunk.neck"):
        sizes["neck"] = neck
    return sizes | options


def _rows(layers: Layers, prefix: str) -> list[int]:
    """Output sizes of the linear layers ``prefix.0``, ``prefix.1``, ..."""
    count = sum(name.startswith(f"{prefix}.") and name.endswith(".weight") for name in layers.entries)
    return [layers.entries[f"{prefix}.{i}.weight"].shape[0] for i in range(count)]


def _observation_shape(
    layers: Layers, image_size: tuple[int, int] | None
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """[features] or [frames, height, width], and the range of sides if the image size had to be chosen."""
    if layers.network == "mlp":
        first = layers.entries.get("trunk.layers.0.weight", layers.entries["head.weight"])
        return (first.shape[1],), None
    convolutions = [
        entry for name, entry in layers.entries.items() if name.endswith("weight") and "conv" in name
    ]
    frames, channels = convolutions[0].shape[1], convolutions[-1].shape[0]
    flat = layers.entries["trunk.fc.weight"]
    if image_size is not None:
        return (frames, *image_size), None  # compared with the weights like any other shape
    cells, rest = divmod(flat.shape[1], channels)
    side = math.isqrt(cells)
    fitting = [size for size in range(1, 8 * side + 64) if _side(layers, size) == side]
    if rest or side * side != cells or not fitting:
        raise UserError(
            f"{layers.path}: {flat.key}: {flat.shape[1]} inputs are not {channels} channels of a square "
            "image; Hints(image_size=...) reads others"
        )
    chosen = _DEFAULT_SIDE if _DEFAULT_SIDE in fitting else next(size for size in fitting if size % 8 == 0)
    return (frames, chosen, chosen), (fitting[0], fitting[-1])


def feature_side(network: str, side: int, *, padding: str = "valid", sections: int = 3) -> int:
    """Side of the last feature map for images of ``side`` pixels; 0 where the image is too small."""
    if network == "impala":
        return -(-side // (1 << sections))  # each section halves, rounding up
    for kernel, stride in CONVOLUTIONS:
        if padding == "same":
            side = -(-side // stride)
        else:
            side = (side - kernel) // stride + 1 if side >= kernel else 0
    return side


def _side(layers: Layers, side: int) -> int:
    sections = sum(name.endswith(".conv.weight") for name in layers.entries)
    padding = layers.options.get("padding", "valid")
    return feature_side(layers.network, side, padding=padding, sections=sections)


def _to_torch(name: str, layers: Layers, obs_shape: tuple[int, ...]) -> Tensor:
    entry = layers.entries[name]
    array = entry.array.permute(entry.axes)
    if name == "trunk.fc.weight" and layers.convention.flatten == "hwc":
        height, width = (_side(layers, side) for side in obs_shape[1:])
        array = array.reshape(len(array), height, width, -1).permute(0, 3, 1, 2).flatten(1)
    return array.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _shape(array: Tensor) -> str:
    return str(list(array.shape))


def _some(keys: list[str], limit: int = 4) -> str:
    shown = ", ".join(repr(key) for key in keys[:limit])
    return shown if len(keys) <= limit else f"{shown} and {len(keys) - limit} more"
