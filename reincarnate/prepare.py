"""From a RunConfig to the parts of a run, checked: teacher, environment, device, student."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reincarnate import config as configuration
from reincarnate import files, seeds
from reincarnate.acting import parse_act_rule
from reincarnate.checkpoint import student_data_folder
from reincarnate.config import EnvConfig, RunConfig
from reincarnate.device import Precision, pick_device, tune
from reincarnate.envs import make_env, preset_spec
from reincarnate.errors import UserError
from reincarnate.phases import Stage, shared_returns
from reincarnate.ranks import ALONE, Ranks
from reincarnate.replay import Sampler, storage
from reincarnate.replay.frames import packed_frame_bytes
from reincarnate.replay.storage import Buffer, Choice
from reincarnate.runfiles import exact_reference
from reincarnate.students.student import Student, StudentEntry, get_student, refuse_unread
from reincarnate.teachers.collect import Collection
from reincarnate.teachers.shared_data import TeacherData, find_teacher_data
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import EnvSpec

#: Fields of an EnvSpec that a run's settings can change.
ENV_OVERRIDES = (
    "sticky_probability",
    "episodic_life",
    "reward_clip",
    "full_action_set",
    "noop_max",
    "fire_reset",
    "max_agent_steps",
)
# Compressed frames are foreseen from these many of random play; later levels may be more crowded.
_SAMPLED_FRAMES, _PACKED_MARGIN = 100, 2.0


@dataclass(frozen=True)
class Parts:
    """What :class:`reincarnate.runner.Run` is made of."""

    config: RunConfig  # as given, but the teacher's data is named exactly
    spec: EnvSpec
    device: torch.device
    precision: Precision
    teacher: Teacher | None
    student: Student
    entry: StudentEntry
    generator: torch.Generator
    sampler: Sampler
    storage: Choice
    teacher_data: Path | None  # a D_T that somebody made

    def stage(self, **of_the_run: Any) -> Stage:
        """What phases work with: these parts, and every other field of :class:`Stage` as the run has it."""
        return Stage(
            config=self.config,
            spec=self.spec,
            device=self.device,
            precision=self.precision,
            teacher=self.teacher,
            student=self.student,
            entry=self.entry,
            generator=self.generator,
            sampler=self.sampler,
            **of_the_run,
        )


def prepare(
    config: RunConfig,
    announce: Callable[[str], None],
    precision: Precision | None = None,
    recorded: dict[str, Any] | None = None,
    where: str | None = None,
    folder: Path | None = None,
    ranks: Ranks = ALONE,
) -> Parts:
    """Load the teacher and build the student; everything a user can get wrong is refused here.

    Args:
        config: the run.
        announce: gets one line per thing worth saying.
        precision: of the run that is resumed; None chooses.
        recorded: ``teacher.json`` of the run that is resumed: exactly that file is loaded.
        where: storage of the run that is resumed; None chooses.
        folder: the run directory, if it is known yet.
        ranks: of the run; each has its own device and random numbers.

    Raises:
        UserError: unknown or damaged teacher, unknown student or environment, parts that do not fit, a
            cache that cannot be written where a new run needs it.
    """
    device = pick_device(config.system.device, ranks.device_index)
    tune(device)
    entry = get_student(config.student)
    teacher = _teacher(config, entry, recorded, device, announce)
    spec = environment(config.env, teacher)
    data = _teacher_data(config, entry, teacher, spec, announce)
    if data is not None:
        collect = dataclasses.replace(config.collect, teacher_data=data.exact)
        config = dataclasses.replace(config, collect=collect)
    if where is None:  # a run that goes on may have no more need of the cache
        for cached in _cached(config, entry, spec, teacher, data):
            files.refuse_unwritable(cached)
    buffers = _buffers(config, entry, spec, teacher, data, folder or Path("runs"), ranks.size)
    said: list[str] = []  # once nothing is refused any more: an error is the only line
    chosen_storage = _choose_storage(config, spec, buffers, device, where, said.append, ranks.local_size)
    if data is not None:
        data.fetch()
    generator = torch.Generator(device=device).manual_seed(seeds.derive(config.seed, "learner", ranks.rank))
    chosen = precision or entry.choose_precision(config, spec, device)
    student = entry.factory(config, spec, device, chosen, generator)
    _check_student(config, student, ranks)
    for line in said:
        announce(line)
    return Parts(
        config,
        spec,
        device,
        chosen,
        teacher,
        student,
        entry,
        generator,
        Sampler(chosen_storage.device(device), seeds.derive(config.seed, "batches", ranks.rank)),
        chosen_storage,
        data.folder if data else None,
    )


def configured(entry: StudentEntry, teacher: str | None, preset: str, given: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run: a preset of this student, and what the user gives over it.

    Raises:
        UserError: no such preset or setting, a value that it does not take, or one that this student does
            not read.
    """
    explores = not entry.method.needs_teacher
    base = configuration.preset(preset, explores=explores, scratch=teacher is None, student=entry.name)
    config = configuration.override(base, {"teacher": teacher, "student": entry.name, **given})
    refuse_unread([entry], given)
    return config


