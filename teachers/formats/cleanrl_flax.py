"""CleanRL's and cleanba's JAX checkpoints: ``flax.serialization.to_bytes`` (``*.cleanrl_model``).

Scripts: dqn_jax, dqn_atari_jax, qdagger_dqn_atari_jax_impalacnn (the parameters, bare or under ``params``),
c51_jax, c51_atari_jax (``{"model_weights": parameters, "args": {...}}``); ppo_atari_envpool_xla_jax and
_scan, ppo_atari_envpool_async_jax_scan_impalanet_machado, cleanba's PPO and IMPALA
(``[args, [network, actor, critic]]``). Neither JAX nor flax is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.teachers.formats import _msgpack
from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._cleanrl import Layout, dense_layouts, read_arrays
from reincarnate.teachers.formats._probe import head_of
from reincarnate.teachers.formats._weights import FLAX

NAME = "cleanrl_flax"
SUMMARY = "CleanRL in JAX: flax msgpack"
_MAX_DEPTH = 8  # IMPALA's parameters lie four deep
_MAX_LAYERS = 5  # of an MLP, and behind a CNN; CleanRL's have three and one
_MAX_SECTIONS = 8  # of an IMPALA CNN; CleanRL's have three
_ACTOR_CRITIC = ("network/", "actor/", "critic/")
_C51 = "model_weights/"


def _impala_layers(prefix: str, sections: int, hidden: int) -> dict[str, str]:
    names: dict[str, str] = {}
    for i in range(sections):
        names[f"{prefix}ConvSequence_{i}/Conv_0"] = f"trunk.sections.{i}.conv"
        for j, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
            name = f"{prefix}ConvSequence_{i}/ResidualBlock_{j}/Conv_{k}"
            names[name] = f"trunk.sections.{i}.blocks.{j}.conv{k + 1}"
    return names | _dense_layers(prefix, hidden)


def _dense_layers(prefix: str, hidden: int) -> dict[str, str]:
    """The linear layers behind a CNN."""
    names = ["trunk.fc", *(f"trunk.neck.{i}" for i in range(hidden - 1))]
    return {f"{prefix}Dense_{i}": name for i, name in enumerate(names)}


def _nature_layers(prefix: str) -> dict[str, str]:
    return {f"{prefix}Conv_{i}": f"trunk.conv{i + 1}" for i in range(3)} | _dense_layers(prefix, 1)


def _in_order(prefix: str) -> list[str]:
    return [f"{prefix}Dense_{i}" for i in range(_MAX_LAYERS)]


_DQN_ATARI = Layout("dqn_atari_jax", "dqn", "q_values", "nature", _nature_layers("") | {"Dense_1": "head"})
_DQN = Layout("dqn_jax", "dqn", "q_values", "mlp", {}, options={"activation": "relu"})
_PPO_ATARI = Layout(
    script="ppo_atari_envpool_xla_jax_scan",
    algorithm="ppo",
    outputs="policy_logits",
    network="nature",
    layers=_nature_layers("network/") | {"actor/Dense_0": "head"},
    critic=["critic/Dense_0"],
)
_LAYOUTS = (
    _DQN_ATARI,
    _PPO_ATARI,
    Layout(
        script="qdagger_dqn_atari_jax_impalacnn",
        algorithm="dqn",
        outputs="q_values",
        network="impala",
        layers=_impala_layers("", 3, 1) | {"Dense_1": "head"},
        options={"pool_padding": "same"},
    ),
    *dense_layouts(_DQN, _in_order("")),
    replace(
        _DQN_ATARI,
        script="c51_atari_jax",
        algorithm="c51",
        layers=_nature_layers(_C51) | {f"{_C51}Dense_1": "head"},
        categorical=True,
    ),
    *dense_layouts(replace(_DQN, script="c51_jax", algorithm="c51", categorical=True), _in_order(_C51)),
)


def _cleanba(keys: Collection[str], recorded: Mapping[str, Any]) -> Layout:
    """cleanba's actor-critic on an IMPALA CNN, with as many sections and linear layers as the file has."""
    sections = _count(keys, "network/ConvSequence_", _MAX_SECTIONS) or 3
    hidden = _count(keys, "network/Dense_", _MAX_LAYERS) or 1
    return replace(
        _PPO_ATARI,
        script="ppo and impala with the IMPALA CNN (cleanba)",
        algorithm="impala" if "cleanba_impala" in str(recorded.get("exp_name")) else "ppo",
        network="impala",
        layers=_impala_layers("network/", sections, hidden) | {"actor/Dense_0": "head"},
        options={"pool_padding": "same"},
    )


def _count(keys: Collection[str], prefix: str, most: int) -> int:
    """How many of ``prefix0``, ``prefix1``, ... occur, without a gap."""
    found = {key.removeprefix(prefix).partition("/")[0] for key in keys if key.startswith(prefix)}
    return next((count for count in range(most) if str(count) not in found), most)


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
    layouts = (*_LAYOUTS, _cleanba(arrays, recorded))
    return read_arrays(
        path, hints, arrays, format_name=NAME, layouts=layouts, convention=FLAX, recorded=recorded
    )


def _parameter_trees(path: Path, tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Key prefix -> parameters, and the script's arguments if the file has them."""
    pair = _sequence(tree, 2)
    if pair is not None and isinstance(pair[0], dict):
        parts = _sequence(pair[1], 3)
        if parts is not None:
            return dict(zip(_ACTOR_CRITIC, parts, strict=True)), _arguments(pair[0])
    _refuse_several(path, tree)
    if isinstance(tree, dict) and set(tree) == {"model_weights", "args"}:
        if not isinstance(tree["args"], dict):
            raise UserError(f"{path}: args: expected a map of arguments, found {_kind(tree['args'])}")
        return {_C51: tree["model_weights"]}, _arguments(tree["args"])
    return {"": tree}, {}


def _refuse_several(path: Path, tree: Any) -> None:
    """CleanRL's ddpg and td3 in JAX: ``[actor, critic]`` and ``[actor, critic, critic]``."""
    for length in (2, 3):
        parts = _sequence(tree, length)
        if parts and all(isinstance(part, dict) and set(part) == {"params"} for part in parts):
            raise UserError(
                f"{path} holds {length} networks, as CleanRL's ddpg and td3 write them: a policy of "
                "continuous actions, which cannot be a teacher here"
            )


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    """A script's arguments, with the lists that flax writes as maps."""
    return {
        name: _sequence(value, len(value)) or value if isinstance(value, dict) else value
        for name, value in values.items()
    }


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
