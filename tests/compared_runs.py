"""Run directories as the runner writes them, with returns that a test chooses."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reincarnate.curves import Curves
from reincarnate.types import Returns


def games(mean: float) -> Returns:
    """Four games around ``mean``: std 2.58."""
    return Returns.from_games([mean - 3, mean - 1, mean + 1, mean + 3])


def make_run(
    folder: Path,
    final: float,
    *,
    seed: int = 1,
    teacher: float | None = 60.0,
    random: float = 10.0,
    ref: str = "bundled/Breakout-dqn",
    student: str = "qdagger-dqn",
    env: str = "Breakout-v5",
    offline: float | None = 20.0,
    online: Sequence[float] = (),
    status: str = "done",
    timed: bool = True,
    sha256: str | None = None,
    act: str = "epsilon=0.01",
    settings: Mapping[str, Any] | None = None,
    rules: Mapping[str, Any] | None = None,
) -> Path:
    """Evaluations: ``offline`` after 100 updates; ``online``, then ``final``, evenly in 1,000 steps.

    Every ``ref`` is another file unless ``sha256`` is given; ``settings`` (nested) go into ``config.json``,
    ``rules`` into the EnvSpec of ``teacher.json``.
    """
    folder.mkdir(parents=True)
    g_t, g_random = (games(teacher) if teacher is not None else None), games(random)
    curves = Curves(teacher=g_t, random=g_random)
    if offline is not None:
        curves.add_evaluation("offline", 100, 0, "epsilon=0.01", games(offline), 50.0 if timed else None)
    points = [*online, final]
    for number, value in enumerate(points, start=1):
        share = number / len(points)
        seconds = 200.0 * share if timed else None
        curves.add_evaluation(
            "online", round(250 * share), round(1000 * share), "epsilon=0.01", games(value), seconds
        )
    curves.save(folder / "curves.json")
    sha256 = sha256 or hashlib.sha256(os.fsencode(ref)).hexdigest()
    described = {"ref": ref, "resolved": ref, "revision": None, "sha256": sha256, "format": "native"}

    def normalized(value: float | None) -> float | None:
        return None if value is None or teacher is None else (value - random) / (teacher - random)

    result: dict[str, Any] = {
        "format": 1,
        "status": status,
        "env": env,
        "teacher": g_t and described | {"act": act, "return": g_t.to_dict(), "reported": None},
        "random": g_random.to_dict(),
        "student": {
            "name": student,
            "act": "epsilon=0.01",
            "offline_return": None if offline is None else games(offline).to_dict(),
            "final_return": games(final).to_dict(),
            "teacher_normalized": {"offline": normalized(offline), "final": normalized(final)},
        },
        "buffers": {
            "teacher": {"agent_steps": 600 if g_t else 0, "bytes": None, "path": "d_t" if g_t else None},
            "student": {"agent_steps": 1000, "bytes": None},
        },
        "phases": {
            "evaluate": {"seconds": 5.0},
            "collect": {"seconds": 4.0, "agent_steps": 600, "agent_steps_per_s": None, "reused": True},
            "offline": {
                "seconds": None if offline is None else 50.0,
                "updates": 0 if offline is None else 100,
                "updates_per_s": None,
            },
            "online": {"seconds": 200.0, "agent_steps": 1000, "updates": 250, "agent_steps_per_s": None},
        },
        "distill": {"online_first": 1.0 if g_t else None, "online_last": None, "latched_at_agent_step": None},
        "device": "cpu",
        "precision": "fp32",
        "seed": seed,
        "versions": {},
    }
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.json").write_text(
        json.dumps({"student": student, "seed": seed, "teacher_seed": 1} | dict(settings or {}))
    )
    if g_t:
        (folder / "teacher.json").write_text(json.dumps(described | {"env": dict(rules or {})}))
    return folder
