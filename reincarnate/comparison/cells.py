"""What the cells of a comparison came to, read from their run directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reincarnate.comparison.grid import Grid
from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell, cell_folder
from reincarnate.report import RunData, read_run
from reincarnate.report.rundir import short_path
from reincarnate.types import Returns

#: Shares of the teacher's return, random play being 0, whose first crossing is told.
SHARES = (0.5, 0.9, 1.0)
_FILE_ENDINGS = (".cleanrl_model", ".model", ".pt", ".pth", ".zip", ".safetensors")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Method:
    """What is compared: a student from a teacher, or from scratch."""

    teacher: str | None
    student: str
    variant: str | None = None  # the settings that tell its runs from others of that student

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Method:
        """That of a cell or a summary of ``compare.json``."""
        return cls(row["teacher"], row["student"], row["variant"])

    @property
    def learner(self) -> str:
        """E.g. ``qdagger-dqn``, ``qdagger-dqn (collect.agent_steps=5000)``."""
        return f"{self.student} ({self.variant})" if self.variant else self.student

    @property
    def name(self) -> str:
        """E.g. ``qdagger-dqn from bundled/Breakout-dqn``, ``dqn from scratch``."""
        return f"{self.learner} from {short_path(self.teacher) if self.teacher else 'scratch'}"


def distinct_names(methods: Iterable[Method]) -> dict[Method, str]:
    """Names of methods; with the whole reference where a shortened one would be another's too."""
    known = list(methods)
    short = [method.name for method in known]
    return {
        method: method.name if short.count(method.name) == 1 else f"{method.learner} from {method.teacher}"
        for method in known
    }


def short_names(refs: Iterable[str | None]) -> dict[str | None, str]:
    """Teachers as tables have room for them: long paths by their end, or whole where two end alike."""
    known = list(dict.fromkeys(ref for ref in refs if ref))
    short = [short_path(ref) for ref in known]
    told = [name if short.count(name) == 1 else ref for ref, name in zip(known, short, strict=True)]
    return {None: "from scratch"} | dict(zip(known, told, strict=True))


def drawn_names(refs: Iterable[str | None]) -> dict[str | None, str]:
    """Teachers as pictures have room for them, every one different.

    Of a file its folder, where that is one teacher's; of a long name both ends, and a number where several
    have the same.
    """
    known = list(dict.fromkeys(ref for ref in refs if ref))
    short = [_folder_of_file(ref) or ref for ref in known]
    told = [
        _both_ends(name if short.count(name) == 1 else short_path(ref))
        for ref, name in zip(known, short, strict=True)
    ]
    return {None: "scratch"} | dict(zip(known, numbered(told), strict=True))


