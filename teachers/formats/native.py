"""This project's own format: safetensors with everything in its header that a teacher needs.

The header's metadata has one entry, ``reincarnate``, a JSON object: ``format`` (1), ``spec`` (a TeacherSpec),
``reported`` (a Reported or null) and ``metadata`` (free). Students are saved so, and bundled teachers are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.teachers.formats import _weights
from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._environment import fit_environment
from reincarnate.teachers.formats._probe import head_of
from reincarnate.teachers.formats._text import reason
from reincarnate.teachers.formats._weights import Entry
from reincarnate.teachers.teacher import Reported, TeacherSpec
from reincarnate.types import EnvSpec

NAME = "native"
SUMMARY = "reincarnate: safetensors with its specification"
FILE_NAME = "student.safetensors"
VERSION = 1
_KEY = "reincarnate"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
T = TypeVar("T")


def matches(path: Path) -> bool:
    """Whether the file opens like safetensors: a length of 8 bytes, then a JSON object."""
    head = head_of(path)
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES


def save_native(
    path: Path,
    network: nn.Module,
    spec: TeacherSpec,
    metadata: Mapping[str, Any] | None = None,
    *,
    reported: Reported | None = None,
) -> Path:
    """Write a network that :func:`read` gives back bit for bit; atomically.

    Args:
        path: A ``.safetensors`` file, or a folder, which gets ``student.safetensors``.
        network: What ``spec.build()`` makes, on any device; its floating weights are stored as float32.
        spec: What the weights are and assume.
        metadata: JSON values of the writer's own.
        reported: The measured return, if there is one.

    Returns:
        The file.

    Raises:
        ValueError: the network is not what ``spec`` describes.
        TypeError: ``metadata`` is not JSON.
    """
    file = path if path.suffix == ".safetensors" else path / FILE_NAME
    state = {
        name: value.detach().to("cpu", torch.float32).contiguous()
        for name, value in network.state_dict().items()
    }
    expected = {name: value.shape for name, value in spec.build("meta").state_dict().items()}
    if {name: value.shape for name, value in state.items()} != expected:
        raise ValueError(f"not the weights of {spec.network} with {spec.network_options}")
    header = {
        "format": VERSION,
        "spec": spec.to_dict(),
        "reported": reported.to_dict() if reported else None,
        "metadata": dict(metadata or {}),
    }
    files.write_bytes(file, save(state, {_KEY: json.dumps(header, allow_nan=False)}))
    return file


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in ``path``; ``hints.env_id`` puts it into another environment of the same shape.

    Raises:
        UserError: damaged, written by something else or a later version, or altered so that header and
            weights contradict each other.
    """
    metadata, tensors = _open(path)
    if _KEY not in metadata:
        raise UserError(f"{path} is a safetensors file that reincarnate did not write: no {_KEY!r} metadata")
    header = _header(path, metadata[_KEY])
    spec = _parse(TeacherSpec, header["spec"], f"{path}: spec")
    claim = header["reported"]
    reported = None if claim is None else _parse(Reported, claim, f"{path}: reported")
    state = _checked_state(path, spec, tensors)
    if hints.env_id is None:
        return Checkpoint(spec, state, NAME, reported)
    moved = dataclasses.replace(spec, env=_other_environment(path, spec.env, hints.env_id))
    return Checkpoint(moved, state, NAME, reported, {"env_id": "--env"})


def _open(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path} is truncated or damaged ({reason(error)}); download it again") from None


def _header(path: Path, text: str) -> dict[str, Any]:
    try:
        header = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: its {_KEY!r} metadata is not JSON; the file is damaged") from None
    version = header.get("format") if isinstance(header, dict) else None
    if version != VERSION:
        raise UserError(
            f"{path}: expected format {VERSION}, found {version!r}; a later reincarnate wrote it?"
        )
    _weights.refuse_keys(path, header, ("format", "spec", "reported", "metadata"), "the metadata")
    return dict(header)


def _refuse_constant(name: str) -> None:
    """NaN and infinities are no JSON, though Python's parser takes them."""
    raise ValueError(name)


def _finite(text: str) -> float:
    """A number that can be written again: ``1e999`` is JSON, and infinity to Python."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text[:40])
    return number


def _refuse_long(path: Path, options: Any, most: int, depth: int = 0) -> None:
    """Network options list sizes of layers, of which there are no more than tensors in the file."""
    parts = list(options.values()) if isinstance(options, dict) else options
    if not isinstance(parts, list):
        return
    if len(parts) > max(most, 8) or depth > 8:
        raise UserError(f"{path}: spec: network_options of more layers than the file has weights")
    for part in parts:
        _refuse_long(path, part, most, depth + 1)


def _checked_state(path: Path, spec: TeacherSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, if they are exactly the network's."""
    _refuse_long(path, spec.network_options, len(tensors))
    try:
        expected = spec.build("meta").state_dict()
    except Exception as error:  # the options come from the file: anything may be wrong with them
        raise UserError(f"{path}: spec describes no network ({reason(error)})") from None
    _weights.refuse_keys(path, tensors, expected, f"the {spec.network} network")
    for name in expected:
        value = tensors[name]
        if value.dtype != torch.float32:
            raise UserError(f"{path}: {name}: expected torch.float32, found {value.dtype}")
        _weights.check_shape(
            path, Entry(name, value, tuple(range(expected[name].ndim))), tuple(expected[name].shape)
        )
        _weights.check_finite(path, name, value)
    return {name: tensors[name] for name in expected}


def _other_environment(path: Path, recorded: EnvSpec, env_id: str) -> EnvSpec:
    """The environment a user asked for instead, with the recorded preprocessing."""
    shape, actions, own = recorded.obs_shape, recorded.num_actions, recorded.env_id
    env = fit_environment(path, env_id, shape, actions, {}, asked=True, own=own)
    if env.env_id == recorded.env_id:
        return recorded
    if env.kind == "vector":
        return env
    return dataclasses.replace(recorded, env_id=env.env_id, full_action_set=env.full_action_set)


def _parse(cls: type[T], values: Any, where: str) -> T:
    """A dataclass from JSON: exactly its fields, each of its declared type.

    Raises:
        UserError: anything missing, unknown or of another type; the line names the field.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected an object, found {values!r}")
    hints = typing.get_type_hints(cls)
    if set(values) != set(hints):
        raise UserError(
            f"{where}: expected the fields {', '.join(hints)}, found {', '.join(values) or 'none'}"
        )
    parsed = {name: _typed(values[name], hint, f"{where}.{name}") for name, hint in hints.items()}
    try:
        return cls(**parsed)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _typed(value: Any, hint: Any, where: str) -> Any:
    """``value`` as ``hint`` says, or a UserError; booleans are no numbers here."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _parse(typing.cast("type[Any]", hint), value, where)
    if origin is types.UnionType:  # "X | None"
        return None if value is None else _typed(value, options[0], where)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(item, options[0], where) for item in value)
    if origin is typing.Literal and value in options:
        return value
    if origin is dict and isinstance(value, dict):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is hint:
        return value
    raise UserError(f"{where}: expected {getattr(hint, '__name__', hint)}, found {value!r}")
