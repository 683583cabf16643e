"""Cells as processes of this machine: a few at a time, each with its share of the cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from reincarnate import files
from reincarnate.comparison.grid import Cell, cell_folder, state_of
from reincarnate.errors import UserError
from reincarnate.phases import Stopped

_POLL_SECONDS = 0.2
#: What numeric libraries read to know how many threads to start.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "REINCARNATE_CORES")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    started: float  # time.monotonic()


class LocalLauncher:
    """Runs cells until all are finished or have failed."""

    def __init__(
        self,
        folder: Path,
        jobs: int,
        announce: Callable[[str], None],
        command: Sequence[str] = (sys.executable, "-m", "reincarnate", "run"),
    ) -> None:
        self._folder, self._jobs, self._say, self._command = folder, jobs, announce, tuple(command)
        self._waiting: list[Cell] = []
        self._running: list[_Running] = []
        self._failed: dict[str, str] = {}
        self._stop = threading.Event()
        self._told_of: set[str] = set()
        self._total = 0

    def run(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Run every cell that is not finished; returns the failed ones by name, with the reason in a line.

        Raises:
            Stopped: Ctrl-C or SIGTERM; the cells that were running have stopped and can be resumed.
        """
        (self._folder / "logs").mkdir(exist_ok=True)
        (self._folder / "cells").mkdir(exist_ok=True)
        self._total = len(cells)
        self._waiting = [cell for cell in cells if self._state(cell) != "done"]
        finished = self._total - len(self._waiting)
        if finished:
            self._say(f"{finished} of {self._total} cells are finished already")
        with self._stopping_on_signals():
            while (self._waiting or self._running) and not self._stop.is_set():
                self._step()
            self._end_children()
        if self._stop.is_set():
            raise Stopped
        return self._failed

    # ------------------------------------------------------------ one round

    def _step(self) -> None:
        self._reap()
        for cell in list(self._waiting):
            if len(self._running) >= self._jobs or self._stop.is_set():
                break
            if self._elsewhere(cell):
                continue
            if self._state(cell) == "done":  # by a process of an earlier comparison
                self._waiting.remove(cell)
            elif not self._must_wait(cell):
                self._waiting.remove(cell)
                self._start(cell)
        time.sleep(_POLL_SECONDS)

    def _must_wait(self, cell: Cell) -> bool:
        """Whether another cell is still measuring or collecting what this one would wait for."""
        return cell.teacher is not None and any(
            other.cell.teacher == cell.teacher and not self._prepared(other.cell) for other in self._running
        )

    def _prepared(self, cell: Cell) -> bool:
        try:
            result = files.read_json(cell_folder(self._folder, cell) / "result.json")
            if cell.collects:
                return result["buffers"]["teacher"]["path"] is not None
            return result["phases"]["evaluate"]["seconds"] is not None
        except (UserError, KeyError, TypeError):
            return False

    def _elsewhere(self, cell: Cell) -> bool:
        """Whether a process that an earlier, killed comparison left behind still works on the cell."""
        path = cell_folder(self._folder, cell) / "run.lock"
        if not path.exists():
            return False
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if cell.name not in self._told_of:
                self._told_of.add(cell.name)
                self._say(f"{cell.name} is going on in another process; waiting for it to end")
            return True
        lock.release()
        return False

    def _start(self, cell: Cell) -> None:
        run = cell_folder(self._folder, cell)
        begun = self._state(cell) == "begun"
        arguments = ["--resume", str(run)] if begun else [*cell.arguments, "--out", str(run)]
        with self._log(cell).open("ab") as log:
            process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | thread_limits(self._jobs),
                start_new_session=True,  # Ctrl-C reaches it once, from here
            )
        self._running.append(_Running(cell, process, time.monotonic()))
        self._say(f"{cell.name}: {'resumed' if begun else 'started'}")

    def _reap(self) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            cell, minutes = running.cell, (time.monotonic() - running.started) / 60
            if code == 0 and self._state(cell) == "done":
                left = len(self._waiting) + len(self._running)
                self._say(f"{cell.name}: done after {minutes:.1f} min, {left} of {self._total} cells to go")
            elif not self._stop.is_set():
                self._failed[cell.name] = self._reason(cell, code)
                self._say(f"{cell.name}: failed: {self._failed[cell.name]}")

    # ------------------------------------------------------------ the end

    def _end_children(self) -> None:
        """Ask what still runs to stop, and wait for it; a second signal asks again, less patiently."""
        if self._running:
            self._say(f"stopping {len(self._running)} cells")
        self._signal_children()
        while self._running:
            self._reap()
            time.sleep(_POLL_SECONDS)

    def _signal_children(self) -> None:
        for running in self._running:
            with contextlib.suppress(ProcessLookupError):
                running.process.terminate()

    @contextlib.contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(number: int, frame: Any) -> None:
            if self._stop.is_set():
                self._signal_children()
            self._stop.set()

        numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        previous = {number: signal.signal(number, request) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------ small things

    def _state(self, cell: Cell) -> str:
        return state_of(cell_folder(self._folder, cell))

    def _log(self, cell: Cell) -> Path:
        return self._folder / "logs" / f"{cell.name}.log"

    def _reason(self, cell: Cell, code: int) -> str:
        """What the cell said last, or the signal that ended it."""
        log = self._log(cell)
        if code < 0:
            return f"killed by signal {-code}, see {log}"
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1].removeprefix("reincarnate: ") if lines else "it said nothing"
        return said if code == 2 else f"exit code {code}: {said} (see {log})"


def thread_limits(jobs: int) -> dict[str, str]:
    """Environment variables that give each of ``jobs`` processes its share of the cores.

    Nothing for a single job. A limit that is set already and lower stays.
    """
    if jobs == 1:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // jobs)

    def limit(name: str) -> int:
        told = os.environ.get(name, "")
        return min(share, int(told)) if told.isdecimal() and int(told) > 0 else share

    return {name: str(limit(name)) for name in _THREAD_VARIABLES}
