"""What a student is, and which ones there are.

A student is a *learner* (an algorithm: how a batch becomes a better policy) under a *method* (which phases
there are and whether the teacher is distilled). The phases drive every student by the same loop.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from reincarnate.acting import ActRule
from reincarnate.config import RunConfig, field_names
from reincarnate.device import Precision, Step, choose_precision
from reincarnate.errors import UserError
from reincarnate.networks import Network, default_network
from reincarnate.replay import NO_EXTRAS, Extras
from reincarnate.types import Batch, EnvSpec, OutputKind, SequenceBatch, State

T = TypeVar("T")

#: Entry-point group through which another installed package offers students.
GROUP = "reincarnate.students"
#: Settings (whole parts, or single ones) that a run reads whatever its student.
RUN_READS = (
    *("teacher", "student", "preset", "seed", "teacher_seed", "env", "evaluate", "system"),
    *("online.agent_steps", "online.learning_starts_agent_steps", "online.replay_capacity_agent_steps"),
    *("online.agent_steps_per_update", "online.evaluations", "distill.window_games"),
)


@dataclass(frozen=True)
class BatchSpec:
    """What :meth:`Student.update` wants: transitions, or sequences of ``sequence_length`` rows.

    A student of sequences is a :class:`SequenceStudent`. When it plays, of each batch the part
    ``replay_fraction`` is drawn from the buffer and the rest is fresh: every row is used so once, which sets
    how often there is an update. ``extras`` are columns that its own play is stored with.
    """

    sequence_length: int | None = None
    replay_fraction: float = 1.0
    extras: Extras = NO_EXTRAS

    def fresh_count(self, batch_size: int) -> int:
        """Sequences of a batch that were never used before."""
        return round((1.0 - self.replay_fraction) * batch_size) if self.sequence_length else 0

    def agent_steps_per_update(self, batch_size: int) -> int | None:
        """How much play an update uses up; None where the configuration says how often there is one."""
        fresh = self.fresh_count(batch_size)
        return fresh * ((self.sequence_length or 0) - 1) if fresh else None


TRANSITIONS = BatchSpec()


class Student(Protocol):
    """A learner with its networks and optimiser, on one device."""

    network: Network  # what acts, and what is saved as the student
    network_name: str
    network_options: Mapping[str, Any]  # all of them, plain JSON values
    outputs: OutputKind
    temperature: float  # of the policy softmax(outputs / temperature)
    batch_spec: BatchSpec

    def initial_state(self, num_envs: int) -> State:
        """Recurrent state of ``num_envs`` environments at the start of a game; None if feed-forward."""

    def act(self, obs: Tensor, state: State, explore: ActRule) -> tuple[Tensor, Tensor, State]:
        """Obs [N, *obs_shape] -> action [N] int64, its behaviour log-probability [N], the next state."""

    def update(self, batch: Any, teacher_log_policy: Tensor | None, coefficient: Tensor) -> dict[str, Tensor]:
        """One gradient step; metrics are 0-d tensors on the device, and nothing is read by the host.

        A student that may train on several ranks calls :func:`reincarnate.ranks.average_gradients` on what
        it learns, after the backward pass.

        Args:
            batch: what :attr:`batch_spec` says: a Batch of B transitions, or a SequenceBatch.
            teacher_log_policy: [B, A] or [B, T, A] at ``batch.obs``, or None for a student that does not
                distil.
            coefficient: 0-d, m.
        """

    def sync_target(self) -> None:
        """Copy the online network to the target network, in place."""

    def set_learning_rate(self, rate: float) -> None:
        """The learning rate of the next updates; changed in place."""

    def state_dict(self) -> dict[str, Any]:
        """Networks and optimiser, as nested tensors and plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; training continues as if it had not been interrupted."""


class SequenceStudent(Student, Protocol):
    """A student that learns from sequences, and from the whole policy that acted."""

    def act_with_policy(self, obs: Tensor, state: State, explore: ActRule) -> tuple[Tensor, Tensor, State]:
        """As :meth:`act`, but with the behaviour's log-policy [N, A] of all actions."""

    def bare_passes(self, batch: SequenceBatch) -> None:
        """The networks' part of an update, forward and backward: what no update is faster than."""


