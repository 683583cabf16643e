"""The chain of generations that a student comes from, oldest first.

An entry: ``{"name", "revision", "sha256", "format", "algorithm", "architecture", "env", "act", "return"}``.
A teacher that was itself made here brings its own chain: from its run directory, if that is still the run
that made those weights, or from ``lineage.json`` of its Hub repository.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reincarnate import runfiles
from reincarnate.sharing.redact import Redactor, is_local
from reincarnate.teachers import hub
from reincarnate.teachers.reference import RUN_STUDENT

FILE = "lineage.json"
_MAX_GENERATIONS = 32
_FIELDS = ("name", "revision", "sha256", "format", "algorithm", "architecture", "env", "act", "return")


def ancestors(
    folder: Path, result: dict[str, Any], generations: int = _MAX_GENERATIONS
) -> list[dict[str, Any]]:
    """Entries of a run's teacher and of all before it; empty without a teacher that it learnt from."""
    teacher = runfiles.read_teacher(folder)
    measured = result.get("teacher") or {}
    if teacher is None or generations == 0 or not measured.get("learnt_from", True):
        return []
    entry = {
        "name": teacher["ref"] if is_local(teacher) else teacher["resolved"],
        "revision": teacher["revision"],
        "sha256": teacher["sha256"],
        "format": teacher.get("format"),
        "algorithm": teacher.get("algorithm"),
        "architecture": teacher.get("architecture"),
        "env": (teacher.get("env") or {}).get("env_id"),
        "act": measured.get("act"),
        "return": _short(measured.get("return")),
    }
    clean: list[dict[str, Any]] = Redactor(folder, teacher).clean([entry])
    return [*_before(teacher, generations - 1), *clean]


def student(name: str, spec: dict[str, Any], sha256: str, result: dict[str, Any]) -> dict[str, Any]:
    """The entry of a run's student under the name that it gets."""
    made = result["student"]
    return {
        "name": name,
        "revision": None,
        "sha256": sha256,
        "format": "native",
        "algorithm": spec.get("algorithm"),
        "architecture": spec.get("network"),
        "env": result["env"],
        "act": made.get("act"),
        "return": _short(made.get("final_return") or made.get("offline_return")),
    }


def _short(returns: dict[str, Any] | None) -> dict[str, Any] | None:
    return returns and {name: returns[name] for name in ("mean", "std", "n")}


def _before(teacher: dict[str, Any], generations: int) -> list[dict[str, Any]]:
    if teacher["revision"] is not None:
        return _from_hub(teacher["resolved"], teacher["revision"])
    folder = Path(teacher["resolved"])
    made_it = (
        is_local(teacher)
        and all((folder / name).is_file() for name in ("config.json", "result.json", RUN_STUDENT))
        and hub.sha256_of(folder / RUN_STUDENT) == teacher["sha256"]
    )
    if not made_it:
        return []
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return ancestors(folder, result, generations)


def _from_hub(repo: str, revision: str) -> list[dict[str, Any]]:
    """The chain that a repository states, without its last entry, which is the repository's own."""
    text = hub.read_companion(repo, revision, FILE)
    try:
        chain = json.loads(text or "[]")["chain"][-_MAX_GENERATIONS:]
        return [{name: entry[name] for name in _FIELDS} for entry in chain[:-1]]
    except (ValueError, KeyError, TypeError):  # not written by us: a chain that is unknown is left out
        return []
