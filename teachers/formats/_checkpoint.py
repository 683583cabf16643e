"""What every reader takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from reincarnate.teachers.teacher import Reported, TeacherSpec


@dataclass(frozen=True)
class Companions:
    """The files that lie beside a checkpoint, in its folder or repository: settings, statistics, results."""

    names: tuple[str, ...]  # POSIX paths below the folder or repository, the checkpoint's own among them
    path_of: Callable[[str], Path] = field(
        compare=False
    )  # one of the names -> the file on this machine, downloaded if need be


@dataclass(frozen=True)
class Hints:
    """What is known about a checkpoint besides its content."""

    env_id: str | None = None  # said by the user (--env): wins over everything
    source: str | None = None  # name of the repository or folder; None: of the folder that holds the file
    exp_name: str | None = None  # script that wrote it, e.g. "dqn_atari_jax"
    image_size: tuple[int, int] | None = None  # height, width, where the weights leave it open
    file: str | None = None  # the checkpoint's own name among its companions
    companions: Companions | None = None  # what lies beside it


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read, checked and brought to the canonical names and layouts."""

    spec: TeacherSpec
    state_dict: dict[str, Tensor]  # float32, named as reincarnate.networks names parameters
    format: str  # one of FORMATS
    reported: Reported | None = None  # a return claimed inside the file
    assumed: dict[str, str] = field(default_factory=dict)  # EnvSpec field -> why this value is believed
