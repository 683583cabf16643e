"""CleanRL's JAX checkpoints: ``flax.serialization.to_bytes`` of parameters (``*.cleanrl_model``).

Scripts: dqn_jax, dqn_atari_jax, qdagger_dqn_atari_jax_impalacnn (the parameters, bare or under ``params``),
ppo_atari_envpool_xla_jax and _scan (``[args, [network, actor, critic]]``). Neither JAX nor flax is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.teachers.formats import _msgpack
from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._cleanrl import Layout, read_arrays
from reincarnate.teachers.formats._probe import head_of
from reincarnate.teachers.formats._weights import FLAX

NAME = "cleanrl_flax"
SUMMARY = "CleanRL in JAX: flax msgpack"
_MAX_DEPTH = 8  # IMPALA's parameters lie four deep


def _impala_layers() -> dict[str, str]:
    names: dict[str, str] = {}
    for i in range(3):
        names[f"ConvSequence_{i}/Conv_0"] = f"trunk.sections.{i}.conv"
        for j, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
            name = f"ConvSequence_{i}/ResidualBlock_{j}/Conv_{k}"
            names[name] = f"trunk.sections.{i}.blocks.{j}.conv{k + 1}"
    return names | {"Dense_0": "trunk.fc", "Dense_1": "head"}


_NATURE = {
    "Conv_0": "trunk.conv1",
    "Conv_1": "trunk.conv2",
    "Conv_2": "trunk.conv3",
    "Dense_0": "trunk.fc",
}
_LAYOUTS = (
    Layout("dqn_atari_jax", "dqn", "q_values", "nature", _NATURE | {"Dense_1": "head"}),
    Layout(
        script="ppo_atari_envpool_xla_jax_scan",
        algorithm="ppo",
        outputs="policy_logits",
        network="nature",
        layers={f"network/{name}": canonical for name, canonical in _NATURE.items()}
        | {"actor/Dense_0": "head"},
        critic=["critic/Dense_0"],
    ),
    Layout(
        script="qdagger_dqn_atari_jax_impalacnn",
        algorithm="dqn",
        outputs="q_values",
        network="impala",
        layers=_impala_layers(),
        options={"pool_padding": "same"},
    ),
    Layout(
        script="dqn_jax",
        algorithm="dqn",
        outputs="q_values",
        network="mlp",
        layers={"Dense_0": "trunk.layers.0", "Dense_1": "trunk.layers.1", "Dense_2": "head"},
        options={"activation": "relu"},
    ),
)


def matches(path: Path) -> bool:
    """Whether the file opens like msgpack: with a map or a list."""
    return _msgpack.looks_like_msgpack(head_of(path))


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        UserError: damaged, not the parameters of a script above, or at odds with its environment.
    """
    trees, recorded = _parameter_trees(path, _msgpack.read_tree(path))
    arrays: dict[str, Tensor] = {}
    for prefix, tree in trees.items():
        arrays |= _flatten(path, _without_params(tree), prefix)
    return read_arrays(
        path, hints, arrays, format_name=NAME, layouts=_LAYOUTS, convention=FLAX, recorded=recorded
    )


def _parameter_trees(path: Path, tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Key prefix -> parameters, and the script's arguments if the file has them."""
    pair = _sequence(tree, 2)
    if pair is not None and isinstance(pair[0], dict):
        parts = _sequence(pair[1], 3)
        if parts is not None:
            return dict(zip(("network/", "actor/", "critic/"), parts, strict=True)), pair[0]
    if isinstance(tree, dict) and "model_weights" in tree:
        raise UserError(f"{path} is a CleanRL C51 checkpoint; distributional teachers are not read yet")
    return {"": tree}, {}


def _sequence(tree: Any, length: int) -> list[Any] | None:
    """A sequence of this length, as a list or as flax writes it: ``{"0": ..., "1": ...}``."""
    if isinstance(tree, dict) and set(tree) == {str(index) for index in range(length)}:
        return [tree[str(index)] for index in range(length)]
    return tree if isinstance(tree, list) and len(tree) == length else None


def _without_params(tree: Any) -> Any:
    """flax modules put their parameters under ``params``; some files hold them bare."""
    return tree["params"] if isinstance(tree, dict) and set(tree) == {"params"} else tree


def _flatten(path: Path, tree: Any, prefix: str, depth: int = 0) -> dict[str, Tensor]:
    """Arrays by their keys joined with slashes."""
    if not isinstance(tree, dict) or depth > _MAX_DEPTH:
        raise UserError(f"{path}: {prefix or 'top level'}: expected a map of parameters, found {_kind(tree)}")
    arrays: dict[str, Tensor] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            arrays |= _flatten(path, value, f"{prefix}{name}/", depth + 1)
        elif isinstance(value, np.ndarray):
            arrays[f"{prefix}{name}"] = torch.from_numpy(value)
        else:
            raise UserError(f"{path}: {prefix}{name}: expected an array, found {_kind(value)}")
    return arrays


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
