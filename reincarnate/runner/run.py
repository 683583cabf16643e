"""A run: its phases one after the other, what is written between them, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reincarnate import files, phases, report, result
from reincarnate.checkpoint import CheckpointClock, CheckpointFolder
from reincarnate.config import RunConfig
from reincarnate.curves import Curves
from reincarnate.estimate import Done
from reincarnate.logger import RunLogger, SilentLogger
from reincarnate.phases import Stage, Stopped
from reincarnate.prepare import Parts
from reincarnate.progress import Progress
from reincarnate.ranks import ALONE, Ranks
from reincarnate.replay import Replay
from reincarnate.runner.buffers import Buffers
from reincarnate.runner.opening import Chosen, Opened, foreseen, open_again, open_beside, open_new
from reincarnate.runner.record import Record
from reincarnate.runner.saved import SavedState
from reincarnate.signals import stopping_on_signals


class Run:
    """A run in its own directory: :meth:`start` or :meth:`resume` one, then :meth:`execute` it.

    Several ranks make one each and call the same; rank 0's writes the directory.

    Attributes:
        folder: its directory.
        config: its settings.
        stage: what its phases work with.
        record: what it has come to.
    """

    def __init__(self, opened: Opened, progress: Progress, ranks: Ranks = ALONE) -> None:
        parts = opened.parts
        self.folder, self.config, self.progress = opened.folder, parts.config, progress
        self.record = Record()
        self._chosen, self._lock, self._ranks = opened.chosen, opened.lock, ranks
        self._clock = CheckpointClock(parts.config.system.checkpoint_every_seconds)
        self._stop = threading.Event()
        self._teacher_data: Replay | None = None  # from its collection until the offline phase is over
        self.stage = self._make_stage(opened)
        checkpoints = CheckpointFolder(opened.folder, ranks)
        self._buffers = Buffers(self.stage, parts.storage, parts.teacher_data, checkpoints.spill)
        self._saved = SavedState(self.stage, self.record, self._buffers, checkpoints, parts.storage.storage)
        ranks.watch(self._stop.is_set)

    def _make_stage(self, opened: Opened) -> Stage:
        ranks = self._ranks
        return opened.parts.stage(
            folder=opened.folder,
            progress=self.progress,
            logger=RunLogger(opened.folder) if ranks.first else SilentLogger(),
            curves=Curves(),
            save=self._save,
            checkpoint_due=self._clock.due,
            stop_requested=self._stop.is_set if ranks.size == 1 else self._asked_to_stop,
            ranks=ranks,
        )

    # ------------------------------------------------------------ making one

    @classmethod
    def start(cls, config: RunConfig, folder: Path | None, progress: Progress, ranks: Ranks = ALONE) -> Run:
        """Prepare a new run; nothing is written before everything that a user can get wrong is checked.

        Raises:
            UserError: the folder holds a run already, or anything in ``config`` does not fit together.
        """

        def make() -> Run:
            return cls(open_new(config, folder, progress, ranks), progress, ranks)

        return cls._together(make, progress, ranks)

    @classmethod
    def resume(cls, folder: Path, progress: Progress, ranks: Ranks = ALONE) -> Run:
        """Go on with the run in ``folder`` from its last checkpoint.

        Raises:
            UserError: no run there, it is going on elsewhere, with another number of ranks, or its files
                are damaged.
        """

        def make() -> Run:
            with open_again(folder, progress, ranks) as opened:
                return cls._going_on(opened, progress, ranks)

        return cls._together(make, progress, ranks)

    @classmethod
    def _together(cls, make: Callable[[], Run], progress: Progress, ranks: Ranks) -> Run:
        """Rank 0 makes the run, with all that can be refused; then the others theirs, of the same student."""
        made: list[Run] = []

        def first() -> Chosen:
            made.append(make())
            return made[0]._chosen

        chosen = ranks.lead(first)
        run = made[0] if made else cls._going_on(open_beside(chosen, progress, ranks), progress, ranks)
        if ranks.size > 1:
            student = run.stage.student
            student.load_state_dict(ranks.from_first(student.state_dict(), run.stage.device))
        return run

    @classmethod
    def _going_on(cls, opened: Opened, progress: Progress, ranks: Ranks) -> Run:
        run = cls(opened, progress, ranks)
        if opened.saved:
            run._saved.restore()
        progress.say(f"resuming {opened.folder} after {', '.join(run.record.finished) or 'nothing finished'}")
        if ranks.first and "online" not in run.record.finished:
            run._say_what_is_left(opened.parts)
        return run

    def _say_what_is_left(self, parts: Parts) -> None:
        record = self.record
        done = Done(record.finished, record.offline.updates, record.online.agent_steps)
        self.progress.say(foreseen(self.config, parts, self._ranks.size, done).text(left=True))

    # ------------------------------------------------------------ doing it

    def execute(self) -> dict[str, Any]:
        """Run every phase that is not finished yet; returns the result document.

        The first Ctrl-C (or SIGTERM) asks it to stop at the next safe point, a second one interrupts.

        Raises:
            Stopped: asked to stop; the run can be resumed.
        """
        with stopping_on_signals(self._stop, again=_interrupt):
            return self._execute_and_close()

    def _execute_and_close(self) -> dict[str, Any]:
        try:
            return self._execute()
        except (Stopped, KeyboardInterrupt) as stop:
            self._write_result("stopped")
            if self._ranks.size == 1:
                self.progress.say(f"stopped; `reincarnate run --resume {self.folder}` goes on with it")
            if isinstance(stop, Stopped):
                self._ranks.meet()  # torchrun kills the others as soon as one has left
            raise
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                self._write_result("failed")
            raise
        finally:
            self.stage.logger.close()
            if self._lock is not None:
                self._lock.release()

    def _execute(self) -> dict[str, Any]:
        self._write_result("running")
        self.stage.logger.hparams(self.config.to_dict())
        for name, phase in self._plan():
            if name not in self.record.finished:
                phase()
                self.record.finished.append(name)
                self._save()
                self._write_result("running")
        return self._finish()

    def _asked_to_stop(self) -> bool:
        """Whether this rank was asked to stop, or another one says that it was."""
        return self._stop.is_set() or self._ranks.told_to_stop()

    # ------------------------------------------------------------ phases

    def _plan(self) -> list[tuple[str, Callable[[], None]]]:
        method = self.stage.entry.method
        plan: list[tuple[str, Callable[[], None]]] = [("evaluate", self._phase_evaluate)]
        if method.offline:
            plan += [("collect", self._phase_collect), ("offline", self._phase_offline)]
        return [*plan, ("online", self._phase_online)]

    def _phase_evaluate(self) -> None:
        stage = self.stage
        with self.record.timed("evaluate"):
            if stage.teacher is not None and stage.teacher_return is None:
                stage.set_returns(teacher=phases.evaluate_teacher(stage))
            stage.set_returns(random=phases.evaluate_random(stage))
        teacher, random = stage.teacher_return, stage.random_return
        if teacher and random and teacher.mean <= random.mean:
            self.progress.say(
                f"warning: the teacher's return {teacher.mean:.1f} is not above random play's "
                f"{random.mean:.1f}; m falls linearly from 1 to 0 instead of following the returns"
            )

    def _phase_collect(self) -> None:
        with self.record.timed("collect"):
            collected = self._buffers.teacher_data()
        self._teacher_data = collected.replay
        self.record.tell_collected(collected)
        how = "reused" if collected.reused else "collected"
        self.progress.say(f"teacher buffer: {collected.agent_steps} agent steps {how}, {collected.folder}")

    def _phase_offline(self) -> None:
        if self._teacher_data is None:  # a resumed run
            self._teacher_data = self._buffers.teacher_data().replay
        phases.offline(self.stage, self._teacher_data, self.record.offline)
        self._teacher_data = None
        gc.collect()  # D_T is in a cycle with the update that was captured; D_S needs its room

    def _phase_online(self) -> None:
        record = self.record
        if record.student_data is None:
            record.student_data = self._buffers.new_student_data()
        if record.coefficient is None:
            record.coefficient = phases.make_coefficient(self.stage)
        phases.online(self.stage, record.student_data, record.online, record.coefficient)

    # ------------------------------------------------------------ what is written

    def _save(self) -> None:
        self._saved.save()
        self._clock.restart()

    def _write_result(self, status: str) -> dict[str, Any]:
        record = self.record
        document = result.build(
            self.stage,
            status,
            seconds=record.seconds,
            collected=record.collected,
            offline=record.offline,
            online=record.online,
            student_data=record.student_data,
            coefficient=record.coefficient,
        )
        if record.all_student_data is not None:
            document["buffers"]["student"] = record.all_student_data
        if self._ranks.first:
            files.write_json(self.folder / "result.json", document)
        return document

    def _finish(self) -> dict[str, Any]:
        if not self._ranks.first:
            return self._write_result("done")
        phases.save_student(self.stage, self.folder / "student.safetensors")
        self.stage.curves.save(self.folder / "curves.json")
        document = self._write_result("done")
        self.stage.logger.hparams(self.config.to_dict(), result.final_metrics(document))
        self.stage.logger.close()
        files.write_bytes(self.folder / "README.md", report.model_card(self.folder).encode())
        for path in report.write_report(self.folder):
            self.progress.say(f"wrote {path}")
        return document


def _interrupt() -> None:
    raise KeyboardInterrupt
