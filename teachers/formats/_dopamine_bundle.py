"""From Dopamine's pickled bundle to the parameters of its online network, by their keys.

``Checkpointer`` pickles a dict: the agent's bundle (``state``, ``training_steps``, ``online_params``,
``target_params``, since September 2021 ``optimizer_state``), ``current_iteration`` and ``logs``. The
parameters are nested dicts or flax's FrozenDicts of arrays. Before flax's linen they lie bare and are
numbered across layer types (``Conv_2``, ``Dense_3``), since then below ``params`` and by type (``Dense_0``).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.teachers.formats._text import one_line
from reincarnate.teachers.formats._unpickle import Record, read_pickle

_ONLINE = "online_params"
_MAX_DEPTH = 8
_MAX_ARRAYS = 256  # the largest network that can be read has some thirty
_MAX_MAPS = 1024  # dicts on the way to them; a pickle can name one dict again and again, also within itself
_NUMBERED = re.compile(r"(?P<kind>[A-Za-z]+)_(?P<number>\d{1,6})")
_MARKS = (_ONLINE.encode(), b"network_params", b"training_steps")
_LOOK_BYTES = 1 << 20  # the agent's last observation stands before the first of them


def looks_like_bundle(path: Path) -> bool:
    """Whether a pickle's first megabyte names what every bundle of Dopamine holds."""
    with path.open("rb") as file:
        head = file.read(_LOOK_BYTES)
    return head[:1] == b"\x80" and head[1:2] <= b"\x05" and any(mark in head for mark in _MARKS)


def read_parameters(path: Path) -> dict[str, Tensor]:
    """Arrays of the online network by their keys joined with slashes, numbered as linen numbers.

    Raises:
        UserError: damaged, hostile, or the bundle of an agent that has no such network here.
    """
    bundle = read_pickle(path)
    if not isinstance(bundle, dict):
        raise UserError(f"{path} is a pickle, but no Dopamine bundle: expected a dict, found {_kind(bundle)}")
    if _ONLINE not in bundle:
        raise UserError(f"{path} {_without_parameters(bundle)}")
    tree = _plain(bundle[_ONLINE])
    is_linen = isinstance(tree, dict) and set(tree) == {"params"}
    tree = _plain(tree["params"]) if is_linen else _as_linen(tree)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    _flatten(path, tree, "", arrays, itertools.count())
    return _tensors(path, arrays)


def _without_parameters(bundle: Mapping[Any, Any]) -> str:
    """Why a bundle has no ``online_params``."""
    if "log_alpha" in bundle:
        return "is Dopamine's SAC, which has continuous actions; such an agent cannot be a teacher here"
    if "network_params" in bundle:
        return "is Dopamine's PPO, which is not read; of its agents those with action-values are"
    if "training_steps" in bundle:
        return (
            "holds no network: it belongs to an agent of Dopamine in TensorFlow, whose weights lie in "
            "tf_ckpt-N files beside it and are not read; a JAX agent's ckpt.N holds them itself"
        )
    keys = (key if isinstance(key, str) else _kind(key) for key in list(bundle)[:6])
    found = one_line(", ".join(keys)) or "nothing"
    return f"is a pickle, but no Dopamine bundle: no {_ONLINE!r}, but {found}"


def _plain(value: Any) -> Any:
    """A FrozenDict as a dict: it pickles as a call with its content, in 2020 as an object with slots."""
    if not (isinstance(value, Record) and value.name == "FrozenDict"):
        return value
    return value.args[0] if value.args else value.field("_dict")


def _as_linen(tree: Any) -> Any:
    """Top-level layers numbered by type instead of across types; other names stay."""
    if not isinstance(tree, dict):
        return tree
    numbers = {name: _NUMBERED.fullmatch(name) for name in tree if isinstance(name, str)}
    numbered = {name: match for name, match in numbers.items() if match}
    seen: Counter[str] = Counter()
    renamed: dict[Any, Any] = {name: value for name, value in tree.items() if name not in numbered}
    for name, match in sorted(numbered.items(), key=lambda item: int(item[1]["number"])):
        renamed[f"{match['kind']}_{seen[match['kind']]}"] = tree[name]
        seen[match["kind"]] += 1
    return renamed


def _flatten(
    path: Path,
    tree: Any,
    prefix: str,
    arrays: dict[str, np.ndarray[Any, Any]],
    maps: Iterator[int],
    depth: int = 0,
) -> None:
    if not isinstance(tree, dict) or depth > _MAX_DEPTH:
        raise UserError(f"{path}: {prefix or _ONLINE}: expected a dict of parameters, found {_kind(tree)}")
    if next(maps) > _MAX_MAPS:
        raise UserError(f"{path}: {_ONLINE}: more than {_MAX_MAPS} dicts; no network of Dopamine's")
    for name, value in tree.items():
        value = _plain(value)
        if not isinstance(name, str):
            raise UserError(f"{path}: {prefix or _ONLINE}: a key is {_kind(name)}, not text")
        if isinstance(value, dict):
            _flatten(path, value, f"{prefix}{name}/", arrays, maps, depth + 1)
        elif isinstance(value, np.ndarray):
            arrays[f"{prefix}{name}"] = value
        else:
            raise UserError(f"{path}: {prefix}{name}: expected an array, found {_kind(value)}")
        if len(arrays) > _MAX_ARRAYS:
            raise UserError(f"{path}: {_ONLINE}: more than {_MAX_ARRAYS} arrays; no network of Dopamine's")


def _tensors(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Tensor]:
    """Copies as tensors; the file must be as large as what it claims to hold."""
    total, size = sum(array.nbytes for array in arrays.values()), path.stat().st_size
    if total > size:
        raise UserError(f"{path}: {_ONLINE}: {total} bytes of arrays in a file of {size}; refused")
    for key, array in arrays.items():
        if array.dtype.kind != "f":
            raise UserError(f"{path}: {key}: expected floating-point weights, found {array.dtype}")
        if array.size == 0:
            raise UserError(f"{path}: {key}: empty, shape {list(array.shape)}")
    return {
        key: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for key, array in arrays.items()
    }


def _kind(value: Any) -> str:
    name = f"{value.module}.{value.name}" if isinstance(value, Record) else type(value).__name__
    return f"a {one_line(name)}"
