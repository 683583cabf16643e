"""A run directory, read back: what the report is made of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reincarnate import files
from reincarnate.atari_scores import human_normalized, published
from reincarnate.curves import Curves
from reincarnate.errors import UserError
from reincarnate.types import Returns

RESULT_FORMAT = 1
_RESULT_PARTS = {
    "student": dict,
    "buffers": dict,
    "phases": dict,
    "distill": dict,
    "versions": dict,
    "env": str,
    "status": str,
}


@dataclass(frozen=True)
class RunData:
    """The JSON documents of one run, as they were written."""

    directory: Path
    result: dict[str, Any]  # result.json
    config: dict[str, Any]  # config.json
    teacher: dict[str, Any] | None  # teacher.json; None for a scratch student
    curves: Curves
    spec: dict[str, Any] | None  # of the saved student (its TeacherSpec); None while there is none

    @property
    def title(self) -> str:
        """E.g. ``Breakout-v5: bundled/Breakout-dqn → qdagger-dqn``."""
        teacher, student = self.result["teacher"], self.result["student"]["name"]
        if teacher and self.reincarnated:
            student = f"{short_path(teacher['ref'])} → {student}"
        elif teacher:
            student += f", measured beside {short_path(teacher['ref'])}"
        return " ".join(f"{self.result['env']}: {student}".split())

    @property
    def reincarnated(self) -> bool:
        """Whether the student learnt from the teacher; one from scratch is at most measured beside it."""
        teacher = self.result["teacher"]
        return teacher is not None and bool(teacher.get("learnt_from", self._had_advice))

    @property
    def _had_advice(self) -> bool:
        """Whether there was a D_T or an m: older runs do not say what they learnt from."""
        advised = self.result["distill"].get("online_first") is not None
        return advised or bool(self.result["buffers"]["teacher"].get("agent_steps"))

    @property
    def env(self) -> dict[str, Any]:
        """The EnvSpec that the student was measured in, as far as the run's files tell."""
        if self.spec is not None:
            return dict(self.spec["env"])
        return dict((self.teacher or {}).get("env") or {"env_id": self.result["env"]})

    def returns(self, name: str) -> Returns | None:
        """RETURN of ``teacher``, ``random``, ``offline`` or ``final``; None where nothing was measured."""
        student = self.result["student"]
        document = {
            "teacher": (self.result["teacher"] or {}).get("return"),
            "random": self.result["random"],
            "offline": student["offline_return"],
            "final": student["final_return"],
        }[name]
        return Returns.from_dict(document) if document else None

    def moment(self, name: str) -> str:
        """When ``offline`` or ``final`` was measured, e.g. ``2,500 offline updates``."""
        phase = "offline" if name == "offline" else "online"
        counters = self.result["phases"][phase]
        updates, agent_steps = counters["updates"] or 0, counters.get("agent_steps") or 0
        for evaluation in self.curves.evaluations:
            if evaluation.phase == phase:  # the last one counts
                updates, agent_steps = evaluation.updates, evaluation.agent_steps
        return f"{updates:,} offline updates" if phase == "offline" else f"{agent_steps:,} online agent steps"

    def normalized(self, name: str) -> float | None:
        """(x - random) / (G_T - random) of any of :meth:`returns`."""
        value, teacher, random = self.returns(name), self.returns("teacher"), self.returns("random")
        if value is None or teacher is None or random is None or teacher.mean == random.mean:
            return None
        return (value.mean - random.mean) / (teacher.mean - random.mean)

    def human_normalized(self, name: str) -> float | None:
        """(x - random) / (human - random), scores as published, of any of :meth:`returns`."""
        value = self.returns(name)
        return None if value is None else human_normalized(self.result["env"], value.mean)

    @property
    def scales(self) -> Mapping[str, Callable[[str], float | None]]:
        """What :meth:`returns` are told on beside raw scores: the scale, and how to put any of them on it."""
        scales = {"teacher-normalised": self.normalized}
        return scales | {"human-normalised": self.human_normalized} if self.human_scores else scales

    @property
    def human_scores(self) -> tuple[float, float] | None:
        """Published raw scores of random play and of a human; None where there are none."""
        return published(self.result["env"])


