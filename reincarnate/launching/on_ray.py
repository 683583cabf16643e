"""Cells on a Ray cluster: each is a task of its own, placed by Ray, and run again where its node is lost.

The folder of the comparison is on a path that all nodes share. A task starts `reincarnate run` there as a
process; one that is run again resumes the cell from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell
from reincarnate.launching.work import (
    STOP_SIGNALS,
    Ended,
    InterruptedCellError,
    Work,
    last_line,
    limits_of,
    make_folders,
    must_wait,
    run_cell,
    unfinished,
)
from reincarnate.phases import Stopped
from reincarnate.signals import stopping_on_signals

_POLL_SECONDS = 1.0
_KNOCK_SECONDS = 10.0
_LOOK_SECONDS = 10.0  # between two looks at whether any node can take a cell
_NO_CLUSTER = "start one with `ray start --head`, or name it with --ray-address HOST:PORT"
#: How often a cell is run again whose worker or node was lost.
RETRIES = 5


@dataclass
class _Running:
    cell: Cell
    started: float  # time.monotonic() of its submission


class RayLauncher:
    """Runs cells until all are finished or have failed.

    Args:
        folder: of the comparison, on a path that all nodes share.
        announce: told what happens, a line at a time.
        address: of the cluster; the one that RAY_ADDRESS names, or that runs here, unless given.
        jobs: cells at a time; as many as the cluster has room for unless given.
        cpus: of a cell, reserved with Ray and the limit of its threads.
        gpus: of a cell, parts of one too; one where the cluster has any unless given.
        environment: variables of the cells beside those of their nodes.
        command: instead of `reincarnate run`.
    """

    def __init__(
        self,
        folder: Path,
        announce: Callable[[str], None],
        *,
        address: str | None = None,
        jobs: int | None = None,
        cpus: int | None = None,
        gpus: float | None = None,
        environment: dict[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self._folder, self._say, self._address = folder.resolve(), announce, address
        self._jobs, self._cpus, self._gpus = jobs, cpus or 1, gpus
        self._environment, self._command = dict(environment or {}), tuple(command)
        self._ray: Any = _ray()
        self._running: dict[Any, _Running] = {}
        self._failed: dict[str, str] = {}
        self._stop = threading.Event()
        self._room, self._next_look = True, 0.0

    def run(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Run every cell that is not finished; returns the failed ones by name, with the reason in a line.

        Raises:
            UserError: no cluster can be reached.
            Stopped: Ctrl-C or SIGTERM; the cells that were running have stopped and can be resumed.
        """
        make_folders(self._folder)
        waiting = unfinished(self._folder, cells, self._say)
        asked = stopping_on_signals(self._stop, self._cancel, STOP_SIGNALS)
        with _connected(self._ray, self._address), asked:
            task = self._task()
            while (waiting or self._running) and not self._stop.is_set():
                for cell in self._startable(waiting):
                    waiting.remove(cell)
                    reference = task.options(name=cell.name).remote(self._work(cell))
                    self._running[reference] = _Running(cell, time.monotonic())
                    self._say(f"{cell.name}: handed to the cluster")
                self._reap(len(waiting))
                self._tell_of_room()
            self._end()
        if self._stop.is_set():
            raise Stopped
        return self._failed

    # ------------------------------------------------------------ one round

    def _startable(self, waiting: Sequence[Cell]) -> Iterator[Cell]:
        for cell in list(waiting):
            running = [each.cell for each in self._running.values()]
            if self._jobs is not None and len(running) >= self._jobs:
                return
            if not must_wait(self._folder, cell, running):
                yield cell

    def _reap(self, waiting: int) -> None:
        if not self._running:
            time.sleep(_POLL_SECONDS)
            return
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL_SECONDS)
        for reference in ready:
            running = self._running.pop(reference)
            minutes = (time.monotonic() - running.started) / 60
            self._tell(running.cell, self._outcome(reference), minutes, waiting + len(self._running))

    def _outcome(self, reference: Any) -> Ended:
        try:
            ended: Ended = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)  # what was raised there
            return Ended(last_line(cause), "the cluster", False)
        return ended

    def _tell(self, cell: Cell, ended: Ended, minutes: float, left: int) -> None:
        if ended.reason is None:
            how = " (resumed there)" if ended.resumed else ""
            self._say(f"{cell.name}: done on {ended.host}{how} after {minutes:.1f} min, {left} cells to go")
        elif not self._stop.is_set():
            self._failed[cell.name] = ended.reason
            self._say(f"{cell.name}: failed: {ended.reason}")

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        """Ask what still runs to stop, and wait for it."""
        if self._running:
            self._say(f"stopping {len(self._running)} cells")
        self._cancel()
        while self._running:
            self._reap(0)

    def _cancel(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference)

    # ------------------------------------------------------------ the task

    def _task(self) -> Any:
        """Ray's remote function, with what each cell needs."""
        gpus = min(1.0, max((n.get("GPU", 0.0) for n in self._nodes()), default=0.0))
        self._gpus = gpus if self._gpus is None else self._gpus
        remote = self._ray.remote(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            max_retries=RETRIES,
            retry_exceptions=[InterruptedCellError],
        )
        return remote(run_cell)

    def _nodes(self) -> list[dict[str, float]]:
        """The resources of every node."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _tell_of_room(self) -> None:
        """Say when no node can take a cell: Ray itself waits in silence, and nodes come and go."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        gpus, had_room = self._gpus or 0.0, self._room
        self._room = any(n.get("CPU", 0) >= self._cpus and n.get("GPU", 0) >= gpus for n in self._nodes())
        if had_room and not self._room:
            self._say(
                f"no node of the cluster has {self._cpus} CPUs and {gpus:g} GPUs now; "
                "the cells wait until one joins (Ctrl-C, then fewer --cpus-per-cell or --gpus-per-cell)"
            )

    def _work(self, cell: Cell) -> Work:
        environment = limits_of(self._cpus) | self._environment
        if not self._gpus:  # Ray names the GPUs of a task that has some
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return Work(cell, str(self._folder), environment, self._command)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("--launcher ray needs Ray: pip install 'reincarnate[ray]'") from None


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """In the cluster; a program that is connected already stays so."""
    if ray.is_initialized():
        yield
        return
    try:
        _look_for(address or os.environ.get("RAY_ADDRESS", "auto"))
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster can be reached ({last_line(error)}); {_NO_CLUSTER}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _look_for(address: str) -> None:
    """OSError where nothing listens: Ray itself goes on knocking at such a door for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
