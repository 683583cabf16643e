"""Compare teachers, students and methods: a grid of runs, and sound statistics of what they came to.

from reincarnate.comparison import compare
found = compare(["bundled/CartPole-dqn"], ["qdagger-dqn", "dqn"], preset="quick", out="runs/compared")
print(found.document["verdict"])
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reincarnate import runfiles
from reincarnate.comparison import grid as grids
from reincarnate.comparison import results, trackers
from reincarnate.comparison.cells import Outcome, of_grid, of_runs
from reincarnate.comparison.document import build
from reincarnate.comparison.grid import Grid
from reincarnate.comparison.references import Reference, is_log, read_references
from reincarnate.comparison.variants import told_apart
from reincarnate.errors import UserError
from reincarnate.launching.choice import Launch, Launcher
from reincarnate.ranks import refuse_several
from reincarnate.runfiles import GRID_FILE

__all__ = ["Comparison", "Launch", "compare", "report_runs"]

_LOCK = "compare.lock"


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to; the same as the files in its folder."""

    folder: Path
    document: dict[str, Any]  # compare.json
    failed: Mapping[str, str] = field(default_factory=dict)  # cell -> why
    files: tuple[Path, ...] = ()
    outcomes: tuple[Outcome, ...] = field(default=(), repr=False, compare=False)

    def track(self, tracker: str, announce: Callable[[str], None] = lambda line: None) -> None:
        """Tell an experiment tracker, e.g. ``wandb``, of every finished run that it has not been told of.

        Raises:
            UserError: no such tracker, its package is not installed, or it cannot be reached.
        """
        trackers.track(tracker, self.folder, self.document, self.outcomes, announce)

    def cells(self) -> Any:
        """One row per cell, as a pandas data frame.

        Raises:
            UserError: pandas is not installed.
        """
        return _frame(results.cell_rows(self.document))

    def summary(self) -> Any:
        """One row per teacher and student, as a pandas data frame.

        Raises:
            UserError: pandas is not installed.
        """
        return _frame(self.document["summary"])

    def pairs(self) -> Any:
        """One row per pair of them, as a pandas data frame.

        Raises:
            UserError: pandas is not installed.
        """
        return _frame(self.document["pairs"])


