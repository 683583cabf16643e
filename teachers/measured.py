"""Measured returns of teachers, kept in the user's cache so that ``teachers show`` can tell them.

A measurement is found again by the policy itself, :attr:`Teacher.policy_sha256`. What changed upstream is
another policy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.teachers.teacher import Teacher
from reincarnate.types import Backend, EnvSpec, Returns, Wrappers

FORMAT = 1


@dataclass(frozen=True)
class Measured:
    """One measurement, and everything it depends on beside the policy."""

    env: EnvSpec
    backend: Backend
    wrappers: Wrappers | None  # of Atari games on gymnasium
    act: str
    returns: Returns
    date: str  # ISO 8601, UTC

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self._setting() | {"return": self.returns.to_dict(), "date": self.date}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measured:
        """Inverse of :meth:`to_dict`; ``KeyError``, ``TypeError`` or ``ValueError`` on other values."""
        env, returns = EnvSpec.from_dict(values["env"]), Returns.from_dict(values["return"])
        return cls(env, values["backend"], values["wrappers"], values["act"], returns, str(values["date"]))

    @property
    def key(self) -> str:
        """A name for the setting: a newer measurement under the same one replaces it."""
        return hashlib.sha256(json.dumps(self._setting(), sort_keys=True).encode()).hexdigest()[:16]

    def _setting(self) -> dict[str, Any]:
        names = ("backend", "wrappers", "act")
        return {"env": self.env.to_dict()} | {name: getattr(self, name) for name in names}


def remember(
    teacher: Teacher, env: EnvSpec, backend: Backend, wrappers: Wrappers, act: str, returns: Returns
) -> None:
    """Keep a measurement; a cache that cannot be written is no reason to fail."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    whose = wrappers if backend == "gymnasium" and env.kind == "atari" else None
    measured = Measured(env, backend, whose, act, returns, now)
    with contextlib.suppress(OSError, UserError):
        folder = _folder(teacher)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / f"{measured.key}.json", {"format": FORMAT} | measured.to_dict())


def recall(teacher: Teacher) -> list[Measured]:
    """What was measured of this very policy on this machine, the newest first; damaged files are left out."""
    found, paths = [], []
    with contextlib.suppress(OSError, UserError):
        paths = list(_folder(teacher).glob("*.json"))
    for path in paths:
        with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
            values = files.read_json(path)
            if values.pop("format") == FORMAT:
                found.append(Measured.from_dict(values))
    return sorted(found, key=lambda each: each.date, reverse=True)


def _folder(teacher: Teacher) -> Path:
    return files.cache_folder() / "teacher-returns" / teacher.policy_sha256[:32]
