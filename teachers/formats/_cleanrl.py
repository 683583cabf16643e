"""What CleanRL's PyTorch and flax files share: layouts by script, and the way to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.networks import NetworkName
from reincarnate.teachers.formats import _weights
from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._environment import cleanrl_environment
from reincarnate.teachers.formats._weights import Convention, Entry, Layers
from reincarnate.teachers.teacher import Reported, TeacherSpec
from reincarnate.types import OutputKind

#: Parts of keys that no policy of discrete actions without memory has.
_CONTINUOUS = frozenset({"actor_mean", "actor_logstd", "fc_mean", "fc_mu", "fc_logstd", "action_scale"})
_MEMORY = frozenset({"lstm", "gru", "rnn", "transformer"})
_CANNOT = "which cannot be a teacher here"
_MAX_RETURN = 1e9  # of a support's ends
_NEAR = 1e-5  # of the support's range: float32 atoms against their ends


@dataclass(frozen=True)
class Layout:
    """One script's layers: prefix in the file -> canonical prefix."""

    script: str
    algorithm: str
    outputs: OutputKind
    network: NetworkName
    layers: Mapping[str, str]
    critic: Sequence[str] = ()  # must be there, is left out; its last layer gives one number
    options: Mapping[str, Any] = field(default_factory=dict)  # network options that no shape tells
    support: str | None = None  # key of the buffer with C51's atoms
    categorical: bool = False  # the head gives C51's distributions

    def keys(self, convention: Convention) -> list[str]:
        """Every key that the file must have, and no other."""
        kinds = (convention.weight, "bias")
        keys = [
            f"{prefix}{convention.separator}{kind}"
            for prefix in (*self.layers, *self.critic)
            for kind in kinds
        ]
        return keys + ([self.support] if self.support else [])


@dataclass(frozen=True)
class Beside:
    """What a file next to the checkpoint says of it."""

    env_id: str | None = None
    source: str = ""  # where that stands
    reported: Reported | None = None


def read_arrays(
    path: Path,
    hints: Hints,
    arrays: Mapping[str, Tensor],
    *,
    format_name: str,
    layouts: Sequence[Layout],
    convention: Convention,
    recorded: Mapping[str, Any] | None = None,
    beside: Beside | None = None,
) -> Checkpoint:
    """Arrays by key -> a checkpoint; ``recorded`` holds the script's arguments where the file has them.

    Raises:
        UserError: not exactly the keys and shapes of one of the layouts, arguments that contradict them, or
            at odds with the environment.
    """
    recorded = recorded or {}
    beside = beside or Beside()
    _refuse_other_policies(path, arrays)
    layout = _closest(path, arrays, layouts, convention)
    _weights.refuse_keys(path, arrays, layout.keys(convention), f"CleanRL's {layout.script}")
    entries = _entries(layout, arrays, convention)
    for prefix in layout.critic[-1:]:
        key = f"{prefix}{convention.separator}{convention.weight}"
        _weights.check_shape(path, Entry.of(convention, "critic.weight", key, arrays[key]), (1, None))
    options = {**layout.options, **_head(path, layout, arrays, recorded)}
    _refuse_other_inputs(path, entries)
    weights = _weights.assemble(Layers(path, layout.network, convention, entries, options), hints.image_size)
    _check_sizes(path, weights.options, recorded)
    env, assumed = cleanrl_environment(path, hints, weights, recorded, (beside.env_id, beside.source))
    spec = TeacherSpec(env, layout.outputs, weights.network, weights.options, layout.algorithm)
    return Checkpoint(spec, weights.state_dict, format_name, beside.reported, assumed)


def dense_layouts(base: Layout, prefixes: Sequence[str], critics: Sequence[str] = ()) -> list[Layout]:
    """A script's MLP with one hidden layer, two, ...: people change their number.

    ``prefixes`` names the layers in order, as many as the deepest has; the last of each is the head.
    """
    return [
        replace(
            base,
            layers={prefix: f"trunk.layers.{i}" for i, prefix in enumerate(prefixes[:count])}
            | {prefixes[count]: "head"},
            critic=critics[: count + 1],
        )
        for count in range(1, len(prefixes))
    ]


def _refuse_other_policies(path: Path, keys: Collection[str]) -> None:
    parts = {part for key in keys for part in key.replace("/", ".").split(".")}
    for names, what in ((_CONTINUOUS, "of continuous actions"), (_MEMORY, "with a memory")):
        found = sorted(parts & names)
        if found:
            raise UserError(f"{path} holds a policy {what} ({', '.join(found)}), {_CANNOT}")


