"""One cell as work for a machine: what that machine must know, the cell's process there, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell, cell_folder, state_of
from reincarnate.runfiles import GRID_FILE

EXIT_USER_ERROR, EXIT_STOPPED = 2, 130
#: What numeric libraries read to know how many threads to start; the last is read by ``envs/pool.py``.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "REINCARNATE_CORES")
#: What asks a launcher to stop; the last when its terminal is closed.
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_POLL_SECONDS = 0.5
#: Linux asks the cell to stop when the process that started it is gone, so that no cell works on without
#: anybody who counts it; exec keeps that wish. Without it a cell left alone is waited for.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class InterruptedCellError(Exception):
    """The cell's process was ended from outside, by a signal; it can be resumed."""


@dataclass(frozen=True)
class Work:
    """A cell, as it is sent to another machine."""

    cell: Cell
    folder: str  # of the comparison: absolute, and the same one on every machine
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the machine's own
    command: tuple[str, ...] = ()  # instead of that machine's own `reincarnate run`


@dataclass(frozen=True)
class Ended:
    """How the work on a cell ended."""

    reason: str | None  # why the cell is not finished; None if it is
    host: str
    resumed: bool  # not from its beginning


class CellProcess:
    """The process of a cell on this machine."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._run = cell_folder(Path(work.folder), work.cell)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> Ended:
        """Start or resume the cell and wait for its end; nothing if it is finished already.

        Raises:
            InterruptedCellError: a signal ended it that nobody here sent.
        """
        if not (Path(self._work.folder) / GRID_FILE).is_file():
            host = socket.gethostname()
            return self._ended(f"{host} does not see {self._work.folder}; put --out on a shared path", False)
        self._wait_until_free()
        state = state_of(self._run)
        if state == "done":
            return self._ended(None, False)
        try:
            code = self._execute()
        except BaseException:
            self.stop()
            raise
        if code == 0 and state_of(self._run) == "done":
            return self._ended(None, state == "begun")
        reason = reason_of(log_of(Path(self._work.folder), self._work.cell), code)
        if code < 0 or code == EXIT_STOPPED:
            raise InterruptedCellError(reason)
        return self._ended(reason, state == "begun")

    def stop(self) -> None:
        """Ask the process to stop at its next safe point, and wait for that."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):  # it was seen to end meanwhile
            # Not process.wait(): its lock may be held by what a signal handler has interrupted.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def _execute(self) -> int:
        work = self._work
        command = work.command or (sys.executable, "-m", "reincarnate", "run")
        if sys.platform == "linux":
            command = (sys.executable, "-c", _TIED, str(os.getpid()), *command)
        with log_of(Path(work.folder), work.cell).open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *arguments_of(work.cell, self._run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(work.environment),
                start_new_session=True,
            )
            while self._process.poll() is None:  # a cancelled task of Ray cannot interrupt a wait
                time.sleep(_POLL_SECONDS)
            return int(self._process.returncode)

    def _wait_until_free(self) -> None:
        """Wait for a process of an earlier attempt, which may still be at work."""
        while in_use(self._run):
            time.sleep(_POLL_SECONDS)

    def _ended(self, reason: str | None, resumed: bool) -> Ended:
        return Ended(reason, socket.gethostname(), resumed)


def run_cell(work: Work) -> Ended:
    """:meth:`CellProcess.run`, as a function that can be sent to another machine."""
    _hear_interrupts()
    return CellProcess(work).run()


def _hear_interrupts() -> None:
    """Ray cancels a task by interrupting Python's main thread as Ctrl-C does.

    Python does not hear that in a process that was born with SIGINT ignored, as all are whose cluster was
    started in the background of a script (``ray start --block &``): the cell would go on to its end.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def arguments_of(cell: Cell, run: Path) -> list[str]:
    """Of ``reincarnate run``, which starts the cell or resumes it."""
    begun = state_of(run) == "begun"
    return ["--resume", str(run)] if begun else [*cell.arguments, "--out", str(run)]


def in_use(run: Path) -> bool:
    """Whether a process works on the run directory."""
    path = run / "run.lock"
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def must_wait(folder: Path, cell: Cell, running: Iterable[Cell]) -> bool:
    """Whether another cell is still measuring or collecting what this one would wait for."""
    return cell.teacher is not None and any(
        other.teacher == cell.teacher and not _prepared(folder, other) for other in running
    )


def _prepared(folder: Path, cell: Cell) -> bool:
    try:
        result = files.read_json(cell_folder(folder, cell) / "result.json")
        if cell.collects:
            return result["buffers"]["teacher"]["path"] is not None
        return result["phases"]["evaluate"]["seconds"] is not None
    except (UserError, KeyError, TypeError):
        return False


def make_folders(folder: Path) -> None:
    """What all launchers write into."""
    for name in ("logs", "cells"):
        (folder / name).mkdir(exist_ok=True)


def unfinished(folder: Path, cells: Sequence[Cell], say: Callable[[str], None]) -> list[Cell]:
    """The cells that are still to be run; tells how many are finished."""
    left = [cell for cell in cells if state_of(cell_folder(folder, cell)) != "done"]
    if len(left) < len(cells):
        say(f"{len(cells) - len(left)} of {len(cells)} cells are finished already")
    return left


def log_of(folder: Path, cell: Cell) -> Path:
    """Where the cell's output goes."""
    return folder / "logs" / f"{cell.name}.log"


def reason_of(log: Path, code: int) -> str:
    """What the cell said last, or the signal that ended it."""
    if code < 0:
        return f"killed by signal {-code}, see {log}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].removeprefix("reincarnate: ") if lines else "it said nothing"
    return said if code == EXIT_USER_ERROR else f"exit code {code}: {said} (see {log})"


def last_line(error: Exception) -> str:
    """Of an error that may hold another program's whole output, or the traceback of another machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def limits_of(cores: int) -> dict[str, str]:
    """Environment variables for a process that has so many cores to itself."""
    return dict.fromkeys(THREAD_VARIABLES, str(cores))