def refuse_unfit(config: RunConfig, teacher: Teacher | None, announce: Callable[[str], None]) -> None:
    """Refuse what :func:`prepare` would refuse of a run, whatever machine it will run on; nothing is written.

    Memory, disks and devices are those of the machine that runs it, so only that one can refuse them.

    Raises:
        UserError: an environment, teacher's data, acting rules or a student that do not fit.
    """
    entry = get_student(config.student)
    if teacher is not None:
        parse_act_rule(config.evaluate.teacher_act, teacher.spec.outputs)
    spec = environment(config.env, teacher)
    _teacher_data(config, entry, teacher, spec, announce)
    cpu = torch.device("cpu")
    student = entry.factory(config, spec, cpu, "fp32", torch.Generator(cpu).manual_seed(0))
    _check_student(config, student, ALONE)


def _teacher(
    config: RunConfig,
    entry: StudentEntry,
    recorded: dict[str, Any] | None,
    device: torch.device,
    announce: Callable[[str], None],
) -> Teacher | None:
    """The run's teacher; of a resumed run, exactly that of ``recorded``."""
    if config.teacher is None:
        if entry.method.needs_teacher:
            raise UserError(f"student {entry.name!r} needs a teacher: pass --teacher REF")
        return None
    reference = exact_reference(recorded) if recorded else config.teacher
    teacher = load_teacher(reference, env_id=config.env.id, device=device, announce=announce)
    teacher.card = dataclasses.replace(teacher.card, ref=config.teacher)
    parse_act_rule(config.evaluate.teacher_act, teacher.spec.outputs)
    return teacher


def _teacher_data(
    config: RunConfig,
    entry: StudentEntry,
    teacher: Teacher | None,
    spec: EnvSpec,
    announce: Callable[[str], None],
) -> TeacherData | None:
    """The D_T that somebody made, if the run is to learn from one."""
    if config.collect.teacher_data is None or teacher is None or not entry.method.offline:
        return None
    return find_teacher_data(config.collect.teacher_data, teacher, spec, announce)


def _check_student(config: RunConfig, student: Student, ranks: Ranks) -> None:
    parse_act_rule(config.evaluate.student_act, student.outputs)
    if ranks.size > 1 and student.batch_spec.sequence_length is not None:
        raise UserError(
            f"student {config.student!r} learns from sequences, and such a student cannot train on several "
            "ranks yet; run it without torchrun"
        )


def environment(config: EnvConfig, teacher: Teacher | None) -> EnvSpec:
    """The teacher's EnvSpec, or the named environment's, with the fields that were set.

    Raises:
        UserError: no environment named, or images or actions that the teacher's network does not have.
    """
    changes = {name: getattr(config, name) for name in ENV_OVERRIDES if getattr(config, name) is not None}
    if teacher is None:
        if config.id is None:
            raise UserError(
                "without a --teacher the environment must be named: pass --env ID, e.g. --env Breakout-v5"
            )
        return preset_spec(config.id, config.preset, config.image_size, **changes)
    spec = teacher.spec.env
    for name in ("preset", "image_size"):
        if getattr(config, name) is not None:
            raise UserError(
                f"env.{name} is for runs without a teacher, whose environment wins; leave it out, or set "
                "single fields such as env.sticky_probability"
            )
    if config.full_action_set not in (None, spec.full_action_set):
        raise UserError(
            f"env.full_action_set={config.full_action_set} does not fit the teacher, whose network has "
            f"{spec.num_actions} actions; leave it out"
        )
    if spec.kind == "vector" and set(changes) - {"max_agent_steps"}:
        names = ", ".join(f"env.{name}" for name in sorted(set(changes) - {"max_agent_steps"}))
        raise UserError(
            f"{names} does not apply to {spec.env_id}, whose observations are vectors; leave it out"
        )
    return dataclasses.replace(spec, **changes)


