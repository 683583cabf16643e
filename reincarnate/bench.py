"""How fast each phase runs on this machine, beside what the machine could do.

The phases are the real ones, driven by their own loops; every so often they are interrupted and the bound is
measured in the same process: the environments alone, the network alone at the same batch and precision. Both
take turns, so that a machine whose speed changes slows both; what is reported are medians over the turns.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from reincarnate import config as configuration
from reincarnate import seeds
from reincarnate.config import RunConfig
from reincarnate.curves import Curves
from reincarnate.device import Step, autocast, pick_device, tune, warm_up
from reincarnate.envs import env_spec, make_env
from reincarnate.errors import UserError
from reincarnate.logger import RunLogger
from reincarnate.meter import TURNS, Meter, Rate, per_second
from reincarnate.phases.offline import OfflineState, offline
from reincarnate.phases.online import OnlineState, make_coefficient, online
from reincarnate.phases.stage import Stage, Stopped
from reincarnate.prepare import Parts
from reincarnate.progress import Progress
from reincarnate.replay import NO_EXTRAS, Extras, Replay, Sampler, SequenceDraws
from reincarnate.replay.storage import Choice
from reincarnate.students.student import SequenceStudent, StudentEntry, blank_batch, get_student
from reincarnate.teachers.collect import Collection, collect
from reincarnate.teachers.reference import bundled_names
from reincarnate.teachers.teacher import Teacher, TeacherCard, TeacherSpec
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import EnvSpec, Returns, SequenceBatch

#: More work than a benchmark gets through: its phases end when enough was measured.
_ENDLESS = 10**9
_ROWS = 4_000


def bench(
    env_id: str = "Breakout-v5",
    *,
    student: str = "qdagger-dqn",
    network: str = "auto",
    batch_size: int | None = None,
    num_envs: int = 8,
    device: str = "auto",
    precision: str = "auto",
    seconds: float = 10.0,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Rates and bounds of collecting, the offline phase and the online phase, with a student.

    Args:
        env_id: the environment; its bundled teacher acts, or a Nature CNN (an MLP) with random weights.
        student: one that learns from a teacher offline.
        network: the student's: ``nature``, ``impala``, ``mlp`` or ``auto``.
        batch_size: transitions (or sequences) per update; that of the student's quick preset unless given.
        num_envs: environments stepped together.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``auto``, ``fp32`` or ``bf16``.
        seconds: about so long for each phase, and as long again for its bound.
        announce: told, a line at a time, what is being measured.

    Returns:
        The JSON object of ``reincarnate bench --json``. Of each phase the rate, ``bound`` and ``fraction``
        are medians over the turns, each by itself: ``fraction`` is the median of the turns' own fractions of
        the bound, and not the quotient of the other two.

    Raises:
        UserError: an environment, student, device or number that does not exist or fit.
    """
    entry = get_student(student)
    if not entry.method.offline:
        raise UserError(f"bench measures all phases, and {student!r} has no offline one; try qdagger-dqn")
    base = configuration.preset("quick", student=student)
    batch_size = base.optimizer.batch_size if batch_size is None else batch_size
    settings = {
        "student": student,
        "env.id": env_id,
        "env.num_envs": num_envs,
        "network": network,
        "optimizer.batch_size": batch_size,
        "system.device": device,
        "system.precision": precision,
        "collect.agent_steps": _ROWS,
        "offline.updates": _ENDLESS,
        "offline.evaluations": 0,
        "online.agent_steps": _ENDLESS,
        "online.evaluations": 0,
        "online.agent_steps_per_update": 4,  # the field's; a preset's may be another
        "online.learning_starts_agent_steps": 4 * batch_size,
    }
    config = configuration.override(base, settings)
    parts = _parts(config, entry, _teacher(env_id))
    with tempfile.TemporaryDirectory() as folder:
        return _Bench(config, parts, Path(folder), seconds / TURNS, announce).document()


