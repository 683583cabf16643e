"""Cells as a job array of Slurm, written and submitted by submitit.

Each cell is one task of the array. Which job has which cell is kept in ``slurm/jobs.json``, so that a
comparison that is gone on with waits for jobs that are still in the queue and submits the others again.
"""

from __future__ import annotations

import importlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell, cell_folder, state_of
from reincarnate.launching.work import (
    STOP_SIGNALS,
    CellProcess,
    InterruptedCellError,
    Work,
    last_line,
    limits_of,
    make_folders,
    unfinished,
)
from reincarnate.signals import stopping_on_signals

#: Of a task, in minutes, where --slurm time=... does not say; a cell that meets it is queued again.
TIME_MINUTES = 240
_TIMEOUTS = 20  # how often a task is queued again at its time limit
_POLL_SECONDS = 1.0
#: A job that Slurm has never heard of after so long is not in its queue any more.
_UNKNOWN_SECONDS = 600.0
_TIME = re.compile(r"((?P<days>\d+)-)?(?P<a>\d+)(:(?P<b>\d+))?(:(?P<c>\d+))?")


class SlurmCell:
    """What a task of the array does; submitit calls :meth:`checkpoint` when Slurm is about to end the job."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._process: CellProcess | None = None

    def __call__(self) -> str | None:
        """Run the cell; why it is not finished, or None."""
        self._process = CellProcess(self._work)
        try:
            return self._process.run().reason
        except InterruptedCellError as interrupted:
            return str(interrupted)

    def checkpoint(self) -> Any:
        """Stop the cell where it can be resumed, and queue the same again."""
        if self._process is not None:
            self._process.stop()
        return _submitit().helpers.DelayedSubmission(SlurmCell(self._work))


class SlurmLauncher:
    """Submits the cells that are not finished and, unless told otherwise, waits for them.

    Args:
        folder: of the comparison, on a path that all nodes share.
        announce: told what happens, a line at a time.
        jobs: tasks of the array at a time; no limit unless given.
        cpus: of a cell, asked of Slurm and the limit of its threads; Slurm's own default unless given.
        gpus: of a cell; none unless given.
        options: of sbatch, by their long names: ``{"partition": "gpu", "time": "8:00:00"}``.
        wait: for the jobs; else they are only submitted.
        environment: variables of the cells beside those of their nodes.
        command: instead of `reincarnate run`.
    """

    def __init__(
        self,
        folder: Path,
        announce: Callable[[str], None],
        *,
        jobs: int | None = None,
        cpus: int | None = None,
        gpus: float | None = None,
        options: Mapping[str, str] | None = None,
        wait: bool = True,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self._folder, self._say, self._wait = folder.resolve(), announce, wait
        self._environment = (limits_of(cpus) if cpus else {}) | dict(environment or {})
        self._command = tuple(command)
        self._submitit = _submitit()
        self._parameters = _parameters(self._folder.name, jobs, cpus, gpus, dict(options or {}))
        self._home = self._folder / "slurm"
        self._stop = threading.Event()
        self._failed: dict[str, str] = {}
        self._total = 0

    def run(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Submit what is not finished; returns the failed cells by name, with the reason in a line.

        Raises:
            UserError: Slurm is not here, or refuses the job.
            Stopped: Ctrl-C while waiting; the jobs go on.
        """
        if not all(shutil.which(program) for program in ("sbatch", "srun", "sacct")):
            raise UserError(
                "--launcher slurm needs sbatch, srun and sacct, which are not here; go to a login node"
            )
        make_folders(self._folder)
        self._home.mkdir(exist_ok=True)
        self._total = len(cells)
        waiting = unfinished(self._folder, cells, self._say)
        jobs = self._queued(waiting)
        left = [cell for cell in waiting if cell.name not in jobs]
        jobs |= self._submit(left) if left else {}
        if not self._wait:
            self._say(f"not waiting; look with squeue, and go on with --resume {self._folder}")
            return {}
        with stopping_on_signals(self._stop, names=STOP_SIGNALS):
            self._follow({cell.name: (cell, jobs[cell.name]) for cell in waiting})
        if self._stop.is_set():
            self._say(f"the jobs go on without this process; come back with --resume {self._folder}")
            from reincarnate.phases import Stopped  # loads torch, which a task of the array has no use for

            raise Stopped
        return self._failed

    # ------------------------------------------------------------ submitting

    def _submit(self, cells: Sequence[Cell]) -> dict[str, Any]:
        work = [SlurmCell(self._work(cell)) for cell in cells]
        try:
            executor = self._submitit.SlurmExecutor(self._home, max_num_timeout=_TIMEOUTS)
            executor.update_parameters(**self._parameters)
            jobs = executor.submit_array(work)
        except (RuntimeError, OSError) as error:
            raise UserError(f"Slurm refused the job: {last_line(error)}") from None
        found = {cell.name: job for cell, job in zip(cells, jobs, strict=True)}
        self._remember({name: job.job_id for name, job in found.items()})
        number = jobs[0].job_id.partition("_")[0]
        self._say(
            f"job {number} submitted: {len(cells)} of {self._total} cells; its files are in {self._home}"
        )
        return found

    def _work(self, cell: Cell) -> Work:
        return Work(cell, str(self._folder), self._environment, self._command)

    # ------------------------------------------------------------ jobs of an earlier process

    def _remember(self, ids: Mapping[str, str]) -> None:
        known = self._known() | {name: {"job": job, "submitted": time.time()} for name, job in ids.items()}
        files.write_json(self._home / "jobs.json", known)

    def _known(self) -> dict[str, dict[str, Any]]:
        path = self._home / "jobs.json"
        return dict(files.read_json(path)) if path.is_file() else {}

    def _queued(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Jobs of these cells that Slurm has not ended."""
        known, found = self._known(), {}
        for cell in cells:
            if cell.name not in known:
                continue
            job = self._submitit.SlurmJob(self._home, known[cell.name]["job"])
            age = time.time() - known[cell.name]["submitted"]
            if not job.done(force_check=True) and not (job.state == "UNKNOWN" and age > _UNKNOWN_SECONDS):
                found[cell.name] = job
        if found:
            self._say(f"{len(found)} cells are in Slurm's queue already; waiting for them")
        return found

    # ------------------------------------------------------------ waiting

    def _follow(self, jobs: dict[str, tuple[Cell, Any]]) -> None:
        while jobs and not self._stop.is_set():
            for name, (cell, job) in list(jobs.items()):
                over = job.done()  # asked first: what ends after this is seen in the next round
                reason = self._reason(job) if over else None
                if state_of(cell_folder(self._folder, cell)) == "done":
                    del jobs[name]
                    self._say(f"{name}: done, {len(jobs)} of {self._total} cells to go")
                elif reason is not None:
                    del jobs[name]
                    self._failed[name] = reason
                    self._say(f"{name}: failed: {reason}")
            self._stop.wait(_POLL_SECONDS)

    def _reason(self, job: Any) -> str | None:
        """What the task returned, or how Slurm ended it; None where the cell is finished, seen from there."""
        where = job.paths.stderr
        if not job.paths.result_pickle.exists():
            return f"job {job.job_id} ended as {job.state}, see {where}"
        try:
            returned = job.result()
        except RuntimeError:  # submitit's errors hold a traceback, which is in that file too
            return f"job {job.job_id} failed, see {where}"
        return None if returned is None else str(returned)


def _parameters(
    name: str, jobs: int | None, cpus: int | None, gpus: float | None, options: dict[str, str]
) -> dict[str, Any]:
    """Of submitit's executor."""
    if gpus is not None and gpus != int(gpus):
        raise UserError(f"--gpus-per-cell {gpus:g}: Slurm gives out whole GPUs")
    given: dict[str, Any] = {"job_name": name, "time": _minutes(options.pop("time", str(TIME_MINUTES)))}
    given |= {"array_parallelism": jobs} if jobs else {}
    given |= {"cpus_per_task": cpus} if cpus else {}
    given |= {"gpus_per_node": int(gpus)} if gpus else {}
    given["additional_parameters"] = {key: value or True for key, value in options.items()}
    return given


def _minutes(text: str) -> int:
    """Slurm's forms of a time limit: minutes, minutes:seconds, h:m:s, days-h[:m[:s]]."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(f"--slurm time={text}: no time of Slurm's; give minutes, or hours:minutes:seconds")
    a, b, c = (int(match[name] or 0) for name in "abc")
    if match["days"]:
        total = float((int(match["days"]) * 24 + a) * 60 + b + c / 60)
    else:
        total = a * 60 + b + c / 60 if match["c"] else a + b / 60
    return max(1, round(total))


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise UserError("--launcher slurm needs submitit: pip install 'reincarnate[slurm]'") from None