class StudentFactory(Protocol):
    """Makes a student for a run."""

    def __call__(
        self,
        config: RunConfig,
        spec: EnvSpec,
        device: torch.device,
        precision: Precision,
        generator: torch.Generator,
    ) -> Student:
        """A fresh student; ``generator``, on ``device``, draws its weights and its actions.

        Raises:
            UserError: settings that do not fit the environment.
        """


@dataclass(frozen=True)
class Method:
    """How a teacher is used."""

    needs_teacher: bool
    offline: bool  # collect D_T and train on it before playing
    distill: bool  # lambda_0 * m * KL in the loss

    @property
    def learns_from_teacher(self) -> bool:
        """Whether a teacher makes a difference to the student, or is at most measured beside it."""
        return self.needs_teacher or self.offline or self.distill

    @property
    def reads(self) -> tuple[str, ...]:
        """Settings of the phases that this method has, whatever the learner."""
        offline = ("collect", "offline.updates", "offline.evaluations") if self.offline else ()
        distill = ("distill.coefficient", "distill.teacher_temperature", "distill.stop_fraction")
        return offline + (distill if self.distill else ())


SCRATCH_METHOD = Method(needs_teacher=False, offline=False, distill=False)
QDAGGER_METHOD = Method(needs_teacher=True, offline=True, distill=True)


@dataclass(frozen=True)
class StudentEntry:
    """A student by name; what an entry point of the group :data:`GROUP` names."""

    name: str  # the same as the entry point's
    summary: str
    paper: str
    method: Method
    factory: StudentFactory
    #: Columns that the student's play is stored with, known before it is built.
    extras: Callable[[RunConfig, EnvSpec], Extras] = lambda config, spec: NO_EXTRAS
    #: Settings that the learner reads, whole parts (``td``) or single ones (``td.discount``), beside those of
    #: every run and of the method; any other one is refused where it is given. None: none is refused.
    reads: tuple[str, ...] | None = None

    def does_read(self, setting: str) -> bool:
        """Whether ``setting``, a dotted name, can make a difference to a run of this student.

        One that does not exist is not left out either, so that whoever applies it says so.
        """
        if self.reads is None or setting not in field_names():
            return True
        known = (*RUN_READS, *self.method.reads, *self.reads)
        return any(setting == name or setting.startswith(f"{name}.") for name in known)

    def choose_precision(self, config: RunConfig, spec: EnvSpec, device: torch.device) -> Precision:
        """What ``config.system.precision`` says; ``auto`` is float32 for vectors and timed for images.

        Raises:
            UserError: settings that do not fit the environment.
        """
        if config.system.precision != "auto":
            return config.system.precision
        if spec.kind == "vector":
            return "fp32"  # too small to gain anything
        return choose_precision(device, lambda precision: self.trial_step(config, spec, device, precision))

    def trial_step(
        self, config: RunConfig, spec: EnvSpec, device: torch.device, precision: Precision
    ) -> Step:
        """An update of a throw-away student on a blank batch, to be timed."""
        generator = torch.Generator(device)
        student = self.factory(config, spec, device, precision, generator)
        batch = blank_batch(student.batch_spec, config.optimizer.batch_size, spec, device)
        assert batch.teacher_outputs is not None
        uniform = torch.log_softmax(batch.teacher_outputs, dim=-1) if self.method.distill else None
        m = torch.ones((), device=device)

        def update() -> None:
            student.update(batch, uniform, m)

        return Step(update, device, [generator])


def registry() -> dict[str, StudentEntry]:
    """Every student that can be loaded, by name; a package whose entry point is broken is left out."""
    loaded = {name: _load(points) for name, points in sorted(_entry_points().items())}
    return {name: entry for name, entry in loaded.items() if isinstance(entry, StudentEntry)}


def get_student(name: str) -> StudentEntry:
    """The student called ``name``; no other package's code runs.

    Raises:
        UserError: no such student (the nearest name is given), or its package cannot be loaded.
    """
    points = _entry_points()
    if name in points:
        entry = _load(points[name])
        if isinstance(entry, StudentEntry):
            return entry
        raise UserError(f"student {name!r} of {_origin(points[name])} cannot be used: {entry}")
    close = difflib.get_close_matches(name, points, n=1, cutoff=0.4)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"no student {name!r}{hint}; known: {', '.join(sorted(points))}")


def with_teacher(entry: StudentEntry) -> StudentEntry | None:
    """The student of the same learner that learns from a teacher; None where there is none."""
    same = (each for each in registry().values() if each.factory is entry.factory)
    return next((each for each in same if each.method.learns_from_teacher), None)


