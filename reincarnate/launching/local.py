"""Cells as processes of this machine: a few at a time, each with its share of the cores and of the GPUs."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reincarnate.device import visible_gpus
from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell, cell_folder, state_of
from reincarnate.launching.work import (
    STOP_SIGNALS,
    THREAD_VARIABLES,
    arguments_of,
    in_use,
    log_of,
    make_folders,
    must_wait,
    reason_of,
    unfinished,
)
from reincarnate.phases import Stopped
from reincarnate.signals import stopping_on_signals

_POLL_SECONDS = 0.2


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    started: float  # time.monotonic()
    gpus: tuple[str, ...]


class LocalLauncher:
    """Runs cells until all are finished or have failed.

    ``cpus`` and ``gpus`` are those of a cell: an equal share of the cores and, where there are GPUs, one.
    """

    def __init__(
        self,
        folder: Path,
        jobs: int,
        announce: Callable[[str], None],
        command: Sequence[str] = (sys.executable, "-m", "reincarnate", "run"),
        *,
        cpus: int | None = None,
        gpus: float | None = None,
    ) -> None:
        self._folder, self._jobs, self._say, self._command = folder, jobs, announce, tuple(command)
        self._cpus, self._gpus = cpus, GpuShares(visible_gpus(), gpus)
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
        make_folders(self._folder)
        self._total = len(cells)
        self._waiting = unfinished(self._folder, cells, self._say)
        with stopping_on_signals(self._stop, self._signal_children, STOP_SIGNALS):
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
            elif not must_wait(self._folder, cell, (running.cell for running in self._running)):
                self._waiting.remove(cell)
                self._start(cell)
        time.sleep(_POLL_SECONDS)

    def _elsewhere(self, cell: Cell) -> bool:
        """Whether a process that an earlier, killed comparison left behind still works on the cell."""
        busy = in_use(cell_folder(self._folder, cell))
        if busy and cell.name not in self._told_of:
            self._told_of.add(cell.name)
            self._say(f"{cell.name} is going on in another process; waiting for it to end")
        return busy

    def _start(self, cell: Cell) -> None:
        run = cell_folder(self._folder, cell)
        begun = self._state(cell) == "begun"
        gpus = self._gpus.take([running.gpus for running in self._running])
        with log_of(self._folder, cell).open("ab") as log:
            process = subprocess.Popen(
                [*self._command, *arguments_of(cell, run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | thread_limits(self._jobs, self._cpus) | self._gpus.environment(gpus),
                start_new_session=True,  # Ctrl-C reaches it once, from here
            )
        self._running.append(_Running(cell, process, time.monotonic(), gpus))
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
                self._failed[cell.name] = reason_of(log_of(self._folder, cell), code)
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

    def _state(self, cell: Cell) -> str:
        return state_of(cell_folder(self._folder, cell))


class GpuShares:
    """Which GPUs a cell sees: those that the fewest cells are using, the first of them in order."""

    def __init__(self, gpus: Sequence[str], each: float | None) -> None:
        """``each``: GPUs of a cell (a part of one is one that it shares); one unless given.

        Raises:
            UserError: more for each than there are.
        """
        self._gpus = tuple(gpus)
        self._silent = each is None and not gpus
        self._each = min(1, len(gpus)) if each is None else math.ceil(each)
        if self._each > len(gpus):
            there = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
            raise UserError(f"--gpus-per-cell {each:g}: this machine has {there}; ask for fewer")

    def take(self, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The GPUs of the next cell, while the running ones have ``taken`` theirs."""
        uses = {gpu: sum(gpu in each for each in taken) for gpu in self._gpus}
        return tuple(sorted(self._gpus, key=lambda gpu: uses[gpu])[: self._each])

    def environment(self, gpus: Sequence[str]) -> dict[str, str]:
        """What makes a process see these alone; nothing on a machine without GPUs."""
        return {} if self._silent else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def thread_limits(jobs: int, cpus: int | None = None) -> dict[str, str]:
    """Environment variables that give each of ``jobs`` processes its share of the cores, or ``cpus`` of them.

    Nothing for a single job. A limit that is set already and lower stays.
    """
    if jobs == 1 and cpus is None:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cpus or max(1, cores // jobs)

    def limit(name: str) -> int:
        told = os.environ.get(name, "")
        return min(share, int(told)) if told.isdecimal() and int(told) > 0 else share

    return {name: str(limit(name)) for name in THREAD_VARIABLES}
