"""From a RunConfig to the parts of a run, checked: teacher, environment, device, student."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reincarnate import seeds
from reincarnate.acting import parse_act_rule
from reincarnate.config import EnvConfig, RunConfig
from reincarnate.device import Precision, pick_device, tune
from reincarnate.envs import env_spec
from reincarnate.errors import UserError
from reincarnate.replay import check_fits, memory_needed
from reincarnate.runfiles import exact_reference
from reincarnate.students.student import Student, StudentEntry, get_student
from reincarnate.teachers.collect import read_teacher_data
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import EnvSpec

_OVERRIDES = (
    "sticky_probability",
    "episodic_life",
    "reward_clip",
    "full_action_set",
    "noop_max",
    "fire_reset",
    "max_agent_steps",
)


@dataclass(frozen=True)
class Parts:
    """What :class:`reincarnate.runner.Run` is made of."""

    spec: EnvSpec
    device: torch.device
    precision: Precision
    teacher: Teacher | None
    student: Student
    entry: StudentEntry
    generator: torch.Generator


def prepare(
    config: RunConfig,
    announce: Callable[[str], None],
    precision: Precision | None = None,
    recorded: dict[str, Any] | None = None,
) -> Parts:
    """Load the teacher and build the student; everything a user can get wrong is refused here.

    Args:
        config: the run.
        announce: gets one line per thing worth saying.
        precision: of the run that is resumed; None chooses.
        recorded: ``teacher.json`` of the run that is resumed: exactly that file is loaded.

    Raises:
        UserError: unknown or damaged teacher, unknown student or environment, parts that do not fit.
    """
    device = pick_device(config.system.device)
    tune(device)
    entry = get_student(config.student)
    if entry.method.needs_teacher and config.teacher is None:
        raise UserError(f"student {entry.name!r} needs a teacher: pass --teacher REF")
    teacher = None
    if config.teacher is not None:
        reference = exact_reference(recorded) if recorded else config.teacher
        teacher = load_teacher(reference, env_id=config.env.id, device=device, announce=announce)
        teacher.card = dataclasses.replace(teacher.card, ref=config.teacher)
        parse_act_rule(config.evaluate.teacher_act, teacher.spec.outputs)
    spec = environment(config.env, teacher)
    _check_buffer(config.system.buffer, device)
    if config.collect.teacher_data is not None and teacher is not None and entry.method.offline:
        read_teacher_data(Path(config.collect.teacher_data), teacher, spec)
    _check_memory(config, entry, spec, device)
    generator = torch.Generator(device=device).manual_seed(seeds.derive(config.seed, "learner"))
    chosen = precision or entry.choose_precision(config, spec, device)
    student = entry.factory(config, spec, device, chosen, generator)
    parse_act_rule(config.evaluate.student_act, student.outputs)
    return Parts(spec, device, chosen, teacher, student, entry, generator)


def environment(config: EnvConfig, teacher: Teacher | None) -> EnvSpec:
    """The teacher's EnvSpec, or the named environment's, with the fields that were set.

    Raises:
        UserError: no environment named, or an action set that the teacher's network does not have.
    """
    changes = {name: getattr(config, name) for name in _OVERRIDES if getattr(config, name) is not None}
    if teacher is None:
        if config.id is None:
            raise UserError(
                "without a --teacher the environment must be named: pass --env ID, e.g. --env Breakout-v5"
            )
        return env_spec(config.id, **changes)
    spec = teacher.spec.env
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


def student_capacity(config: RunConfig) -> int:
    """Agent steps that D_S must hold: its capacity, or all that the run plays if that is less."""
    played = config.online.agent_steps + config.env.num_envs
    return min(config.online.replay_capacity_agent_steps, played)


def _check_buffer(buffer: str, device: torch.device) -> None:
    """Buffers live where the learner is; anything else is refused rather than ignored."""
    home = "cuda" if device.type == "cuda" else "ram"
    if buffer not in ("auto", home):
        raise UserError(
            f"system.buffer={buffer} is not available with device {device}: buffers are held in the "
            f"learner's memory ({home}); use --buffer auto"
        )


def _check_memory(config: RunConfig, entry: StudentEntry, spec: EnvSpec, device: torch.device) -> None:
    """D_T and D_S are never held at once, so the larger one counts."""
    sizes = [student_capacity(config)]
    if entry.method.offline:
        sizes.append(config.collect.agent_steps)
    check_fits(max(memory_needed(spec, config.env.num_envs, size) for size in sizes), device)