class _Bench:
    def __init__(
        self, config: RunConfig, parts: Parts, folder: Path, seconds: float, announce: Callable[[str], None]
    ) -> None:
        self._config, self._parts, self._folder = config, parts, folder
        self._seconds, self._say = seconds, announce
        self._threads = torch.get_num_threads()

    def document(self) -> dict[str, Any]:
        """Everything, in the order of a run."""
        parts = self._parts
        teacher_data = self._replay(_ROWS)
        with self._environment() as env_rate:
            self._say("collect: the teacher acting, beside the environments alone and the network alone")
            collecting = self._collect(teacher_data, env_rate)
            self._say("offline: updates, beside bare forward and backward passes")
            learning = self._offline(teacher_data)
            self._say("online: acting and updates, beside the environments and bare passes")
            playing = self._online(env_rate)
        sample = self._sample_seconds(teacher_data)
        return {
            "student": parts.entry.name,
            "device": str(parts.device),
            "precision": parts.precision,
            "network": parts.student.network_name,
            "batch_size": self._config.optimizer.batch_size,
            "num_envs": self._config.env.num_envs,
            "env": parts.spec.env_id,
            "collect": _phase("agent_steps_per_s", collecting),
            "offline": _phase("updates_per_s", learning),
            "online": _phase("agent_steps_per_s", playing),
            "sample": {
                "seconds_per_batch": sample,
                "fraction_of_update": sample * learning.per_second,
            },
            "memory": {"bytes_per_transition": teacher_data.bytes_per_transition},
        }

    # ------------------------------------------------------------ phases

    def _collect(self, replay: Replay, env_rate: Callable[[], float]) -> Rate:
        parts, config = self._parts, self._config
        assert parts.teacher is not None
        teacher = parts.teacher
        obs = self._blank_obs(config.env.num_envs)

        def bound() -> float:
            alone = per_second(lambda: teacher.outputs(obs), self._seconds, parts.device) * len(obs)
            return 1.0 / (1.0 / env_rate() + 1.0 / alone)

        meter = self._meter(bound)
        collection = Collection.of(
            teacher, parts.spec, config.collect, config.env.num_envs, "envpool", seeds.derive(1, "collect")
        )
        part = 0
        enough = False

        def on_step(steps: int, _: float | None) -> None:
            nonlocal enough
            enough = enough or meter.tick(steps)

        while not enough:  # a buffer may be full before enough was measured: then the next one is filled
            target = replay if part == 0 else self._replay(_ROWS)
            meter.go_on()

            collect(
                teacher,
                collection,
                target,
                device=parts.device,
                on_step=on_step,
                folder=self._folder / f"data-{part}",
            )
            part += 1
        return meter.rate

    def _offline(self, replay: Replay) -> Rate:
        passes = self._bare_passes()
        meter = self._meter(lambda: per_second(passes, self._seconds, self._parts.device))
        state = OfflineState()
        stage = self._stage(lambda: meter.tick(state.updates))
        with contextlib.suppress(Stopped):
            offline(stage, replay, state)
        return meter.rate

    def _online(self, env_rate: Callable[[], float]) -> Rate:
        config, passes = self._config.online, self._bare_passes()

        spec, size = self._parts.student.batch_spec, self._config.optimizer.batch_size
        every = spec.agent_steps_per_update(size) or config.agent_steps_per_update

        def bound() -> float:
            updates = per_second(passes, self._seconds, self._parts.device)
            return 1.0 / (1.0 / env_rate() + 1.0 / (updates * every))

        meter = self._meter(bound)
        state = OnlineState()
        stage = self._stage(lambda: state.updates > 0 and meter.tick(state.agent_steps))
        with contextlib.suppress(Stopped):
            replay = self._replay(config.replay_capacity_agent_steps, spec.extras)
            online(stage, replay, state, make_coefficient(stage))
        return meter.rate

    # ------------------------------------------------------------ what they need

    def _meter(self, bound: Callable[[], float]) -> Meter:
        def with_all_threads() -> float:
            now = torch.get_num_threads()
            torch.set_num_threads(self._threads)  # acting beside environments has taken some
            try:
                return bound()
            finally:
                torch.set_num_threads(now)

        return Meter(self._seconds, with_all_threads, self._parts.device)

    def _stage(self, tick: Callable[[], bool]) -> Stage:
        far = Returns.from_games([1e9])
        return self._parts.stage(
            folder=self._folder,
            progress=Progress(stream=io.StringIO()),
            logger=RunLogger(self._folder),
            curves=Curves(),
            save=lambda: None,
            checkpoint_due=lambda: False,
            stop_requested=tick,
            teacher_return=far,  # out of reach: m stays at 1 and the teacher is asked throughout
            random_return=Returns.from_games([0.0]),
        )

    def _replay(self, capacity: int, extras: Extras = NO_EXTRAS) -> Replay:
        config, parts = self._config, self._parts
        return Replay(
            parts.spec,
            config.env.num_envs,
            capacity,
            n_step=config.td.n_step,
            discount=config.td.discount,
            device=parts.device,
            extras=extras,
        )

    def _blank_obs(self, count: int) -> torch.Tensor:
        spec = self._parts.spec
        return torch.zeros((count, *spec.obs_shape), dtype=spec.obs_dtype, device=self._parts.device)

    @contextlib.contextmanager
    def _environment(self) -> Iterator[Callable[[], float]]:
        """Agent steps per second of the environments alone, whenever it is called."""
        count = self._config.env.num_envs
        rng = np.random.default_rng(0)
        with make_env(self._parts.spec, count, 1_000) as env:
            env.reset()

            def step() -> None:
                env.step(rng.integers(self._parts.spec.num_actions, size=count))

            yield lambda: per_second(step, self._seconds, torch.device("cpu")) * count

    def _bare_passes(self) -> Callable[[], None]:
        """Forward and backward of the student's network and forward of a target's, and nothing else."""
        parts, size = self._parts, self._config.optimizer.batch_size
        if parts.student.batch_spec.sequence_length is not None:
            sequences = blank_batch(parts.student.batch_spec, size, parts.spec, parts.device)
            student = cast(SequenceStudent, parts.student)
            return self._as_step(lambda: student.bare_passes(cast(SequenceBatch, sequences)))
        network = copy.deepcopy(parts.student.network)
        target = copy.deepcopy(network).requires_grad_(False)
        batch = self._blank_obs(size)

        def passes() -> None:
            network.zero_grad(set_to_none=True)
            with autocast(parts.device, parts.precision):
                q = network(batch)
                with torch.no_grad():
                    target(batch)
            q.sum().backward()

        return self._as_step(passes)

    def _as_step(self, passes: Callable[[], object]) -> Step:
        """Captured on CUDA, as an update is."""
        step = Step(passes, self._parts.device, [self._parts.generator])
        warm_up(step, self._parts.device)
        return step

    def _sample_seconds(self, replay: Replay) -> float:
        size, generator = self._config.optimizer.batch_size, self._parts.generator
        length = self._parts.student.batch_spec.sequence_length

        if length is None:
            draw = self._as_step(lambda: replay.sample(size, generator))
            return 1.0 / per_second(draw, self._seconds, self._parts.device)
        draws = SequenceDraws(replay, length)

        def sequences() -> None:  # drawn outside what is captured, and gathered inside
            replay.gather_sequences(draws.draw(size, generator), length, lambda outputs, _: outputs)

        return 1.0 / per_second(sequences, self._seconds, self._parts.device)


