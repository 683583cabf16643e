"""Run directories of every kind as the runner writes them: with and without a teacher, stopped, hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from reincarnate.config import override, preset
from reincarnate.curves import Curves
from reincarnate.types import EnvSpec, Returns

from compared_runs import games

EVIL = "<script>alert('x')</script> & `$x_1$` | \n# \\alpha"
VERSIONS = {"python": "3.11.9", "reincarnate": "0.1.0", "torch": "2.13.0"}
ENV = EnvSpec("Breakout-v5", "atari", 4, (4, 84, 84))


def make_curves(
    teacher: Returns | None, random: Returns, offline: int, online: int, evaluations: int
) -> Curves:
    """Student return rises from random + 20 to random + 60; m falls to 0 at half of the online phase."""
    curves = Curves(teacher=teacher, random=random)
    shares = [(index + 1) / evaluations for index in range(evaluations)]
    for step in range(0, offline, max(1, offline // 50)):
        curves.add_losses("offline", step, {"td_loss": 1 / (1 + step), "distill_loss": 0.5})
    for share in shares if offline else []:
        value = games(random.mean + 20 + 20 * share)
        curves.add_evaluation("offline", round(share * offline), 0, "epsilon=0.01", value)
    for step in range(online // 50, online, max(1, online // 50)):
        curves.add_game(step, random.mean + 30 + step / online * 10)
        curves.add_losses("online", step, {"td_loss": 0.02, **({"distill_loss": 0.4} if teacher else {})})
        if teacher:
            curves.add_coefficient(step, max(0.0, 1 - 2 * step / online), None)
    for share in shares if online else []:
        value = games(random.mean + 40 + 20 * share)
        curves.add_evaluation("online", online // 4, round(share * online), "epsilon=0.01", value)
    return curves


def make_run(
    folder: Path,
    *,
    teacher: float | None = 70.0,
    random: float = 2.0,
    offline: int = 2_500,
    online: int = 10_000,
    evaluations: int = 2,
    status: str = "done",
    ref: str = "bundled/Breakout-dqn",
    student: str = "qdagger-dqn",
    env: str = "Breakout-v5",
    saved: bool = False,
) -> Path:
    """A run directory as the runner writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    g_t, g_random = games(teacher) if teacher is not None else None, games(random)
    curves = make_curves(g_t, g_random, offline, online, evaluations)
    curves.save(folder / "curves.json")

    def document(returns: Returns | None) -> dict[str, Any] | None:
        return returns.to_dict() if returns else None

    def normalized(returns: Returns | None) -> float | None:
        return (returns.mean - random) / (teacher - random) if returns and teacher is not None else None

    described = {
        "ref": ref,
        "resolved": ref,
        "revision": None,
        "sha256": "ab" * 32,
        "format": "native",
        "reported": {"mean": 69.8, "std": 25.7, "source": "model card", "n": None, "act": None},
    }
    after, final = curves.last_return("offline"), curves.last_return("online")
    result = {
        "format": 1,
        "status": status,
        "env": env,
        "teacher": described | {"act": "epsilon=0.01", "return": document(g_t)} if g_t else None,
        "random": document(g_random),
        "student": {
            "name": student,
            "act": "epsilon=0.01",
            "offline_return": document(after),
            "final_return": document(final),
            "teacher_normalized": {"offline": normalized(after), "final": normalized(final)},
        },
        "buffers": {
            "teacher": {"agent_steps": 40_000 if g_t else 0, "bytes": 2**20 if g_t else None, "path": None},
            "student": {"agent_steps": online, "bytes": 3 * 2**20},
        },
        "phases": {
            "evaluate": {"seconds": 20.0},
            "collect": {
                "seconds": 11.5 if g_t else None,
                "agent_steps": 40_000 if g_t else 0,
                "agent_steps_per_s": None,
                "reused": True,
            },
            "offline": {
                "seconds": 125.0 if offline else None,
                "updates": offline,
                "updates_per_s": 20.0 if offline else None,
            },
            "online": {
                "seconds": 200.0 if online else None,
                "agent_steps": online,
                "updates": online // 4,
                "agent_steps_per_s": 50.0 if online else None,
            },
        },
        "distill": {"online_first": 1.0, "online_last": 0.0, "latched_at_agent_step": 5_000}
        if g_t and online
        else {"online_first": None, "online_last": None, "latched_at_agent_step": None},
        "device": "cpu",
        "precision": "fp32",
        "seed": 1,
        "versions": VERSIONS,
    }
    (folder / "result.json").write_text(json.dumps(result))
    config = override(preset("quick"), {"teacher": ref if g_t else None, "student": student})
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"versions": VERSIONS}))
    if g_t:
        more = {"file": "student.safetensors", "algorithm": "dqn", "architecture": "nature", "parameters": 10}
        card = described | more | {"env": ENV.to_dict(), "assumed": {"noop_max": "CleanRL's wrappers"}}
        (folder / "teacher.json").write_text(json.dumps(card))
    if saved:
        spec = {"env": ENV.to_dict(), "outputs": "q_values", "network": "impala"}
        header = json.dumps({"format": 1, "spec": spec, "reported": None, "metadata": {}})
        save_file({"w": np.zeros(1, np.float32)}, folder / "student.safetensors", {"reincarnate": header})
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "full": {"saved": True},
    "one evaluation per phase": {"evaluations": 1},
    "scratch": {"teacher": None, "offline": 0, "student": "dqn"},
    "stopped before online": {"online": 0, "status": "stopped"},
    "stopped before training": {"offline": 0, "online": 0, "evaluations": 0, "status": "stopped"},
    "no evaluations": {"evaluations": 0, "status": "failed"},
    "negative returns": {"teacher": -100.0, "random": -190.0},
    "teacher below random": {"teacher": 1.0, "random": 2.0},
    "long": {"offline": 1_000_000, "online": 10_000_000, "ref": "x" * 120, "evaluations": 10},
    "hostile names": {"ref": EVIL, "student": EVIL + "漢字"},
}
