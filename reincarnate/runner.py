"""One run: prepare, string the phases together, checkpoint, resume, report."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from reincarnate import files, phases, prepare, report, result
from reincarnate.checkpoint import CheckpointClock, CheckpointFolder
from reincarnate.config import RunConfig
from reincarnate.curves import Curves
from reincarnate.errors import UserError
from reincarnate.estimate import estimate
from reincarnate.logger import RunLogger
from reincarnate.phases import OfflineState, OnlineState, Stage, Stopped
from reincarnate.progress import Progress
from reincarnate.replay import Replay
from reincarnate.schedules import DistillCoefficient
from reincarnate.teachers.collect import Collected, Collection, collect, load_teacher_data
from reincarnate.types import Returns


class Run:
    """A run in its own directory: :meth:`start` or :meth:`resume` one, then :meth:`execute` it."""

    def __init__(self, config: RunConfig, folder: Path, progress: Progress, parts: prepare.Parts) -> None:
        self.folder, self.config, self.progress = folder, config, progress
        self._checkpoints = CheckpointFolder(folder)
        self._clock = CheckpointClock(config.system.checkpoint_every_seconds)
        self._stop = threading.Event()
        self._finished: list[str] = []
        self._evaluate_seconds: float | None = None
        self._collected: dict[str, Any] | None = None
        self._offline, self._online = OfflineState(), OnlineState()
        self._coefficient: DistillCoefficient | None = None
        self._teacher_data: Replay | None = None
        self._student_data: Replay | None = None
        self._started = False
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
            progress=progress,
            logger=RunLogger(folder),
            curves=Curves(),
            save=self._save,
            checkpoint_due=self._clock.due,
            stop_requested=self._stop.is_set,
        )

    # ------------------------------------------------------------ making one

    @classmethod
    def start(cls, config: RunConfig, folder: Path | None, progress: Progress) -> Run:
        """Prepare a new run; nothing is written before everything that a user can get wrong is checked.

        Raises:
            UserError: the folder holds a run already, or anything in ``config`` does not fit together.
        """
        if folder is not None:
            _refuse_used(folder)
        parts = prepare.prepare(config, announce=progress.say)
        folder = folder or _free_folder(config, parts)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / "config.json", config.to_dict() | {"versions": result.versions()})
        if parts.teacher is not None:
            files.write_json(folder / "teacher.json", parts.teacher.to_json())
        progress.say(f"run directory: {folder}")
        progress.say(estimate(config, parts).text(config.preset))
        run = cls(config, folder, progress, parts)
        run.stage.logger.hparams(config.to_dict())
        return run

    @classmethod
    def resume(cls, folder: Path, progress: Progress) -> Run:
        """Go on with the run in ``folder`` from its last checkpoint.

        Raises:
            UserError: no run there, or its files are damaged.
        """
        if not (folder / "config.json").exists():
            raise UserError(
                f"{folder} holds no run to resume (no config.json); start one with --out {folder}"
            )
        values = files.read_json(folder / "config.json")
        values.pop("versions", None)
        config = RunConfig.from_dict(values)
        checkpoints = CheckpointFolder(folder)
        saved = checkpoints.load(torch.device("cpu")) if checkpoints.exists() else None
        if saved:
            RunLogger.rewind(folder, saved[0]["tensorboard"])
        precision = saved[0]["precision"] if saved else None
        parts = prepare.prepare(config, announce=progress.say, precision=precision)
        _check_same_teacher(folder, parts)
        run = cls(config, folder, progress, parts)
        if saved:
            run._restore()
            progress.say(f"resuming {folder} after {', '.join(run._finished) or 'nothing finished'}")
        return run

    # ------------------------------------------------------------ doing it

    def execute(self) -> dict[str, Any]:
        """Run every phase that is not finished yet; returns the result document.

        Raises:
            Stopped: asked to stop; the run can be resumed.
        """
        with self._locked(), _stop_on_signals(self._stop):
            try:
                for name, phase in self._plan():
                    if name not in self._finished:
                        phase()
                        self._finished.append(name)
                        self._save()
                        self._write_result("running")
                return self._finish()
            except Stopped:
                self._write_result("stopped")
                raise
            except UserError:
                self._write_result("failed")
                raise
            except Exception:
                self._write_result("failed")
                raise

    def _plan(self) -> list[tuple[str, Callable[[], None]]]:
        method = self.stage.entry.method
        plan: list[tuple[str, Callable[[], None]]] = [("evaluate", self._phase_evaluate)]
        if method.offline:
            plan += [("collect", self._phase_collect), ("offline", self._phase_offline)]
        return [*plan, ("online", self._phase_online)]

    def _phase_evaluate(self) -> None:
        started = time.perf_counter()
        if self.stage.teacher is not None and self.stage.teacher_return is None:
            self._set_returns(teacher=phases.evaluate_teacher(self.stage))
        self._set_returns(random=phases.evaluate_random(self.stage))
        self._evaluate_seconds = time.perf_counter() - started
        self._announce_returns()

    def _phase_collect(self) -> None:
        started = time.perf_counter()
        collected = self._obtain_teacher_data()
        self._teacher_data = collected.replay
        self._collected = {
            "seconds": time.perf_counter() - started,
            "agent_steps": collected.agent_steps,
            "bytes": collected.replay.nbytes,
            "reused": collected.reused,
            "folder": str(collected.folder.resolve()),
        }
        how = "reused" if collected.reused else "collected"
        self.progress.say(f"teacher buffer: {collected.agent_steps} agent steps {how}, {collected.folder}")

    def _phase_offline(self) -> None:
        if self._teacher_data is None:  # a resumed run
            self._teacher_data = self._obtain_teacher_data().replay
        phases.offline(self.stage, self._teacher_data, self._offline)
        self._teacher_data = None

    def _phase_online(self) -> None:
        self._teacher_data = None
        if self._student_data is None:
            self._student_data = self._new_replay(
                self.config.env.num_envs, self.config.online.replay_capacity_agent_steps
            )
        if self._coefficient is None:
            self._coefficient = phases.make_coefficient(self.stage)
        phases.online(self.stage, self._student_data, self._online, self._coefficient)

    def _finish(self) -> dict[str, Any]:
        phases.save_student(self.stage, self.folder / "student.safetensors")
        document = self._write_result("done")
        self.stage.logger.hparams(self.config.to_dict(), _final_metrics(document))
        self.stage.logger.close()
        files.write_bytes(self.folder / "README.md", report.model_card(self.folder).encode())
        for path in report.write_report(self.folder):
            self.progress.say(f"wrote {path}")
        return document

    # ------------------------------------------------------------ parts of phases

    def _obtain_teacher_data(self) -> Collected:
        stage, config = self.stage, self.config
        teacher = stage.teacher
        if teacher is None:
            raise UserError(f"student {config.student!r} trains on a teacher's data: pass --teacher")
        if config.collect.teacher_data is not None:
            return load_teacher_data(Path(config.collect.teacher_data), self._new_replay, teacher)
        collection = Collection.of(
            teacher,
            stage.spec,
            config.collect,
            config.env.num_envs,
            config.env.backend,
            stage.seed("collect"),
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

    def _new_replay(self, num_envs: int, capacity_agent_steps: int) -> Replay:
        td = self.config.td
        return Replay(
            self.stage.spec,
            num_envs,
            capacity_agent_steps,
            n_step=td.n_step,
            discount=td.discount,
            device=self.stage.device,
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
        state = {
            "finished": self._finished,
            "evaluate_seconds": self._evaluate_seconds,
            "teacher_return": self.stage.teacher_return and self.stage.teacher_return.to_dict(),
            "random_return": self.stage.random_return and self.stage.random_return.to_dict(),
            "collected": self._collected,
            "offline": dataclasses.asdict(self._offline),
            "online": dataclasses.asdict(self._online),
            "coefficient": self._coefficient and self._coefficient.state_dict(),
            "curves": self.stage.curves.to_dict(),
            "tensorboard": self.stage.logger.sizes(),
            "precision": self.stage.precision,
        }
        tensors = {
            "student": self.stage.student.state_dict(),
            "generator": self.stage.generator.get_state(),
        }
        self._checkpoints.save(state, tensors, self._student_data)
        self.stage.curves.save(self.folder / "curves.json")
        self._clock.restart()

    def _restore(self) -> None:
        state, tensors, records = self._checkpoints.load(self.stage.device)
        self._finished = state["finished"]
        self._evaluate_seconds = state["evaluate_seconds"]
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
        self.stage.generator.set_state(tensors["generator"].cpu())
        if state["coefficient"]:
            self._coefficient = phases.make_coefficient(self.stage)
            if self._coefficient:
                self._coefficient.load_state_dict(state["coefficient"])
        if records:
            self._student_data = self._new_replay(
                self.config.env.num_envs, self.config.online.replay_capacity_agent_steps
            )
            self._checkpoints.restore_replay(records, self._student_data)

    def _write_result(self, status: str) -> dict[str, Any]:
        document = result.build(
            self.stage,
            status,
            evaluate_seconds=self._evaluate_seconds,
            collected=self._collected,
            offline=self._offline,
            online=self._online,
            student_bytes=self._student_data.nbytes if self._student_data else None,
            coefficient=self._coefficient,
        )
        files.write_json(self.folder / "result.json", document)
        return document

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.folder / "run.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"{self.folder} is in use by another reincarnate process; wait for it to end"
            ) from None
        try:
            yield
        finally:
            lock.release()
            (self.folder / "run.lock").unlink(missing_ok=True)


def _final_metrics(document: dict[str, Any]) -> dict[str, float]:
    student = document["student"]
    metrics = {
        "return": student["final_return"] and student["final_return"]["mean"],
        "teacher_normalized": student["teacher_normalized"]["final"],
        "offline_teacher_normalized": student["teacher_normalized"]["offline"],
        "teacher_return": document["teacher"] and document["teacher"]["return"]["mean"],
        "random_return": document["random"]["mean"],
        "offline_return": student["offline_return"] and student["offline_return"]["mean"],
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _refuse_used(folder: Path) -> None:
    if (folder / "config.json").exists():
        raise UserError(
            f"{folder} already holds a run; choose another --out, or continue it with --resume {folder}"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder; choose another --out")


def _free_folder(config: RunConfig, parts: prepare.Parts) -> Path:
    """``runs/<env>-<student>-s<seed>-<time>``."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{parts.spec.env_id}-{config.student}-s{config.seed}-{stamp}")
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _check_same_teacher(folder: Path, parts: prepare.Parts) -> None:
    if parts.teacher is None:
        return
    recorded = files.read_json(folder / "teacher.json")["sha256"]
    if recorded != parts.teacher.card.sha256:
        raise UserError(
            f"the teacher of {folder} has changed since the run began (sha256 {recorded[:12]}... then, "
            f"{parts.teacher.card.sha256[:12]}... now); pin its revision or start a new run"
        )


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
