"""What RL Zoo and the Hugging Face course put beside a Stable-Baselines3 model.

``args.yml`` (the command line), ``config.yml`` (hyperparameters), ``env_kwargs.yml``, and the statistics of
VecNormalize as ``vecnormalize.pkl`` or ``vec_normalize.pkl``. They lie in a folder called after the
environment beside the zip, or beside the zip itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.teachers.formats._checkpoint import Companions, Hints
from reincarnate.teachers.formats._sb3_data import literal
from reincarnate.teachers.formats._sb3_weights import Statistics
from reincarnate.teachers.formats._unpickle import Record, read_pickle
from reincarnate.teachers.formats._yaml import Tagged, read_yaml
from reincarnate.teachers.reference import files_below

_ARGUMENTS, _CONFIG, _ENV_KWARGS = "args.yml", "config.yml", "env_kwargs.yml"
_STATISTICS = ("vecnormalize.pkl", "vec_normalize.pkl")
_MAX_STATISTICS_BYTES = 4 << 20  # of vectors they are a few kB
_MAX_NUMBER = 1e30
_DEFAULT_CLIP, _DEFAULT_EPSILON = 10.0, 1e-8


@dataclass(frozen=True)
class Zoo:
    """The settings beside a model; empty where there are none."""

    env_id: str | None = None  # of args.yml
    config: Mapping[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    env_kwargs_file: str | None = None
    statistics: Statistics | None = None

    def wrappers(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and arguments of the wrappers around each environment, the innermost first."""
        named = self.config.get("env_wrapper")
        return [_wrapper(each) for each in (named if isinstance(named, (list, tuple)) else [named]) if each]

    def vec_wrapper(self) -> str | None:
        """The wrapper around all environments, if there is one of somebody's own."""
        named = self.config.get("vec_env_wrapper")
        return str(named)[:80] if named else None

    def frame_stack(self) -> int | None:
        """Observations that are stacked; None where nothing states it."""
        stated = self.config.get("frame_stack")
        return stated if type(stated) is int and stated > 0 else None


def beside(path: Path, hints: Hints) -> tuple[str, Companions]:
    """The model's own name among the files around it, and these."""
    if hints.companions is not None and hints.file is not None:
        return hints.file, hints.companions
    folder = path.absolute().parent
    names = tuple(each.relative_to(folder).as_posix() for each in files_below(folder))
    return path.name, Companions(names, lambda name: folder / name)


def read_zoo(path: Path, hints: Hints) -> Zoo:
    """Everything beside the model at ``path`` that says how it was trained.

    Raises:
        UserError: a file that cannot be read, or observations that were normalised by statistics that are
            not there.
    """
    own, companions = beside(path, hints)
    arguments = _settings(own, companions, _ARGUMENTS)[0]
    config, config_file = _settings(own, companions, _CONFIG)
    env_kwargs, env_kwargs_file = _env_kwargs(own, companions, arguments, config, config_file)
    return Zoo(
        env_id=_text(arguments.get("env")),
        config=config,
        config_file=config_file,
        env_kwargs=env_kwargs,
        env_kwargs_file=env_kwargs_file,
        statistics=_statistics(path, own, companions, config, config_file),
    )


def closest(own: str, names: tuple[str, ...], *wanted: str) -> str | None:
    """The file of a wanted name that belongs to the model called ``own``; None if none does.

    In order: the folder called as the model, its own folder, the one other folder beside it that has such a
    file, the folders above.
    """
    here, stem = PurePosixPath(own).parent, PurePosixPath(own).stem
    found = {PurePosixPath(name) for name in names if PurePosixPath(name).name in wanted}
    for folder in (here / stem, here):
        for name in wanted:
            if folder / name in found:
                return str(folder / name)
    below = sorted({each.parent for each in found if each.parent.parent == here and each.parent != here})
    folders = below[:1] if len(below) == 1 else []
    for folder in (*folders, *here.parents):
        for name in wanted:
            if folder / name in found:
                return str(folder / name)
    return None


def _settings(own: str, companions: Companions, wanted: str) -> tuple[dict[str, Any], str | None]:
    name = closest(own, companions.names, wanted)
    return (read_yaml(companions.path_of(name)), name) if name else ({}, None)