def _phase(unit: str, rate: Rate) -> dict[str, float]:
    return {unit: rate.per_second, "bound": rate.bound, "fraction": rate.fraction}


def _parts(config: RunConfig, entry: StudentEntry, teacher: Teacher) -> Parts:
    """A student beside its teacher, as a run has them."""
    device, spec = pick_device(config.system.device), teacher.spec.env
    tune(device)
    generator = torch.Generator(device=device).manual_seed(1)
    precision = entry.choose_precision(config, spec, device)
    student = entry.factory(config, spec, device, precision, generator)
    return Parts(
        config=config,
        spec=spec,
        device=device,
        precision=precision,
        teacher=teacher.to(device),
        student=student,
        entry=entry,
        generator=generator,
        sampler=Sampler(device, 1),
        storage=Choice("cuda" if device.type == "cuda" else "ram", "with the learner"),
        teacher_data=None,
    )


def _teacher(env_id: str) -> Teacher:
    """The bundled teacher of an environment, or a network with random weights: as fast, and as good here."""
    spec = env_spec(env_id)
    for name in bundled_names():
        teacher = load_teacher(f"bundled/{name}")
        if teacher.spec.env.env_id == spec.env_id:
            return teacher
    return _random_teacher(spec)


def _random_teacher(spec: EnvSpec) -> Teacher:
    network = "nature" if spec.kind == "atari" else "mlp"
    described = TeacherSpec(spec, "q_values", network, {}, "dqn")
    card = TeacherCard("random weights", "random weights", None, "", "0" * 64, "native")
    return Teacher(described, card, described.build().state_dict())