def numbered(names: Sequence[str]) -> list[str]:
    """The same names, with a number each where several are one."""
    return [
        f"{name} ({names[:place].count(name) + 1})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def _folder_of_file(ref: str) -> str | None:
    """The name of the folder that a checkpoint's file stands in; None for other references."""
    path = Path(ref)
    is_file = len(path.parts) > 3 or (path.suffix in _FILE_ENDINGS and ":" not in ref)
    return path.parent.name or None if is_file else None


def _both_ends(name: str) -> str:
    return name if len(name) <= 36 else f"{name[:18]}…{name[-17:]}"


@dataclass(frozen=True)
class Outcome:
    """One cell: what it was meant to be and, where there is one, its run."""

    method: Method
    env: str
    seed: int
    run: Path
    data: RunData | None  # None where no result was written
    error: str | None = None  # why it failed, as far as that is known

    @property
    def status(self) -> str:
        """``done``, ``failed``, or how far it got."""
        if self.data is None:
            return "failed" if self.error else "not begun"
        status = str(self.data.result["status"])
        return "failed" if self.error and status != "done" else status

    @property
    def done(self) -> bool:
        """Whether its numbers count."""
        return self.status == "done"

    def returns(self, name: str) -> Returns | None:
        """``teacher``, ``random``, ``offline`` or ``final``; None where nothing was measured."""
        return self.data.returns(name) if self.data else None

    @property
    def last(self) -> Returns | None:
        """The final return, or the one after the offline phase where nothing was measured later."""
        return self.returns("final") or self.returns("offline")

    @property
    def seconds(self) -> float | None:
        """Of all phases."""
        if self.data is None:
            return None
        spent = [phase.get("seconds") for phase in self.data.result["phases"].values()]
        return sum(seconds for seconds in spent if seconds) or None


@dataclass(frozen=True)
class Moment:
    """An evaluation on every axis."""

    phase: str
    updates: int
    agent_steps: int  # the student's own; 0 offline
    seconds: float  # of training since the offline phase began, without evaluations
    mean: float


def grouped(outcomes: Iterable[Outcome], key: Callable[[Outcome], K]) -> dict[K, list[Outcome]]:
    """Outcomes by a key, in the order in which the keys appear."""
    groups: dict[K, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return groups


def of_grid(folder: Path, grid: Grid, failed: Mapping[str, str]) -> list[Outcome]:
    """Outcomes of all cells, finished or not; ``failed`` has a reason by cell name."""
    sha256 = {teacher["ref"]: teacher["sha256"] for teacher in grid.teachers}
    return [
        _of_cell(cell, cell_folder(folder, cell), failed.get(cell.name), sha256.get(cell.teacher or ""))
        for cell in grid.cells
    ]


def _of_cell(cell: Cell, run: Path, error: str | None, teacher_sha256: str | None) -> Outcome:
    data = None
    if (run / "result.json").is_file():
        try:
            data = _of_this_cell(cell, read_run(run), teacher_sha256)
        except UserError as damaged:
            error = error or str(damaged)
    return Outcome(Method(cell.teacher, cell.student), cell.env, cell.seed, run, data, error)


def _of_this_cell(cell: Cell, data: RunData, teacher_sha256: str | None) -> RunData:
    """Unless somebody put another run in its folder."""
    found = (data.result["student"]["name"], data.result["env"], data.result["seed"])
    if found != (cell.student, cell.env, cell.seed):
        raise UserError(f"{data.directory} holds a run of {found[0]} in {found[1]}, seed {found[2]}")
    if teacher_sha256 and (data.result["teacher"] or {}).get("sha256") != teacher_sha256:
        raise UserError(f"{data.directory} holds a run of another teacher than {cell.teacher}")
    return data


def of_runs(folders: Sequence[Path]) -> list[Outcome]:
    """Outcomes of run directories that were made one by one.

    Raises:
        UserError: no run there, or a file of it is damaged.
    """
    outcomes = []
    for folder in folders:
        data = read_run(folder)
        result = data.result
        teacher = result["teacher"]["ref"] if data.reincarnated else None
        method = Method(teacher, result["student"]["name"])
        outcomes.append(Outcome(method, result["env"], int(result["seed"]), folder, data))
    return outcomes


def moments(outcome: Outcome) -> list[Moment]:
    """All evaluations of a cell, in order; seconds in proportion where a run did not record them."""
    if outcome.data is None:
        return []
    phases = outcome.data.result["phases"]
    before = phases["offline"]["seconds"] or 0.0
    found = []
    for each in outcome.data.curves.evaluations:
        online = each.phase == "online"
        phase, done = phases[each.phase], each.agent_steps if online else each.updates
        total = (phase["agent_steps"] if online else phase["updates"]) or 1
        within = each.seconds if each.seconds is not None else (phase["seconds"] or 0.0) * done / total
        seconds = within + (before if online else 0.0)
        found.append(Moment(each.phase, each.updates, each.agent_steps, seconds, each.returns.mean))
    return found


def first_reaching(points: Iterable[Moment], level: float) -> Moment | None:
    """The first evaluation at or above ``level``."""
    return next((point for point in points if point.mean >= level), None)


def relative(path: Path, folder: Path) -> str:
    """``path`` as seen from ``folder``."""
    return os.path.relpath(path.resolve(), folder.resolve())


def described_teacher(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What ``compare.json`` tells of the teacher of these cells."""
    result = next(outcome.data.result for outcome in outcomes if outcome.data)
    names = ("ref", "resolved", "revision", "sha256", "format", "act")
    return {name: result["teacher"][name] for name in names}