def read_run(directory: Path | str) -> RunData:
    """Read what :mod:`reincarnate.runner` wrote.

    Raises:
        UserError: no run there, of another version, or a file of it is damaged.
    """
    folder = Path(directory)
    if not folder.exists():
        near = files.did_you_mean(folder)
        raise UserError(f"{str(folder)!r} does not exist{near}; give the folder of a run")
    if not (folder / "result.json").is_file():
        raise UserError(f"{folder} holds no run with a result yet (no result.json)")
    result = _object(folder / "result.json")
    if result.get("format") != RESULT_FORMAT:
        raise UserError(
            f"{folder / 'result.json'} has format {result.get('format')!r}, known is {RESULT_FORMAT}"
        )
    wrong = [name for name, kind in _RESULT_PARTS.items() if not isinstance(result.get(name), kind)]
    if wrong:
        raise UserError(f"{folder / 'result.json'} is damaged: {', '.join(wrong)} missing or of another type")
    teacher = _object(folder / "teacher.json") if result.get("teacher") else None
    config = _object(folder / "config.json")
    data = RunData(
        folder, result, config, teacher, Curves.load(folder / "curves.json"), _student_spec(folder)
    )
    _refuse_damaged(data)
    return data


def _refuse_damaged(data: RunData) -> None:
    """Below the top level: what reports read must be there, and returns must be numbers."""
    result = data.result
    try:
        returns = [data.returns(name) for name in ("teacher", "random", "offline", "final")]
        sound = all(math.isfinite(score) for each in returns if each for score in (each.mean, *each.returns))
        seconds = [result["phases"][name]["seconds"] for name in ("collect", "offline", "online")]
        counts = [result["phases"]["offline"]["updates"], result["phases"]["online"]["agent_steps"]]
        counts += [result["buffers"]["teacher"]["agent_steps"], int(result["seed"])]
        normalized = [result["student"]["teacher_normalized"][name] for name in ("offline", "final")]
        sound &= all(value is None or math.isfinite(value) for value in [*seconds, *counts, *normalized])
        sound &= isinstance(result["student"]["name"], str) and isinstance(result["distill"], dict)
        if result["teacher"] is not None:
            sound &= all(isinstance(result["teacher"][name], str) for name in ("ref", "sha256", "act"))
    except (AttributeError, KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise UserError(f"{data.directory / 'result.json'} is damaged: a part is missing or of another type")
    if data.config.get("student") != result["student"]["name"]:
        raise UserError(
            f"{data.directory / 'config.json'} is damaged: it is not that of the result beside it"
        )
    if result["teacher"] and (data.teacher or {}).get("sha256") != result["teacher"]["sha256"]:
        raise UserError(
            f"{data.directory / 'teacher.json'} is damaged: it is not that of the result beside it"
        )
    if any(each.phase not in ("offline", "online") for each in data.curves.evaluations):
        raise UserError(f"{data.directory / 'curves.json'} is damaged: an evaluation in an unknown phase")


def short_path(text: str) -> str:
    """A long path by its last two names: tables have little room, and cards are made public."""
    path = Path(text)
    return f"…/{'/'.join(path.parts[-2:])}" if len(path.parts) > 3 else text


def _object(path: Path) -> dict[str, Any]:
    value = files.read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


def _student_spec(folder: Path) -> dict[str, Any] | None:
    """The specification in the header of ``student.safetensors``."""
    from safetensors import SafetensorError, safe_open

    path = folder / "student.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            spec = json.loads((file.metadata() or {})["reincarnate"])["spec"]
            return dict(spec)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}); it is not a student") from None
