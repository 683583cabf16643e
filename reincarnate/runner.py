"""One run: prepare, string the phases together, checkpoint, resume, report."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from reincarnate import files, phases, prepare, report, result, runfiles, seeds
from reincarnate.checkpoint import CheckpointClock, CheckpointFolder
from reincarnate.config import RunConfig
from reincarnate.curves import Curves
from reincarnate.device import Precision
from reincarnate.errors import UserError
from reincarnate.estimate import estimate
from reincarnate.logger import RunLogger, SilentLogger
from reincarnate.phases import OfflineState, OnlineState, Stage, Stopped
from reincarnate.progress import Progress
from reincarnate.ranks import ALONE, Ranks, digest
from reincarnate.replay import NO_EXTRAS, Extras, Replay
from reincarnate.schedules import DistillCoefficient
from reincarnate.teachers.collect import Collected, Collection, collect, load_teacher_data
from reincarnate.types import Returns


class Run:
    """A run in its own directory: :meth:`start` or :meth:`resume` one, then :meth:`execute` it.

    Several ranks make one each and call the same; rank 0's writes the directory.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        progress: Progress,
        parts: prepare.Parts,
        lock: FileLock | None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._lock, self._ranks = lock, ranks
        self.folder, self.config, self.progress = folder, config, progress
        self._checkpoints = CheckpointFolder(folder, ranks)
        self._clock = CheckpointClock(config.system.checkpoint_every_seconds)
        self._stop = threading.Event()
        self._finished: list[str] = []
        self._seconds: dict[str, float] = {}  # of the phases that have no counters of their own
        self._ticking: Callable[[], None] = lambda: None
        self._collected: dict[str, Any] | None = None
        self._offline, self._online = OfflineState(), OnlineState()
        self._coefficient: DistillCoefficient | None = None
        self._teacher_data: Replay | None = None
        self._student_data: Replay | None = None
        self._all_student_data: dict[str, int] | None = None  # of all ranks, where there are several
        self._storage, self._teacher_data_folder = parts.storage, parts.teacher_data
        self.stage = Stage(
            config=config,
            folder=folder,
            spec=parts.spec,
            device=parts.device,
            precision=parts.precision,
            teacher=parts.teacher,
            student=parts.student,
            entry=parts.entry,
            generator=parts.generator,
            sampler=parts.sampler,
            progress=progress,
            logger=RunLogger(folder) if ranks.first else SilentLogger(),
            curves=Curves(),
            save=self._save,
            checkpoint_due=self._clock.due,
            stop_requested=self._stop.is_set if ranks.size == 1 else self._asked_to_stop,
            ranks=ranks,
        )
        ranks.watch(self._stop.is_set)

    # ------------------------------------------------------------ making one

    @classmethod
    def start(cls, config: RunConfig, folder: Path | None, progress: Progress, ranks: Ranks = ALONE) -> Run:
        """Prepare a new run; nothing is written before everything that a user can get wrong is checked.

        Raises:
            UserError: the folder holds a run already, or anything in ``config`` does not fit together.
        """
        return _together(ranks, lambda: cls._started(config, folder, progress, ranks), progress)

    @classmethod
    def _started(cls, config: RunConfig, folder: Path | None, progress: Progress, ranks: Ranks) -> Run:
        if folder is not None:
            runfiles.refuse_used(folder)
        parts = prepare.prepare(config, announce=progress.say, folder=folder, ranks=ranks)
        config = parts.config
        plan = _estimate(config, parts, ranks.size)  # makes the first environments, which may be refused too
        folder = folder or runfiles.free_folder(parts.spec.env_id, config)
        folder.mkdir(parents=True, exist_ok=True)
        lock = runfiles.lock(folder)
        described = parts.teacher.to_json() if parts.teacher else None
        runfiles.write_start(folder, config, described, result.versions(), ranks.size)
        progress.say(f"run directory: {folder}")
        progress.say(plan)
        return cls(config, folder, progress, parts, lock, ranks)

    @classmethod
    def resume(cls, folder: Path, progress: Progress, ranks: Ranks = ALONE) -> Run:
        """Go on with the run in ``folder`` from its last checkpoint.

        Raises:
            UserError: no run there, it is going on elsewhere, with another number of ranks, or its files
                are damaged.
        """
        return _together(ranks, lambda: cls._locked(folder, progress, ranks), progress)

    @classmethod
    def _locked(cls, folder: Path, progress: Progress, ranks: Ranks) -> Run:
        config, recorded = runfiles.read_config(folder), runfiles.read_teacher(folder)
        runfiles.check_same_ranks(folder, ranks.size)
        lock = runfiles.lock(folder)
        try:
            return cls._resumed(config, recorded, folder, progress, lock, ranks)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _joined(cls, chosen: _Chosen, progress: Progress, ranks: Ranks) -> Run:
        """The same run as rank 0's, which has made or resumed it already and owns its directory."""
        config, recorded = runfiles.read_config(chosen.folder), runfiles.read_teacher(chosen.folder)
        return cls._resumed(config, recorded, chosen.folder, progress, None, ranks, chosen)

    @classmethod
    def _resumed(
        cls,
        config: RunConfig,
        recorded: dict[str, Any] | None,
        folder: Path,
        progress: Progress,
        lock: FileLock | None,
        ranks: Ranks,
        chosen: _Chosen | None = None,
    ) -> Run:
        checkpoints = CheckpointFolder(folder, ranks)
        state = checkpoints.load(torch.device("cpu"))[0] if checkpoints.exists() else None
        if state is not None and not state.keys() >= {"precision", "device", "tensorboard"}:
            raise checkpoints.damaged("entries are missing")
        parts = prepare.prepare(
            config,
            announce=progress.say,
            precision=state["precision"] if state else chosen.precision if chosen else None,
            recorded=recorded,
            where=state.get("storage") if state else chosen.storage if chosen else None,
            folder=folder,
            ranks=ranks,
        )
        if recorded and parts.teacher:
            runfiles.check_same_teacher(folder, recorded, parts.teacher)
        if state:
            _check_same_device(folder, state["device"], parts.device)
            if ranks.first:
                RunLogger.rewind(folder, state["tensorboard"])
        run = cls(parts.config, folder, progress, parts, lock, ranks)
        if state:
            run._restore_checked()
        progress.say(f"resuming {folder} after {', '.join(run._finished) or 'nothing finished'}")
        return run

    # ------------------------------------------------------------ doing it

    def execute(self) -> dict[str, Any]:
        """Run every phase that is not finished yet; returns the result document.

        Raises:
            Stopped: asked to stop; the run can be resumed.
        """
        with _stop_on_signals(self._stop):
            return self._execute_and_close()

    def _execute_and_close(self) -> dict[str, Any]:
        try:
            return self._execute()
        except (Stopped, KeyboardInterrupt) as stop:
            self._write_result("stopped")
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
            if name not in self._finished:
                phase()
                self._finished.append(name)
                self._save()
                self._write_result("running")
        return self._finish()

    def _plan(self) -> list[tuple[str, Callable[[], None]]]:
        method = self.stage.entry.method
        plan: list[tuple[str, Callable[[], None]]] = [("evaluate", self._phase_evaluate)]
        if method.offline:
            plan += [("collect", self._phase_collect), ("offline", self._phase_offline)]
        return [*plan, ("online", self._phase_online)]

    def _phase_evaluate(self) -> None:
        with self._timed("evaluate"):
            if self.stage.teacher is not None and self.stage.teacher_return is None:
                self._set_returns(teacher=phases.evaluate_teacher(self.stage))
            self._set_returns(random=phases.evaluate_random(self.stage))
        self._announce_returns()

    def _phase_collect(self) -> None:
        with self._timed("collect"):
            collected = self._shared_teacher_data()
        self._teacher_data = collected.replay
        self._collected = {
            "agent_steps": collected.agent_steps,
            "bytes": collected.replay.nbytes,
            "reused": collected.reused,
            "folder": str(collected.folder.resolve()),
        }
        how = "reused" if collected.reused else "collected"
        self.progress.say(f"teacher buffer: {collected.agent_steps} agent steps {how}, {collected.folder}")

    def _phase_offline(self) -> None:
        if self._teacher_data is None:  # a resumed run
            self._teacher_data = self._shared_teacher_data().replay
        phases.offline(self.stage, self._teacher_data, self._offline)
        self._teacher_data = None
        gc.collect()  # D_T is in a cycle with the update that was captured; D_S needs its room

    def _phase_online(self) -> None:
        self._teacher_data = None
        if self._student_data is None:
            self._student_data = self._new_student_data()
        if self._coefficient is None:
            self._coefficient = phases.make_coefficient(self.stage)
        phases.online(self.stage, self._student_data, self._online, self._coefficient)

    def _finish(self) -> dict[str, Any]:
        if not self._ranks.first:
            return self._write_result("done")
        phases.save_student(self.stage, self.folder / "student.safetensors")
        self.stage.curves.save(self.folder / "curves.json")
        document = self._write_result("done")
        self.stage.logger.hparams(self.config.to_dict(), _final_metrics(document))
        self.stage.logger.close()
        files.write_bytes(self.folder / "README.md", report.model_card(self.folder).encode())
        for path in report.write_report(self.folder):
            self.progress.say(f"wrote {path}")
        return document

    # ------------------------------------------------------------ parts of phases

    def _shared_teacher_data(self) -> Collected:
        """D_T, whole on every rank: rank 0 collects it, the others read what it has written."""
        found: list[Collected] = []
        self.stage.in_turn(lambda: found.append(self._obtain_teacher_data()))
        return found[0]

    def _obtain_teacher_data(self) -> Collected:
        stage, config = self.stage, self.config
        teacher = stage.teacher
        if teacher is None:
            raise UserError(f"student {config.student!r} trains on a teacher's data: pass --teacher")
        if self._teacher_data_folder is not None:
            return load_teacher_data(self._teacher_data_folder, self._new_replay, teacher, stage.spec)
        collection = Collection.of(
            teacher,
            stage.spec,
            config.collect,
            config.env.num_envs,
            config.env.backend,
            seeds.derive(config.seed_of_teacher, "collect"),
        )
        replay = self._new_replay(config.env.num_envs, config.collect.agent_steps)
        with self.progress.phase("collect", total=config.collect.agent_steps, unit="agent steps") as bar:

            def on_step(agent_steps: int, mean_return: float | None) -> None:
                stage.stop_point()
                bar.update(agent_steps, **({} if mean_return is None else {"return": mean_return}))

            clock = CheckpointClock(config.system.checkpoint_every_seconds)
            return collect(
                teacher, collection, replay, device=stage.device, checkpoint=clock.due, on_step=on_step
            )

    def _new_student_data(self) -> Replay:
        extras = self.stage.student.batch_spec.extras
        capacity = prepare.student_capacity(self.config, self._ranks.size)
        replay = self._new_replay(self.config.env.num_envs, capacity, extras)
        replay.spill = self._checkpoints.spill
        return replay

    def _new_replay(self, num_envs: int, capacity_agent_steps: int, extras: Extras = NO_EXTRAS) -> Replay:
        td = self.config.td
        return Replay(
            self.stage.spec,
            num_envs,
            capacity_agent_steps,
            n_step=td.n_step,
            discount=td.discount,
            device=self._storage.device(self.stage.device),
            frames_on_disk=self._storage.storage == "disk",
            compression=self.config.system.compress,
            extras=extras,
        )

    def _set_returns(self, teacher: Returns | None = None, random: Returns | None = None) -> None:
        self.stage.teacher_return = self.stage.curves.teacher = teacher or self.stage.teacher_return
        self.stage.random_return = self.stage.curves.random = random or self.stage.random_return

    def _announce_returns(self) -> None:
        teacher, random = self.stage.teacher_return, self.stage.random_return
        if teacher and random and teacher.mean <= random.mean:
            self.progress.say(
                f"warning: the teacher's return {teacher.mean:.1f} is not above random play's "
                f"{random.mean:.1f}; m falls linearly from 1 to 0 instead of following the returns"
            )

    # ------------------------------------------------------------ checkpoint, result

    def _save(self) -> None:
        self._ticking()
        state = {
            "finished": self._finished,
            "seconds": self._seconds,
            "device": str(self.stage.device),
            "teacher_return": self.stage.teacher_return and self.stage.teacher_return.to_dict(),
            "random_return": self.stage.random_return and self.stage.random_return.to_dict(),
            "collected": self._collected,
            "offline": dataclasses.asdict(self._offline),
            "online": dataclasses.asdict(self._online),
            "coefficient": self._coefficient and self._coefficient.state_dict(),
            "curves": self.stage.curves.to_dict(),
            "tensorboard": self.stage.logger.sizes(),
            "precision": self.stage.precision,
            "storage": self._storage.storage,
        }
        tensors = {
            "student": self.stage.student.state_dict(),
            "generator": self.stage.generator.get_state(),
            "sampler": self.stage.sampler.get_state(),
        }
        if self._ranks.size > 1:
            tensors["ranks"] = self._gather_ranks()
        self._checkpoints.save(state, tensors, self._student_data)
        if self._ranks.first:
            self.stage.curves.save(self.folder / "curves.json")
        self._clock.restart()

    def _gather_ranks(self) -> list[dict[str, Any]]:
        """Every rank's random numbers.

        Raises:
            UserError: the ranks' students are not one and the same any more.
        """
        stage, replay = self.stage, self._student_data
        numbers = {"generator": stage.generator.get_state(), "sampler": stage.sampler.get_state()}
        held = (replay.agent_steps, replay.nbytes) if replay is not None else (0, 0)
        found = self._ranks.gather((numbers, held, digest(stage.student.network.parameters())))
        if len({weights for _, _, weights in found}) > 1:
            raise UserError(
                f"the ranks have come to different students: {self.config.student!r} does not average all "
                "of its gradients (reincarnate.ranks.average_gradients); run it without torchrun"
            )
        if replay is not None:
            steps, size = (sum(each) for each in zip(*(held for _, held, _ in found), strict=True))
            self._all_student_data = {"agent_steps": steps, "bytes": size}
        return [numbers for numbers, _, _ in found]

    def _restore_checked(self) -> None:
        """:meth:`_restore`; a state that does not fit (config.json was changed, say) is told in one line."""
        try:
            self._restore()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise self._checkpoints.damaged(f"or config.json was changed: it does not fit: {told}") from None

    def _restore(self) -> None:
        state, tensors, records = self._checkpoints.load(self.stage.device)
        self._finished = state["finished"]
        self._seconds = state["seconds"]
        self._collected = state["collected"]
        self._offline = OfflineState(**state["offline"])
        self._online = OnlineState(**state["online"])
        self.stage.curves = Curves.from_dict(state["curves"])
        self._set_returns(
            *(
                Returns.from_dict(state[name]) if state[name] else None
                for name in ("teacher_return", "random_return")
            )
        )
        self.stage.student.load_state_dict(tensors["student"])
        own = tensors["ranks"][self._ranks.rank] if self._ranks.size > 1 else tensors
        self.stage.generator.set_state(own["generator"].cpu())
        if "sampler" in own:  # not in checkpoints of before buffers had random numbers of their own
            self.stage.sampler.set_state(own["sampler"].cpu())
        if state["coefficient"]:
            self._coefficient = phases.make_coefficient(self.stage)
            if self._coefficient:
                self._coefficient.load_state_dict(state["coefficient"])
        if records:
            self._student_data = self._new_student_data()
            self._checkpoints.restore_replay(records, self._student_data)

    def _write_result(self, status: str) -> dict[str, Any]:
        document = result.build(
            self.stage,
            status,
            seconds=self._seconds,
            collected=self._collected,
            offline=self._offline,
            online=self._online,
            student_data=self._student_data,
            coefficient=self._coefficient,
        )
        if self._all_student_data is not None:
            document["buffers"]["student"] = self._all_student_data
        if not self._ranks.first:
            return document
        files.write_json(self.folder / "result.json", document)
        return document

    def _asked_to_stop(self) -> bool:
        """Whether this rank was asked to stop, or another one says that it was."""
        return self._stop.is_set() or self._ranks.told_to_stop()

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add to a phase's seconds, also when it is stopped and goes on later."""
        started, before = time.perf_counter(), self._seconds.get(phase, 0.0)
        self._ticking = lambda: self._seconds.update({phase: before + time.perf_counter() - started})
        try:
            yield
        finally:
            self._ticking()
            self._ticking = lambda: None


