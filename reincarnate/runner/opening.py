"""Opening a run directory: a new one, one to go on with, or the one that rank 0 has opened for all.

Everything that a user can get wrong is refused here, before anything is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from reincarnate import prepare, result, runfiles
from reincarnate.checkpoint import CheckpointFolder
from reincarnate.config import RunConfig
from reincarnate.device import Precision
from reincarnate.errors import UserError
from reincarnate.estimate import NOTHING_DONE, Done, Estimate, estimate
from reincarnate.logger import RunLogger
from reincarnate.progress import Progress
from reincarnate.ranks import Ranks
from reincarnate.students.student import StudentEntry, with_teacher
from reincarnate.teachers.teacher import Teacher


@dataclass(frozen=True)
class Chosen:
    """What rank 0 has chosen for all."""

    folder: Path
    precision: Precision
    storage: str


@dataclass(frozen=True)
class Opened:
    """A run directory, and what its run is made of."""

    folder: Path
    parts: prepare.Parts
    lock: FileLock | None  # rank 0's, which owns the directory
    saved: bool = False  # whether there is a checkpoint to restore

    @property
    def chosen(self) -> Chosen:
        """What the other ranks must choose as well."""
        return Chosen(self.folder, self.parts.precision, self.parts.storage.storage)


def open_new(config: RunConfig, folder: Path | None, progress: Progress, ranks: Ranks) -> Opened:
    """Make the directory of a new run, ``folder`` or one with a name of its own; owned by this process.

    Raises:
        UserError: the folder holds a run already, or anything in ``config`` does not fit together.
    """
    if folder is not None:
        runfiles.refuse_used(folder)
    parts = prepare.prepare(config, announce=progress.say, folder=folder, ranks=ranks)
    config = parts.config
    plan = foreseen(config, parts, ranks.size)  # makes the first environments, which may be refused too
    folder = folder or runfiles.free_folder(parts.spec.env_id, config)
    folder.mkdir(parents=True, exist_ok=True)
    lock = runfiles.lock(folder)
    runfiles.refuse_used(folder)  # a quicker run may have come and gone meanwhile
    described = parts.teacher.to_json() if parts.teacher else None
    runfiles.write_start(folder, config, described, result.versions(), ranks.size)
    if parts.teacher is not None and not parts.entry.method.learns_from_teacher:
        progress.say(_only_measured(parts.entry, parts.teacher))
    progress.say(f"run directory: {folder}")
    progress.say(plan.text(config.preset))
    return Opened(folder, parts, lock)


def _only_measured(entry: StudentEntry, teacher: Teacher) -> str:
    """What a teacher beside a scratch student is for, and which student would learn from it."""
    taught = with_teacher(entry)
    instead = f"; {taught.name} learns from it" if taught else ""
    measured = f"{teacher.card.ref} is only measured beside it"
    return f"student {entry.name} does not learn from a teacher: {measured}{instead}"


@contextlib.contextmanager
def open_again(folder: Path, progress: Progress, ranks: Ranks) -> Iterator[Opened]:
    """The run in ``folder``, owned by this process; given free where what is done with it here fails.

    Raises:
        UserError: no run there, it is going on elsewhere, with another number of ranks, or its files
            are damaged.
    """
    config, recorded = runfiles.read_config(folder), runfiles.read_teacher(folder)
    runfiles.check_same_ranks(folder, ranks.size)
    lock = runfiles.lock(folder)
    try:
        yield _prepared_again(config, recorded, folder, lock, progress, ranks)
    except BaseException:
        lock.release()
        raise


def open_beside(chosen: Chosen, progress: Progress, ranks: Ranks) -> Opened:
    """The same run as rank 0's, which has made or resumed it already and owns its directory."""
    config, recorded = runfiles.read_config(chosen.folder), runfiles.read_teacher(chosen.folder)
    return _prepared_again(config, recorded, chosen.folder, None, progress, ranks, chosen)


def _prepared_again(
    config: RunConfig,
    recorded: dict[str, Any] | None,
    folder: Path,
    lock: FileLock | None,
    progress: Progress,
    ranks: Ranks,
    chosen: Chosen | None = None,
) -> Opened:
    """As the last checkpoint says or, where there is none, rank 0."""
    state = _saved_state(CheckpointFolder(folder, ranks))
    parts = prepare.prepare(
        config,
        announce=progress.say,
        precision=state["precision"] if state else chosen.precision if chosen else None,
        recorded=recorded,
        where=state.get("storage") if state else chosen.storage if chosen else None,
        folder=folder,
        ranks=ranks,
    )
    if recorded and parts.teacher:
        runfiles.check_same_teacher(folder, recorded, parts.teacher)
    if state:
        _check_same_device(folder, state["device"], parts.device)
        if ranks.first:
            RunLogger.rewind(folder, state["tensorboard"])
    return Opened(folder, parts, lock, saved=state is not None)


def _saved_state(checkpoints: CheckpointFolder) -> dict[str, Any] | None:
    if not checkpoints.exists():
        return None
    state, _, _ = checkpoints.load(torch.device("cpu"))
    if not state.keys() >= {"precision", "device", "tensorboard"}:
        raise checkpoints.damaged("entries are missing")
    return state


def foreseen(config: RunConfig, parts: prepare.Parts, ranks: int, done: Done = NOTHING_DONE) -> Estimate:
    """How long what is left will take; leaves the run's random numbers as they were."""
    state = parts.generator.get_state()
    try:
        return estimate(config, parts, ranks, done)
    finally:
        parts.generator.set_state(state)


def _check_same_device(folder: Path, recorded: str, device: torch.device) -> None:
    if recorded.partition(":")[0] != device.type:
        raise UserError(f"{folder} ran on {recorded} and cannot go on with {device}; resume it where it ran")
