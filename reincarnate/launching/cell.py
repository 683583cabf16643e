"""A run of a grid, and how far it got."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reincarnate import files
from reincarnate.errors import UserError

State = Literal["new", "begun", "done"]


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str  # of its folder
    teacher: str | None  # as given; None for a scratch student
    student: str
    env: str
    seed: int
    collects: bool  # needs a D_T
    arguments: tuple[str, ...]  # of `reincarnate run`, without --out


def cell_folder(folder: Path, cell: Cell) -> Path:
    """The run directory of a cell."""
    return folder / "cells" / cell.name


def state_of(run: Path) -> State:
    """Whether a cell has not begun, has begun, or is finished, told by its run directory alone."""
    if not (run / "config.json").exists():  # a run that has lost it is told so when it is resumed
        return "begun" if (run / "result.json").exists() else "new"
    try:
        status = files.read_json(run / "result.json").get("status")
    except (UserError, AttributeError):
        return "begun"
    return "done" if status == "done" else "begun"
