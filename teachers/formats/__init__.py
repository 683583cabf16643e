"""One file per on-disk checkpoint format; what a file is, its content says, not its name.

A format is a module with ``NAME``, ``SUMMARY``, ``matches(path) -> bool`` (by the first bytes) and
``read(path, hints) -> Checkpoint`` (strict). A new one is a file and a line in ``FORMATS``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from reincarnate.errors import UserError
from reincarnate.teachers.formats import cleanrl_flax, cleanrl_torch, dopamine, native, sb3
from reincarnate.teachers.formats._checkpoint import Checkpoint, Companions, Hints
from reincarnate.teachers.formats._probe import refuse_what_is_no_checkpoint
from reincarnate.teachers.formats._text import one_line
from reincarnate.teachers.formats.native import save_native

__all__ = ["FORMATS", "Checkpoint", "Companions", "Format", "Hints", "detect_and_read", "save_native"]


class Format(Protocol):
    """What each module of this package offers."""

    NAME: str
    SUMMARY: str

    def matches(self, path: Path) -> bool:
        """Whether the first bytes are those of this format."""

    def read(self, path: Path, hints: Hints) -> Checkpoint:
        """The checkpoint; UserError if the file is not exactly what it should be."""


FORMATS: dict[str, Format] = {
    module.NAME: cast("Format", module) for module in (native, sb3, cleanrl_torch, cleanrl_flax, dopamine)
}


_MAX_MESSAGE = 600  # characters


def detect_and_read(path: Path, hints: Hints | None = None) -> Checkpoint:
    """Read a checkpoint of any known format.

    Args:
        path: A file.
        hints: What is known besides its content; by default its folder's name alone.

    Raises:
        UserError: no such file, no checkpoint (a Git LFS pointer, an HTML page, ...), an unknown format, a
            damaged or unsafe file, weights of an unknown shape or at odds with their environment.
    """
    try:
        return _read(path, hints or Hints())
    except UserError as error:  # keys and values of the file may be in it: anything at all
        raise UserError(one_line(str(error), _MAX_MESSAGE)) from None


def _read(path: Path, hints: Hints) -> Checkpoint:
    for reader in FORMATS.values():
        if reader.matches(path):
            return reader.read(path, hints)
    refuse_what_is_no_checkpoint(path)
    known = "; ".join(reader.SUMMARY for reader in FORMATS.values())
    raise UserError(f"{path} is in no format that can be read ({known})")