def settings_read_by(entry: StudentEntry, given: Mapping[str, T]) -> dict[str, T]:
    """Those of the settings ``given`` that ``entry`` reads."""
    return {name: value for name, value in given.items() if entry.does_read(name)}


def refuse_unread(entries: Sequence[StudentEntry], given: Iterable[str]) -> None:
    """Refuse a setting that makes no difference to any of the students that it is given for.

    Args:
        entries: of one run, or of all of a comparison.
        given: names of settings that there are, as the user wrote them; not what a preset sets.

    Raises:
        UserError: none of the students reads one of them.
    """
    for name in given:
        if not any(entry.does_read(name) for entry in entries):
            raise UserError(_unread(name, entries))


def _unread(name: str, entries: Sequence[StudentEntry]) -> str:
    declared = [entry for entry in registry().values() if entry.reads is not None]
    readers = " and ".join(entry.name for entry in declared if entry.does_read(name))
    whose = f"{name} is a setting of {readers}" if readers else f"no student here reads {name}"
    names = ", ".join(entry.name for entry in entries)
    others = f"student {names} does" if len(entries) == 1 else f"students {names} do"
    taught = with_teacher(entries[0]) if len(entries) == 1 else None
    instead = f", or pass --student {taught.name}" if taught and taught.does_read(name) else ""
    return f"{whose}; {others} not read it: leave it out{instead}"


def _entry_points() -> dict[str, list[EntryPoint]]:
    """What is offered under each name; nobody can take a name of ours."""
    offers: dict[str, dict[str, EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        offers.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: _ours(list(points.values())) for name, points in offers.items()}


def _ours(points: list[EntryPoint]) -> list[EntryPoint]:
    ours = [point for point in points if point.value.startswith(f"{GROUP}.")]
    return ours or points


def _load(points: list[EntryPoint]) -> StudentEntry | str:
    """The student, or what is wrong with it."""
    if len(points) > 1:
        return "both offer that name; uninstall one"
    try:
        loaded = points[0].load()
    except Exception as error:  # somebody else's code may raise any
        return f"{type(error).__name__}: {error}"
    if not isinstance(loaded, StudentEntry):
        return f"{points[0].value} is a {type(loaded).__name__}, not a StudentEntry"
    if loaded.name != points[0].name:
        return f"its entry calls itself {loaded.name!r}"
    return loaded


def _origin(points: list[EntryPoint]) -> str:
    return " and ".join(f"package {point.dist.name!r}" if point.dist else point.value for point in points)


def network_name(config: RunConfig, spec: EnvSpec) -> str:
    """The network that ``config.network`` names; ``auto`` and ``light`` go by the observations."""
    if config.network in ("auto", "light"):
        return default_network(spec.kind, light=config.network == "light")
    return config.network


def lay_out(network: nn.Module, spec: EnvSpec) -> None:
    """Keep the weights of a fresh network for images as convolutions like them: channels last."""
    if spec.kind == "atari":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def blank_batch(asked: BatchSpec, size: int, spec: EnvSpec, device: torch.device) -> Batch | SequenceBatch:
    """A batch of zeros of the kind that a student asks for; every row was executed."""
    if asked.sequence_length is None:
        return _blank_transitions(size, spec, device)
    rows = (size, asked.sequence_length)
    flags, floats = torch.zeros(rows, dtype=torch.bool, device=device), torch.zeros(rows, device=device)
    outputs = torch.zeros((*rows, spec.num_actions), device=device)
    state = asked.extras.state_shape
    return SequenceBatch(
        obs=torch.zeros((*rows, *spec.obs_shape), dtype=spec.obs_dtype, device=device),
        action=floats.long(),
        reward=floats,
        terminal=flags,
        truncated=flags,
        executed=~flags,
        game_start=flags,
        behaviour_log_policy=torch.log_softmax(outputs, dim=2),
        state=None if state is None else torch.zeros((size, *state), device=device),
        teacher_outputs=outputs,
    )


def _blank_transitions(size: int, spec: EnvSpec, device: torch.device) -> Batch:
    obs = torch.zeros((size, *spec.obs_shape), dtype=spec.obs_dtype, device=device)
    column = torch.zeros(size, device=device)
    outputs = torch.zeros((size, spec.num_actions), device=device)
    return Batch(obs, torch.zeros_like(column, dtype=torch.int64), column, column, obs, outputs, column)
