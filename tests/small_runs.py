"""Runs small enough for a test: CartPole with the bundled teacher, a second or two."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import reincarnate
from reincarnate.config import RunConfig, override, preset
from reincarnate.phases.stage import Stage
from reincarnate.progress import Progress

TEACHER = "bundled/CartPole-dqn"
SMALL: dict[str, Any] = {
    "env.num_envs": 4,
    "evaluate.games": 4,
    "collect.agent_steps": 600,
    "offline.updates": 120,
    "offline.target_update_every_updates": 40,
    "offline.evaluations": 2,
    "online.agent_steps": 600,
    "online.learning_starts_agent_steps": 100,
    "online.agent_steps_per_update": 4,
    "distill.stop_fraction": 0.6,
    "online.replay_capacity_agent_steps": 400,
    "online.target_update_every_agent_steps": 100,
    "online.evaluations": 2,
    "system.device": "cpu",
}


def small_config(teacher: str | None = TEACHER, student: str = "qdagger-dqn", **changes: Any) -> RunConfig:
    """``changes`` use __ for the dot: ``online__agent_steps=100``."""
    base = preset("quick", scratch=teacher is None, student=student)
    settings = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return override(base, settings | {"teacher": teacher, "student": student})


def quiet() -> Progress:
    return Progress(stream=io.StringIO())


@contextlib.contextmanager
def stopping(point: int, rank: int = 0) -> Iterator[None]:
    """Inside, a run is asked to stop at its ``point``-th safe point, as by Ctrl-C; of several, ``rank``."""
    original, seen = Stage.safe_point, 0

    def safe_point(stage: Stage) -> None:
        nonlocal seen
        seen += 1
        if seen == point and stage.ranks.rank == rank:
            stage.stop_requested = lambda: True
        original(stage)

    with mock.patch.object(Stage, "safe_point", safe_point):
        yield


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def student_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the run in ``folder``, as the next run's teacher would have them."""
    return reincarnate.load_teacher(str(folder)).network.state_dict()


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def scalar_steps(folder: Path) -> dict[str, list[int]]:
    """Steps of every TensorBoard scalar, in the order in which they stand in the files."""
    steps: dict[str, list[int]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    return steps


def cli_options(settings: Mapping[str, Any] = SMALL) -> list[str]:
    """The settings as ``--set`` options."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
