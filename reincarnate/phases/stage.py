"""What all phases of a run share, and the points at which a run may be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reincarnate import seeds
from reincarnate.config import RunConfig
from reincarnate.curves import Curves
from reincarnate.device import Precision
from reincarnate.logger import RunLogger
from reincarnate.progress import Progress
from reincarnate.replay import Sampler
from reincarnate.students.student import Student, StudentEntry
from reincarnate.teachers.formats import save_native
from reincarnate.teachers.teacher import Reported, Teacher, TeacherSpec
from reincarnate.types import EnvSpec, Returns


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

    def seed(self, purpose: str, count: int = 0) -> int:
        """A seed for ``purpose``, distinct per purpose, run seed and ``count``."""
        return seeds.derive(self.config.seed, purpose, count)

    @property
    def shares_teacher(self) -> bool:
        """Whether G_T, G_random and D_T are those of every run with this ``teacher_seed``."""
        return self.config.teacher_seed is not None

    def safe_point(self) -> None:
        """Between two steps of a phase: checkpoint when due; raise :class:`Stopped` when asked to stop."""
        if self.stop_requested():
            self.save()
            raise Stopped
        if self.checkpoint_due():
            self.save()

    def stop_point(self) -> None:
        """Inside work that is repeated as a whole on resume: raise :class:`Stopped` when asked to stop."""
        if self.stop_requested():
            self.save()
            raise Stopped


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
    folder = stage.folder / "snapshots"
    folder.mkdir(exist_ok=True)
    save_student(stage, folder / f"{name}.safetensors")


def save_student(stage: Stage, path: Path) -> None:
    """The student in the native format, with its return: ready to be the next run's teacher."""
    student, teacher = stage.student, stage.teacher
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
