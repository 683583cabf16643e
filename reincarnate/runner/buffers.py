"""The run's replay buffers: the teacher's D_T, obtained once, and the student's D_S, made empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reincarnate import prepare
from reincarnate.checkpoint import CheckpointClock
from reincarnate.errors import UserError
from reincarnate.phases import Stage
from reincarnate.replay import NO_EXTRAS, Extras, Replay
from reincarnate.replay.storage import Choice
from reincarnate.teachers.collect import Collected, collect, load_teacher_data
from reincarnate.teachers.teacher import Teacher


class Buffers:
    """Makes a run's buffers, where its storage says and of the form that its settings say.

    Args:
        stage: of the run.
        storage: where they live.
        teacher_data: folder of a D_T that somebody made; None where the run collects its own.
        spill: takes the new rows of a D_S whose frames are on disk and that has no room left.
    """

    def __init__(
        self, stage: Stage, storage: Choice, teacher_data: Path | None, spill: Callable[[Replay], None]
    ) -> None:
        self._stage, self._storage = stage, storage
        self._given, self._spill = teacher_data, spill

    def teacher_data(self) -> Collected:
        """D_T, whole on every rank: rank 0 collects it, the others read what it has written.

        Raises:
            UserError: there is no teacher, or what was collected is damaged or of another one.
            Stopped: asked to stop; what was collected is kept.
        """
        found: list[Collected] = []
        self._stage.in_turn(lambda: found.append(self._obtain()))
        return found[0]

    def new_student_data(self) -> Replay:
        """An empty D_S; of several ranks, this one's share."""
        config, extras = self._stage.config, self._stage.student.batch_spec.extras
        capacity = prepare.student_capacity(config, self._stage.ranks.size)
        replay = self._new(config.env.num_envs, capacity, extras)
        replay.spill = self._spill
        return replay

    def _obtain(self) -> Collected:
        stage, teacher = self._stage, self._stage.teacher
        if teacher is None:
            raise UserError(f"student {stage.config.student!r} trains on a teacher's data: pass --teacher")
        if self._given is not None:
            return load_teacher_data(self._given, self._new, teacher, stage.spec)
        return self._collect(teacher)

    def _collect(self, teacher: Teacher) -> Collected:
        """The cached D_T of these settings, grown to its end if it is not there yet."""
        stage, config = self._stage, self._stage.config
        collection = prepare.collection(config, stage.spec, teacher)
        replay = self._new(config.env.num_envs, config.collect.agent_steps)
        with stage.progress.phase("collect", total=config.collect.agent_steps, unit="agent steps") as bar:

            def on_step(agent_steps: int, mean_return: float | None) -> None:
                stage.stop_point()
                bar.update(agent_steps, **({} if mean_return is None else {"return": mean_return}))

            clock = CheckpointClock(config.system.checkpoint_every_seconds)
            return collect(
                teacher,
                collection,
                replay,
                device=stage.device,
                checkpoint=clock.due,
                on_step=on_step,
                on_found=bar.found,
            )

    def _new(self, num_envs: int, capacity_agent_steps: int, extras: Extras = NO_EXTRAS) -> Replay:
        stage, td = self._stage, self._stage.config.td
        return Replay(
            stage.spec,
            num_envs,
            capacity_agent_steps,
            n_step=td.n_step,
            discount=td.discount,
            device=self._storage.device(stage.device),
            frames_on_disk=self._storage.storage == "disk",
            compression=stage.config.system.compress,
            extras=extras,
        )