def _closest(path: Path, keys: Collection[str], layouts: Sequence[Layout], convention: Convention) -> Layout:
    """The layout that shares most keys with the file; a near miss is then told key by key."""

    def overlap(layout: Layout) -> float:
        expected = set(layout.keys(convention))
        return len(expected & set(keys)) / len(expected | set(keys))

    best = max(layouts, key=overlap)
    if overlap(best) < 0.5:
        scripts = ", ".join(dict.fromkeys(layout.script for layout in layouts))
        shown = ", ".join(sorted(keys)[:4]) or "none"
        raise UserError(f"{path}: the keys of no CleanRL script that can be read ({scripts}); found {shown}")
    return best


def _entries(layout: Layout, arrays: Mapping[str, Tensor], convention: Convention) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for prefix, canonical in layout.layers.items():
        for kind, name in ((convention.weight, f"{canonical}.weight"), ("bias", f"{canonical}.bias")):
            key = f"{prefix}{convention.separator}{kind}"
            entries[name] = Entry.of(convention, name, key, arrays[key])
    return entries


def _refuse_other_inputs(path: Path, entries: Mapping[str, Entry]) -> None:
    """cleanba's ``..._last_action_reward`` feeds the head one-hot actions and a reward as well."""
    head, before = entries["head.weight"], entries.get("trunk.fc.weight")
    if before is None or head.array.ndim != 2 or before.array.ndim != 2:
        return
    actions, inputs = head.shape
    if inputs == before.shape[0] + actions + 1:
        raise UserError(
            f"{path}: {head.key}: {inputs} inputs are {before.shape[0]} features, the last of {actions} "
            f"actions and its reward: a policy that takes more than observations, {_CANNOT}"
        )


def _head(
    path: Path, layout: Layout, arrays: Mapping[str, Tensor], recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of a categorical head: the support, from the file's buffer or from its arguments."""
    if not layout.categorical:
        return {}
    stored = _stored_support(path, recorded)
    if layout.support is None:
        if stored is None:
            raise UserError(
                f"{path}: n_atoms, v_min and v_max are not all among its arguments: the values of C51's "
                "atoms are not known"
            )
        return {"head": stored}
    buffer = _buffer_support(path, layout.support, arrays[layout.support])
    if stored is not None and not _same_support(stored, buffer):
        raise UserError(
            f"{path}: {layout.support} is a support of {_told(buffer)}, its arguments say {_told(stored)}"
        )
    return {"head": stored or buffer}


def _stored_support(path: Path, recorded: Mapping[str, Any]) -> dict[str, Any] | None:
    names = ("n_atoms", "v_min", "v_max")
    if not recorded.keys() >= set(names):
        return None
    atoms, low, high = (recorded[name] for name in names)
    ends = all(isinstance(end, (int, float)) and type(end) is not bool for end in (low, high))
    good = type(atoms) is int and ends and max(abs(low), abs(high)) < _MAX_RETURN
    if not good or atoms < 2 or not low < high:
        told = ", ".join(f"{name}={recorded[name]!r}" for name in names)
        raise UserError(f"{path}: args: no support of a return distribution: {told}")
    return {"atoms": atoms, "v_min": float(low), "v_max": float(high)}


def _buffer_support(path: Path, key: str, buffer: Tensor) -> dict[str, Any]:
    """The evenly spaced values that CleanRL registers beside the weights."""
    if buffer.ndim != 1 or len(buffer) < 2 or not buffer.dtype.is_floating_point:
        raise UserError(f"{path}: {key}: expected [atoms] values, found {list(buffer.shape)} {buffer.dtype}")
    _weights.check_finite(path, key, buffer)
    values = buffer.double()
    low, high = float(values[0]), float(values[-1])
    steps = values.diff()
    if low >= high or float((steps - steps.mean()).abs().max()) > _NEAR * (high - low):
        raise UserError(f"{path}: {key}: the values are not evenly spaced from low to high")
    return {"atoms": len(buffer), "v_min": low, "v_max": high}


def _same_support(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    width = first["v_max"] - first["v_min"]
    return first["atoms"] == second["atoms"] and all(
        math.isclose(first[end], second[end], abs_tol=_NEAR * width) for end in ("v_min", "v_max")
    )


def _told(head: Mapping[str, Any]) -> str:
    return f"{head['atoms']} atoms from {head['v_min']:g} to {head['v_max']:g}"


def _check_sizes(path: Path, options: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """cleanba's arguments list the sizes of its network."""
    if "channels" not in options:
        return
    found = {"channels": options["channels"], "hiddens": [options["hidden"], *options.get("neck", ())]}
    for name, sizes in found.items():
        given = recorded.get(name)
        if isinstance(given, (list, tuple)) and list(given) != sizes:
            raise UserError(f"{path}: args: {name}={list(given)}, the weights have {sizes}")
