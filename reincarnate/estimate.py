"""How long a run will take on this machine, from a second of trying: said before the work starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reincarnate import files, prepare
from reincarnate.acting import ActRule
from reincarnate.config import RunConfig
from reincarnate.device import synchronize, warm_up
from reincarnate.envs import make_env
from reincarnate.errors import UserError
from reincarnate.prepare import Parts


@dataclass(frozen=True)
class Estimate:
    """Seconds of each phase without evaluations; 0 for a phase that the run does not have."""

    collect_seconds: float
    offline_seconds: float
    online_seconds: float

    @property
    def seconds(self) -> float:
        """All phases."""
        return self.collect_seconds + self.offline_seconds + self.online_seconds

    def text(self, preset: str | None = None, left: bool = False) -> str:
        """One line for the user; names the quick preset where a run that is not under way takes long.

        ``left``: the run is under way, and this is what it has not done yet.
        """
        parts = [
            f"{name} {duration(seconds)}"
            for name, seconds in (
                ("collect", self.collect_seconds),
                ("offline", self.offline_seconds),
                ("online", self.online_seconds),
            )
            if seconds
        ]
        hint = "" if left or preset == "quick" or self.seconds < 3_600 else "; --preset quick takes minutes"
        detail = "; ".join(filter(None, (", ".join(parts), "evaluations come on top")))
        where = "left on this machine" if left else "on this machine"
        return f"about {duration(self.seconds)} {where} ({detail}){hint}"


@dataclass(frozen=True)
class Done:
    """What a run that goes on has behind it."""

    finished: Sequence[str] = ()  # names of phases
    updates: int = 0  # of the offline phase
    agent_steps: int = 0  # of the online phase


NOTHING_DONE = Done()


def duration(seconds: float) -> str:
    """Words of a length that suits: 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


def estimate(config: RunConfig, parts: Parts, ranks: int = 1, done: Done = NOTHING_DONE) -> Estimate:
    """Time a few vector steps and updates of a throw-away student, and add up what is left of the phases.

    ``ranks`` play at once; what they need to exchange gradients is not in it.
    """
    environment, student, teacher = _acting_seconds(config, parts)
    update = _seconds(parts.entry.trial_step(config, parts.spec, parts.device, parts.precision), parts, 5)
    envs, online = config.env.num_envs, config.online
    vector_steps = max(0, online.agent_steps - done.agent_steps) / (envs * ranks)
    asked = parts.student.batch_spec.agent_steps_per_update(config.optimizer.batch_size)
    every = asked or online.agent_steps_per_update
    updates = max(0, online.agent_steps - max(done.agent_steps, online.learning_starts_agent_steps)) // every
    stop = config.distill.stop_fraction * online.agent_steps if parts.entry.method.distill else 0.0
    advised = max(0.0, stop - done.agent_steps) / (envs * ranks)  # vector steps at which the teacher is asked
    learning = parts.entry.method.offline and "offline" not in done.finished
    return Estimate(
        collect_seconds=_to_collect(config, parts) / envs * (environment + teacher) if learning else 0.0,
        offline_seconds=max(0, config.offline.updates - done.updates) * update if learning else 0.0,
        online_seconds=vector_steps * (environment + student) + advised * teacher + updates * update,
    )


def _to_collect(config: RunConfig, parts: Parts) -> int:
    """Agent steps of D_T that are not in the cache, nor given."""
    if parts.teacher is None or parts.teacher_data is not None:
        return 0
    folder = prepare.collection(config, parts.spec, parts.teacher).folder
    try:
        there = int(files.read_json(folder / "manifest.json")["agent_steps"])
    except (UserError, KeyError, TypeError, ValueError):  # none, or a damaged one, which collecting tells
        there = 0
    return max(0, config.collect.agent_steps - there)


def _acting_seconds(config: RunConfig, parts: Parts) -> tuple[float, float, float]:
    """Seconds per vector step: of the environments, of the student, of the teacher (0 without one)."""
    greedy, teacher = ActRule("greedy"), parts.teacher
    with make_env(parts.spec, config.env.num_envs, 0, config.env.backend) as env:
        step = env.reset()
        action = np.zeros(config.env.num_envs, dtype=np.int64)
        environment = _seconds(lambda: env.step(action), parts)
    obs = torch.from_numpy(step.obs).to(parts.device)
    state = parts.student.initial_state(len(obs))
    student = _seconds(lambda: parts.student.act(obs, state, greedy), parts)

    def ask() -> None:
        if teacher is not None:
            teacher.step(obs, teacher.initial_state(len(obs)))

    return environment, student, _seconds(ask, parts) if teacher else 0.0


def _seconds(work: Callable[[], object], parts: Parts, rounds: int = 20) -> float:
    """Mean seconds of a call, after those that warm up."""
    warm_up(work, parts.device)
    synchronize(parts.device)
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    synchronize(parts.device)
    return (time.perf_counter() - started) / rounds