@dataclass(frozen=True)
class _Chosen:
    """What rank 0 has chosen for all."""

    folder: Path
    precision: Precision
    storage: str


def _together(ranks: Ranks, make: Callable[[], Run], progress: Progress) -> Run:
    """Rank 0 makes the run, with all that can be refused; then the others theirs, of the same student."""
    made: list[Run] = []

    def first() -> _Chosen:
        run = make()
        made.append(run)
        return _Chosen(run.folder, run.stage.precision, run._storage.storage)

    chosen = ranks.lead(first)
    run = made[0] if made else Run._joined(chosen, progress, ranks)
    if ranks.size > 1:
        student = run.stage.student
        student.load_state_dict(ranks.from_first(student.state_dict(), run.stage.device))
    return run


def _final_metrics(document: dict[str, Any]) -> dict[str, float]:
    student = document["student"]
    metrics = {
        "final_return": student["final_return"] and student["final_return"]["mean"],
        "offline_return": student["offline_return"] and student["offline_return"]["mean"],
        "teacher_normalized_final": student["teacher_normalized"]["final"],
        "teacher_normalized_offline": student["teacher_normalized"]["offline"],
        "teacher_return": document["teacher"] and document["teacher"]["return"]["mean"],
        "random_return": document["random"]["mean"],
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _estimate(config: RunConfig, parts: prepare.Parts, ranks: int) -> str:
    """The line that says how long it will take; leaves the run's random numbers as they were."""
    state = parts.generator.get_state()
    try:
        return estimate(config, parts, ranks).text(config.preset)
    finally:
        parts.generator.set_state(state)


def _check_same_device(folder: Path, recorded: str, device: torch.device) -> None:
    if recorded.partition(":")[0] != device.type:
        raise UserError(f"{folder} ran on {recorded} and cannot go on with {device}; resume it where it ran")


@contextlib.contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks the run to stop at the next safe point, a second one interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
