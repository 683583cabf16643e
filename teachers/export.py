"""A teacher (or a student) into a file that something else reads: this project's own, or CleanRL's.

import reincarnate

print(reincarnate.export_teacher("runs/breakout", "cleanrl", "models/"))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.teachers.formats import save_native
from reincarnate.teachers.formats._cleanrl_write import Library, write_cleanrl
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher

NATIVE_FILE = "teacher.safetensors"
#: Name on the command line -> what is written.
EXPORT_FORMATS: dict[str, str] = {
    "native": "safetensors with its specification: everything is kept",
    "cleanrl": "the file that a CleanRL PyTorch script saves",
    "cleanrl-jax": "the file that a CleanRL JAX script saves (flax msgpack; neither JAX nor flax is needed)",
}
_LIBRARIES: dict[str, Library] = dict(zip(("cleanrl", "cleanrl-jax"), get_args(Library), strict=True))


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    format: str  # one of EXPORT_FORMATS
    script: str | None  # CleanRL's exp_name, whose evaluation loads the file; None for native
    env_id: str  # as that script names the environment
    notes: tuple[str, ...]  # what is not as in the original

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``teachers export --json``."""
        return {
            "path": str(self.path),
            "format": self.format,
            "script": self.script,
            "env": self.env_id,
            "notes": list(self.notes),
        }


def export_teacher(
    teacher: str | Teacher,
    format: str,
    out: Path | str,
    *,
    env_id: str | None = None,
    force: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Exported:
    """Write a teacher as ``native``, ``cleanrl`` or ``cleanrl-jax``; atomically.

    Args:
        teacher: a reference (a run's student included), or one that is loaded.
        format: a key of :data:`EXPORT_FORMATS`.
        out: a file, or a folder (an existing one, or a path without an ending), which gets CleanRL's name
            ``{exp_name}.cleanrl_model``, or ``teacher.safetensors``.
        env_id: the environment, where the teacher does not say.
        force: write over a file that exists.

    Raises:
        UserError: unknown format, a network that does not fit the format, a file that is already there.
    """
    if format not in EXPORT_FORMATS:
        raise UserError(f"no export format {format!r}; there are: {', '.join(EXPORT_FORMATS)}")
    if not isinstance(teacher, Teacher):
        teacher = load_teacher(teacher, env_id=env_id, announce=announce)
    write = _native if format == "native" else _cleanrl
    return write(teacher, format, Path(out), force)


def _native(teacher: Teacher, format: str, out: Path, force: bool) -> Exported:
    if out.suffix not in ("", ".safetensors") and not out.is_dir():
        raise UserError(f"{out}: a native file ends in .safetensors; choose such a name or a folder")
    path = _file(out, NATIVE_FILE, force)
    card = teacher.card
    origin = {"exported_from": {"sha256": card.sha256, "format": card.format}}
    save_native(path, teacher.network, teacher.spec, origin, reported=card.reported)
    return Exported(path, format, None, teacher.spec.env.env_id, ())


def _cleanrl(teacher: Teacher, format: str, out: Path, force: bool) -> Exported:
    try:
        written = write_cleanrl(teacher.spec, teacher.network.state_dict(), _LIBRARIES[format])
    except UserError as error:
        raise UserError(f"{teacher.card.ref} cannot be exported as {format}: {error}") from None
    path = _file(out, f"{written.script}.cleanrl_model", force)
    files.write_bytes(path, written.content)
    return Exported(path, format, written.script, written.env_id, written.notes)


def _file(out: Path, name: str, force: bool) -> Path:
    """Where the file goes; its folder is made.

    Raises:
        UserError: something is there already.
    """
    path = out / name if out.is_dir() or not out.suffix else out
    if path.is_dir():
        raise UserError(f"{path} is a folder; choose another --out")
    if path.exists() and not force:
        raise UserError(f"{path} already exists; choose another --out, or pass --force to write over it")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
