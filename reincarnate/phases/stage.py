"""What all phases of a run share, and the points at which a run may be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from reincarnate import seeds
from reincarnate.config import RunConfig
from reincarnate.curves import Curves
from reincarnate.device import Precision
from reincarnate.errors import UserError
from reincarnate.logger import RunLogger
from reincarnate.progress import Progress
from reincarnate.ranks import ALONE, Ranks
from reincarnate.replay import Sampler
from reincarnate.students.student import Student, StudentEntry
from reincarnate.teachers.formats import save_native
from reincarnate.teachers.teacher import Reported, Teacher, TeacherSpec
from reincarnate.types import EnvSpec, Returns

T = TypeVar("T")


class Stopped(Exception):
    """The user asked the run to stop; the checkpoint is written."""


@dataclass
class Stage:
    """One run's parts. Each phase owns its counters; a stage has none."""

    config: RunConfig
    folder: Path
    spec: EnvSpec
    device: torch.device
    precision: Precision
    teacher: Teacher | None
    student: Student
    entry: StudentEntry
    generator: torch.Generator  # of the learner and the actors, on the device
    sampler: Sampler  # draws batches, where the buffers are
    progress: Progress
    logger: RunLogger
    curves: Curves
    save: Callable[[], None]  # writes a checkpoint now
    checkpoint_due: Callable[[], bool]
    stop_requested: Callable[[], bool]
    teacher_return: Returns | None = None
    random_return: Returns | None = None
    ranks: Ranks = ALONE  # of the processes that train this student together
    _apart: bool = False

    def seed(self, purpose: str, count: int = 0) -> int:
        """A seed for ``purpose``, distinct per purpose, run seed and ``count``."""
        return seeds.derive(self.config.seed, purpose, count)

    @property
    def shares_teacher(self) -> bool:
        """Whether G_T, G_random and D_T are those of every run with this ``teacher_seed``."""
        return self.config.teacher_seed is not None

    def set_returns(self, teacher: Returns | None = None, random: Returns | None = None) -> None:
        """What the teacher's and random play's games came to, here and in the curves; None: as before."""
        self.teacher_return = self.curves.teacher = teacher or self.teacher_return
        self.random_return = self.curves.random = random or self.random_return

    def safe_point(self) -> None:
        """Between two steps of a phase: checkpoint when due; raise :class:`Stopped` when asked to stop."""
        stop = self.stop_requested()
        stop, due = self.ranks.agree(stop, not stop and self.checkpoint_due())
        if stop or due:
            self.save()
        if stop:
            raise Stopped

    def stop_point(self) -> None:
        """Inside work that is repeated as a whole on resume: raise :class:`Stopped` when asked to stop."""
        if self.stop_requested():
            if not self._apart:
                self.save()
            raise Stopped

    @property
    def share(self) -> tuple[int, int]:
        """Which part of work, and of how many, is this process's: all of it inside :meth:`apart`."""
        return (0, 1) if self._apart else (self.ranks.rank, self.ranks.size)

    def apart(self, work: Callable[[], T], undo: Callable[[], object] = lambda: None) -> list[T]:
        """Every rank does its ``work`` at its own pace; what each got, by rank (it is pickled).

        When one of them is asked to stop, in ``work`` or while it waits, none of the work counts.

        Args:
            work: calls :meth:`stop_point`; it is repeated as a whole on resume.
            undo: before the checkpoint of a stop, takes back what ``work`` has changed.

        Raises:
            Stopped: a rank was asked to stop.
        """
        if self.share[1] == 1:
            return [work()]
        done = self.ranks.gather(self._unless_stopped(work))
        if None not in done:
            return [value for each in done if each is not None for value in each]
        undo()
        self.save()
        raise Stopped

    def _unless_stopped(self, work: Callable[[], T]) -> tuple[T] | None:
        self._apart = True
        try:
            return (work(),)
        except Stopped:
            self.ranks.tell_stop()
            return None
        finally:
            self._apart = False

    def in_turn(self, work: Callable[[], None]) -> None:
        """Rank 0 does ``work``, then the others do it, and find what it has left them.

        Raises:
            Stopped: a rank was asked to stop.
        """
        if self.ranks.size == 1:
            work()
            return
        for first in (True, False):
            self.apart(work if self.ranks.first == first else _nothing)


def _nothing() -> None:
    """What a rank does while it is another's turn."""


class PhaseClock:
    """Adds the time since the last tick to ``state.seconds``, so that the parts of a resumed phase add up."""

    def __init__(self, state: Any) -> None:
        self._state, self._last = state, time.perf_counter()

    def tick(self) -> None:
        """Count the time until now."""
        now = time.perf_counter()
        self._state.seconds += now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave the time until now out (evaluations are not training)."""
        self._last = time.perf_counter()


def points_passed(done: int, total: int, points: int) -> int:
    """How many of ``points`` evenly spaced marks (the last one at ``total``) lie at or before ``done``."""
    return points if done >= total else points * done // total


def snapshot(stage: Stage, name: str) -> None:
    """The student as it is now, under ``snapshots/``."""
    if not stage.ranks.first:
        return
    folder = stage.folder / "snapshots"
    folder.mkdir(exist_ok=True)
    save_student(stage, folder / f"{name}.safetensors")


def save_student(stage: Stage, path: Path) -> None:
    """The student in the native format, with its return: ready to be the next run's teacher."""
    student = stage.student
    teacher = stage.teacher if stage.entry.method.learns_from_teacher else None
    if not all(bool(value.isfinite().all()) for value in student.network.state_dict().values()):
        raise UserError(
            "the student's weights are NaN or infinite: training has diverged; start again with a lower "
            "optimizer.learning_rate, or with loss weights nearer to the preset's"
        )
    spec = TeacherSpec(
        env=stage.spec,
        outputs=student.outputs,
        network=student.network_name,
        network_options=dict(student.network_options),
        algorithm=stage.config.student,
    )
    lineage = {
        "teacher": teacher and teacher.card.resolved,
        "teacher_sha256": teacher and teacher.card.sha256,
        "preset": stage.config.preset,
        "seed": stage.config.seed,
    }
    save_native(path, student.network, spec, lineage, reported=_reported(stage))


def _reported(stage: Stage) -> Reported | None:
    if not stage.curves.evaluations:
        return None
    last = stage.curves.evaluations[-1]
    returns = last.returns
    return Reported(returns.mean, "the run that trained it", returns.std, returns.n, last.act)