def student_capacity(config: RunConfig, ranks: int = 1) -> int:
    """Agent steps that D_S must hold: its capacity, or all that the run plays if that is less.

    Of several ranks, each one's share.
    """
    played = config.online.agent_steps + config.env.num_envs * ranks
    return math.ceil(min(config.online.replay_capacity_agent_steps, played) / ranks)


def collection(config: RunConfig, spec: EnvSpec, teacher: Teacher) -> Collection:
    """What the run's D_T depends on, where it collects its own."""
    env, seed = config.env, seeds.derive(config.seed_of_teacher, "collect")
    return Collection.of(teacher, spec, config.collect, env.num_envs, env.backend, seed)


def _cached(
    config: RunConfig, entry: StudentEntry, spec: EnvSpec, teacher: Teacher | None, data: TeacherData | None
) -> list[Path]:
    """The folders of the cache that the run cannot do without."""
    folders = [shared_returns.folder()] if config.teacher_seed is not None else []
    if data is None and teacher is not None and entry.method.offline:
        folders.append(collection(config, spec, teacher).folder)
    return folders


def _buffers(
    config: RunConfig,
    entry: StudentEntry,
    spec: EnvSpec,
    teacher: Teacher | None,
    data: TeacherData | None,
    folder: Path,
    ranks: int,
) -> list[Buffer]:
    """What the run will hold, one after the other: D_T, then D_S."""
    envs = config.env.num_envs
    capacity, extras = student_capacity(config, ranks), entry.extras(config, spec)
    folders = [student_data_folder(folder, rank) for rank in range(ranks)]
    buffers = [Buffer(envs, capacity, each, extras=extras) for each in folders]
    if data is not None:
        shared = data.collection
        buffers.append(Buffer(shared.num_envs, shared.agent_steps, data.folder, data.complete))
    elif entry.method.offline and teacher is not None:
        folder_of_data = collection(config, spec, teacher).folder
        buffers.append(Buffer(envs, config.collect.agent_steps, folder_of_data))
    return buffers


def _choose_storage(
    config: RunConfig,
    spec: EnvSpec,
    buffers: list[Buffer],
    device: torch.device,
    where: str | None,
    announce: Callable[[str], None],
    processes: int,
) -> Choice:
    """Where the buffers live, announced; what does not fit is refused. ``processes`` share the memory."""
    compression = config.system.compress
    packed = None
    if compression != "none":
        packed = _PACKED_MARGIN * packed_frame_bytes(_sample_frames(config, spec), compression)
    sizes = storage.sizes_of(spec, buffers, packed)
    room = storage.room_for(spec, buffers, device)
    if processes > 1 and room.memory is not None:
        room = dataclasses.replace(room, memory=room.memory // processes)
    choice = storage.choose(where or config.system.buffer, sizes, room, device, compression)
    announce(choice.line)
    if choice.storage != "disk" and room.disk is not None and room.disk < 0:
        announce(
            f"warning: the teacher's data and the checkpoints grow by {storage.gigabytes(-room.disk)} more "
            "than the disk has room for; free some, or collect fewer steps"
        )
    return choice


def _sample_frames(config: RunConfig, spec: EnvSpec) -> npt.NDArray[Any]:
    """Frames of random play, to see how far they can be compressed."""
    rng = np.random.default_rng(0)
    frames = []
    with make_env(spec, 1, 0, config.env.backend) as env:
        step = env.reset()
        for _ in range(_SAMPLED_FRAMES):
            frames.append(step.obs[0, -1] if spec.kind == "atari" else step.obs[0])
            step = env.step(rng.integers(0, spec.num_actions, 1))
    return np.stack(frames)
