"""What CleanRL's PyTorch and flax files share: layouts by script, and the way to a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.networks import NetworkName
from reincarnate.teachers.formats import _weights
from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._environment import cleanrl_environment
from reincarnate.teachers.formats._weights import Convention, Entry, Layers
from reincarnate.teachers.teacher import TeacherSpec
from reincarnate.types import OutputKind


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

    def keys(self, convention: Convention) -> list[str]:
        """Every key that the file must have, and no other."""
        kinds = (convention.weight, "bias")
        return [
            f"{prefix}{convention.separator}{kind}"
            for prefix in (*self.layers, *self.critic)
            for kind in kinds
        ]


def read_arrays(
    path: Path,
    hints: Hints,
    arrays: Mapping[str, Tensor],
    *,
    format_name: str,
    layouts: Sequence[Layout],
    convention: Convention,
    recorded: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Arrays by key -> a checkpoint; ``recorded`` holds the script's arguments where the file has them.

    Raises:
        UserError: not exactly the keys and shapes of one of the layouts, or at odds with the environment.
    """
    layout = _closest(path, arrays, layouts, convention)
    _weights.refuse_keys(path, arrays, layout.keys(convention), f"CleanRL's {layout.script}")
    entries = _entries(layout, arrays, convention)
    for prefix in layout.critic[-1:]:
        key = f"{prefix}{convention.separator}{convention.weight}"
        _weights.check_shape(path, Entry.of(convention, "critic.weight", key, arrays[key]), (1, None))
    layers = Layers(path, layout.network, convention, entries, layout.options)
    weights = _weights.assemble(layers, hints.image_size)
    env, assumed = cleanrl_environment(path, hints, weights, recorded or {})
    spec = TeacherSpec(env, layout.outputs, weights.network, weights.options, layout.algorithm)
    return Checkpoint(spec, weights.state_dict, format_name, assumed=assumed)


def _closest(path: Path, keys: Collection[str], layouts: Sequence[Layout], convention: Convention) -> Layout:
    """The layout that shares most keys with the file; a near miss is then told key by key."""

    def overlap(layout: Layout) -> float:
        expected = set(layout.keys(convention))
        return len(expected & set(keys)) / len(expected | set(keys))

    best = max(layouts, key=overlap)
    if overlap(best) < 0.5:
        scripts = ", ".join(layout.script for layout in layouts)
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