def _env_kwargs(
    own: str,
    companions: Companions,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
    config_file: str | None,
) -> tuple[dict[str, Any], str | None]:
    """As RL Zoo chooses them: the command line's, else those that were uploaded, else the configuration's."""
    given = literal(arguments.get("env_kwargs"))
    if isinstance(given, dict) and given:
        return {str(name): value for name, value in given.items()}, _ARGUMENTS
    uploaded, file = _settings(own, companions, _ENV_KWARGS)
    if uploaded:
        return uploaded, file
    configured = literal(config.get("env_kwargs"))
    if isinstance(configured, dict) and configured:
        return {str(name): value for name, value in configured.items()}, config_file
    return {}, None


def _wrapper(named: Any) -> tuple[str, dict[str, Any]]:
    """A wrapper as text, as a class, or as a dict of one name and its arguments."""
    if isinstance(named, dict) and len(named) == 1:
        name, arguments = next(iter(named.items()))
        return str(name), dict(arguments) if isinstance(arguments, dict) else {}
    return str(named)[:80], {}


def _text(value: Any) -> str | None:
    """A text, also one of huggingface_sb3's own class, which has ``-`` for the ``/`` of a name."""
    if isinstance(value, Tagged):
        state = value.value.get("state") if isinstance(value.value, dict) else None
        full = state.get("gym_id") if isinstance(state, dict) else None
        value = full if isinstance(full, str) else value.text
    return value if isinstance(value, str) and value else None


def _statistics(
    path: Path, own: str, companions: Companions, config: Mapping[str, Any], config_file: str | None
) -> Statistics | None:
    name = closest(own, companions.names, *_STATISTICS)
    if name is not None:
        return read_statistics(companions.path_of(name), name)
    if _normalises(config.get("normalize")):
        raise UserError(
            f"{path} was trained on normalised observations ({config_file}: normalize), and there is no "
            f"{' or '.join(_STATISTICS)} beside it; without the statistics it cannot act"
        )
    return None


def _normalises(setting: Any) -> bool:
    """Whether RL Zoo's ``normalize`` covers observations: true, a dict, or the text of one."""
    value = literal(setting)
    if isinstance(value, dict):
        return value.get("norm_obs", True) is not False
    return bool(value)


def read_statistics(path: Path, name: str) -> Statistics | None:
    """The observation statistics of a pickled VecNormalize; None where it normalises rewards alone.

    Raises:
        UserError: no such pickle, or statistics that no vector of numbers has.
    """
    record = read_pickle(path, most_bytes=_MAX_STATISTICS_BYTES)
    if not isinstance(record, Record) or record.name != "VecNormalize":
        found = record.name if isinstance(record, Record) else type(record).__name__
        raise UserError(f"{path}: expected the statistics of a VecNormalize, found {found}")
    if record.field("norm_obs") is False:
        return None
    running = record.field("obs_rms")
    if isinstance(running, dict):
        raise UserError(
            f"{path}: statistics of several observations at once; those of one vector can be read"
        )
    mean, variance = (_vector(path, running, each) for each in ("mean", "var"))
    clip = _number(path, record, "clip_obs", _DEFAULT_CLIP)
    epsilon = _number(path, record, "epsilon", _DEFAULT_EPSILON)
    if mean.shape != variance.shape or bool((variance < 0).any()) or clip <= 0 or epsilon < 0:
        raise UserError(f"{path}: mean, variance, clip_obs and epsilon do not belong together")
    return Statistics(mean, variance, epsilon, clip, name)


def _vector(path: Path, running: Any, name: str) -> Tensor:
    values = running.field(name) if isinstance(running, Record) else None
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or values.ndim != 1:
        shape = f"shape {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise UserError(f"{path}: obs_rms.{name}: expected a vector of numbers, found {shape}")
    return torch.tensor(values.astype(np.float64))


def _number(path: Path, record: Record, name: str, default: float) -> float:
    value = record.field(name)
    if value is None:
        return default
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not plain or not abs(value) < _MAX_NUMBER:  # an integer can be too large for a float
        raise UserError(f"{path}: {name}: expected a number, found {type(value).__name__}")
    return float(value)
