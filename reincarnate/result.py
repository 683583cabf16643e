"""``result.json``: the contract that other tools read. Missing values are null, paths relative to the run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from reincarnate.atari_scores import human_normalized
from reincarnate.phases import (
    OfflineState,
    OnlineState,
    Stage,
    student_rule,
    teacher_normalized,
    teacher_rule,
)
from reincarnate.replay import Replay
from reincarnate.schedules import DistillCoefficient
from reincarnate.types import Returns

FORMAT = 1


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    packages = ("reincarnate", "torch", "envpool", "gymnasium", "numpy", "stable_baselines3")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in packages if _installed(name)
    }


def build(
    stage: Stage,
    status: str,
    *,
    seconds: dict[str, float],
    collected: dict[str, Any] | None,
    offline: OfflineState,
    online: OnlineState,
    student_data: Replay | None,
    coefficient: DistillCoefficient | None,
) -> dict[str, Any]:
    """The whole document from what the run knows so far."""
    return {
        "format": FORMAT,
        "status": status,
        "env": stage.spec.env_id,
        "teacher": _teacher(stage),
        "random": _returns(stage.random_return),
        "student": _student(stage),
        "buffers": {
            "teacher": _teacher_buffer(stage.folder, collected),
            "student": _student_buffer(student_data),
        },
        "phases": _phases(seconds, collected, offline, online),
        "distill": _distill(online, coefficient),
        "device": str(stage.device),
        "precision": stage.precision,
        "seed": stage.config.seed,
        "versions": versions(),
    }


def final_metrics(document: dict[str, Any]) -> dict[str, float]:
    """The numbers of a finished run's document by which runs are compared; those that it has."""
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


def _teacher(stage: Stage) -> dict[str, Any] | None:
    teacher = stage.teacher
    if teacher is None:
        return None
    described = teacher.to_json()
    return {name: described[name] for name in ("ref", "resolved", "revision", "sha256", "format")} | {
        "learnt_from": stage.entry.method.learns_from_teacher,  # else only measured beside the student
        "act": str(teacher_rule(stage)),
        "return": _returns(stage.teacher_return),
        "reported": described["reported"],
    }


def _student(stage: Stage) -> dict[str, Any]:
    offline_return = stage.curves.last_return("offline")
    final_return = stage.curves.last_return("online")
    return {
        "name": stage.config.student,
        "act": str(student_rule(stage)),
        "offline_return": _returns(offline_return),
        "final_return": _returns(final_return),
        "teacher_normalized": {
            "offline": _normalized(stage, offline_return),
            "final": _normalized(stage, final_return),
        },
        "human_normalized": {
            "offline": _human_normalized(stage, offline_return),
            "final": _human_normalized(stage, final_return),
        },
    }


def _normalized(stage: Stage, returns: Returns | None) -> float | None:
    if returns is None:
        return None
    return teacher_normalized(returns, stage.teacher_return, stage.random_return)


def _human_normalized(stage: Stage, returns: Returns | None) -> float | None:
    return None if returns is None else human_normalized(stage.spec.env_id, returns.mean)


def _teacher_buffer(folder: Path, collected: dict[str, Any] | None) -> dict[str, Any]:
    if collected is None:
        return {"agent_steps": 0, "bytes": None, "path": None}
    path = os.path.relpath(collected["folder"], folder.resolve())
    return {"agent_steps": collected["agent_steps"], "bytes": collected["bytes"], "path": path}


def _student_buffer(replay: Replay | None) -> dict[str, Any]:
    if replay is None:
        return {"agent_steps": 0, "bytes": None}
    return {"agent_steps": replay.agent_steps, "bytes": replay.nbytes}


def _collect(collected: dict[str, Any] | None, seconds: float | None) -> dict[str, Any]:
    steps = collected["agent_steps"] if collected else 0
    reused = bool(collected and collected["reused"])
    return {
        "seconds": seconds,
        "agent_steps": steps,
        "agent_steps_per_s": None if reused else _rate(steps, seconds or 0.0),
        "reused": reused,
    }


def _phases(
    seconds: dict[str, float], collected: dict[str, Any] | None, offline: OfflineState, online: OnlineState
) -> dict[str, Any]:
    return {
        "evaluate": {"seconds": seconds.get("evaluate")},
        "collect": _collect(collected, seconds.get("collect")),
        "offline": {
            "seconds": offline.seconds or None,
            "updates": offline.updates,
            "updates_per_s": _rate(offline.updates, offline.seconds),
        },
        "online": {
            "seconds": online.seconds or None,
            "agent_steps": online.agent_steps,
            "updates": online.updates,
            "agent_steps_per_s": _rate(online.agent_steps, online.seconds),
        },
    }


def _distill(online: OnlineState, coefficient: DistillCoefficient | None) -> dict[str, Any]:
    """The coefficient's course, where there is one."""
    return {
        "online_first": online.first_m if coefficient else None,
        "online_last": online.last_m if coefficient else None,
        "latched_at_agent_step": coefficient.latched_at_agent_step if coefficient else None,
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds else None


def _returns(returns: Returns | None) -> dict[str, Any] | None:
    return returns.to_dict() if returns else None


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