def compare(
    teachers: Sequence[str] = (),
    students: Sequence[str] = ("qdagger-dqn",),
    *,
    seeds: int | Sequence[int] = 3,
    preset: str = "default",
    env: str | None = None,
    settings: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    launch: Launch | None = None,
    out: Path | str | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run every teacher x student x seed, each as a run of its own, and compare what they came to.

    The teacher's part (G_T, G_random, D_T) is made once per teacher. A student that needs no teacher runs
    once per environment and seed.

    Args:
        teachers: references, as ``run`` takes them.
        students: registered students.
        seeds: how many (1, 2, ...), or which.
        preset: of every run.
        env: the environment, where the teachers do not say or there is none.
        settings: dotted settings of every run.
        jobs: runs at a time; one on this machine, as many as there is room for elsewhere, unless given.
        launch: where they run; as processes of this machine unless given.
        out: the folder of the comparison; named by the time under ``runs/`` unless given.
        announce: told what happens, a line at a time.

    Raises:
        UserError: anything that the caller can put right, in one line, before anything runs.
        Stopped: Ctrl-C; :func:`resume` goes on.
    """
    refuse_several("a comparison")
    teachers, students = _texts("teachers", teachers), _texts("students", students)
    chosen = list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)
    if not chosen:
        raise UserError("a comparison takes at least one seed (--seeds)")
    _check_jobs(jobs)
    folder = Path(out) if out is not None else Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    _refuse_used(folder)
    where = launch or Launch()
    launcher = where.make(folder, jobs, announce)
    grid = grids.plan(
        teachers,
        students,
        chosen,
        preset=preset,
        env=env,
        settings=settings or {},
        announce=announce,
        here=where.launcher == "local",
    )
    folder.mkdir(parents=True, exist_ok=True)
    with runfiles.lock(folder, _LOCK):
        grid.save(folder)
        announce(f"comparison of {len(grid.cells)} cells in {folder}")
        return _run(folder, grid, launcher)


def resume(
    folder: Path | str,
    *,
    jobs: int | None = None,
    launch: Launch | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Go on with a comparison: finished cells stay as they are, all others are resumed or started.

    Raises:
        UserError: no comparison there, or another process runs it.
        Stopped: Ctrl-C.
    """
    refuse_several("a comparison")
    _check_jobs(jobs)
    where = Path(folder)
    grid = Grid.load(where)
    launcher = (launch or Launch()).make(where, jobs, announce)
    with runfiles.lock(where, _LOCK):
        return _run(where, grid, launcher)


def report_runs(folders: Sequence[Path | str], out: Path | str | None = None) -> Comparison:
    """The pages of a comparison from run directories, or folders of comparisons, that exist already.

    Args:
        folders: runs or comparisons; cells of a comparison that are not finished are told and not counted.
            Runs of one student with different settings are methods of their own; one policy that was named
            in two ways is one teacher.
            TensorBoard logs of CleanRL or Stable-Baselines3 among them are reference curves.
        out: where to write; a single comparison's own folder, or ``report``, unless given.

    Raises:
        UserError: no run there, or a file of it is damaged; teachers that cannot be told apart, or were
            measured under different acting rules.
    """
    outcomes: list[Outcome] = []
    paths = [Path(folder) for folder in folders]
    where = _report_folder(paths, out)
    _refuse_twice(paths)
    _refuse_folders_of_runs(paths)
    ours = (GRID_FILE, "result.json")
    logs = [path for path in paths if not any((path / name).exists() for name in ours) and is_log(path)]
    runs = [path for path in paths if path not in logs]
    if not runs:
        raise UserError(f"{paths[0]} is a reference curve; give it beside at least one run")
    for path in runs:
        is_grid = (path / GRID_FILE).is_file()
        outcomes += of_grid(path, Grid.load(path), {}) if is_grid else of_runs([path])
    _refuse_twice([outcome.run for outcome in outcomes])
    _refuse_copies(outcomes)
    outcomes = told_apart(outcomes)
    references = read_references(logs, {outcome.env for outcome in outcomes})
    where.mkdir(parents=True, exist_ok=True)
    return _write(where, outcomes, {}, references)


def track_runs(
    folders: Sequence[Path | str],
    tracker: str,
    where: Path | str,
    *,
    announce: Callable[[str], None] = lambda line: None,
) -> None:
    """Tell an experiment tracker of runs without comparing them; ``where`` keeps what it was told of.

    Raises:
        UserError: as :meth:`Comparison.track`; no run there, or a file of it is damaged.
    """
    outcomes, folder = told_apart(of_runs([Path(each) for each in folders])), Path(where)
    trackers.track(tracker, folder, build(outcomes, folder), outcomes, announce)


def _run(folder: Path, grid: Grid, launcher: Launcher) -> Comparison:
    failed = launcher.run(grid.cells)
    return _write(folder, of_grid(folder, grid, failed), failed)


def _write(
    folder: Path,
    outcomes: Sequence[Outcome],
    failed: Mapping[str, str],
    references: Sequence[Reference] = (),
) -> Comparison:
    document = build(outcomes, folder, references)
    written = results.write(folder, document, outcomes, references)
    return Comparison(folder, document, failed, tuple(written), tuple(outcomes))


def _texts(what: str, given: Sequence[str]) -> list[str]:
    """A single one would be taken for its letters."""
    if isinstance(given, str):
        raise UserError(f"{what} is a list, got the text {given!r}; pass [{given!r}]")
    return [str(each) for each in given]


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and (jobs < 1 or int(jobs) != jobs):
        raise UserError(f"a comparison takes at least one job, got --jobs {jobs}")


def _report_folder(paths: Sequence[Path], out: Path | str | None) -> Path:
    """Where a report of ``paths`` goes: nowhere that holds something else."""
    single = len(paths) == 1 and (paths[0] / GRID_FILE).is_file()
    where = Path(out) if out is not None else paths[0] if single else Path("report")
    if where.exists() and not where.is_dir():
        raise UserError(f"{where} is not a folder; choose another --out")
    if (where / "result.json").exists():
        raise UserError(f"{where} holds a run; choose another --out")
    return where


def _refuse_folders_of_runs(paths: Sequence[Path]) -> None:
    """A folder that holds runs beside each other is easily taken for one."""
    for path in paths:
        runs = sorted(each.parent.name for each in path.glob("*/result.json"))
        if runs and not (path / "result.json").exists():
            raise UserError(f"{path} is no run but holds some; name them, e.g. {path / runs[0]}")


def _refuse_twice(paths: Sequence[Path]) -> None:
    """A run that counts twice would make a difference look surer than it is."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UserError(f"{path} is given more than once; every run counts once")
        seen.add(path.resolve())


def _refuse_copies(outcomes: Sequence[Outcome]) -> None:
    known: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.data is not None:
            text = json.dumps([outcome.data.result, outcome.data.curves.to_dict()], sort_keys=True)
            first = known.setdefault(text, outcome)
            if first is not outcome:
                raise UserError(f"{outcome.run} is a copy of {first.run}; every run counts once")


def _refuse_used(folder: Path) -> None:
    if (folder / GRID_FILE).exists():
        raise UserError(
            f"{folder} already holds a comparison; choose another --out, or go on with --resume {folder}"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder; choose another --out")


def _frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("data frames need pandas: pip install pandas") from None
    return pandas.DataFrame(list(rows))
