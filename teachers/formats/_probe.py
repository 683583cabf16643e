"""What a file is not: the mishaps of downloading, each told in one line before any reader starts."""

from __future__ import annotations

import codecs
import stat
from pathlib import Path

from reincarnate.errors import UserError
from reincarnate.teachers.formats._text import one_line

HEAD_BYTES = 4096
_MARKUP = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")
_TAR_MAGIC_AT = 257


def head_of(path: Path) -> bytes:
    """The first bytes of a file.

    Raises:
        UserError: nothing there, a folder, something that is no regular file, no permission.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{path} is a folder, not a checkpoint; name a file in it")
        if not stat.S_ISREG(mode):
            raise UserError(f"{path} is not a regular file")
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def refuse_what_is_no_checkpoint(path: Path) -> None:
    """Name the well-known things that are found in the place of weights.

    Raises:
        UserError: the file is one of them, or :func:`head_of` refuses it.
    """
    head = head_of(path)
    what = _mishap(head)
    if what:
        raise UserError(f"{path} holds no weights: it is {what}")


def _mishap(head: bytes) -> str | None:
    excerpt = one_line(head.decode(errors="replace"), 60)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return "empty; download it again"
    if not head.strip(b"\0"):
        return "all zeros; download it again"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if text.startswith(_MARKUP):
        return "an HTML page, perhaps a login or an error page; download the raw file"
    if text.startswith((b"{", b"[")):
        return f"JSON text, perhaps an error message ({excerpt}); download the raw file"
    if _is_pickle(head):
        return "a bare Python pickle, which could run code when opened; save the state dict with torch.save"
    if head.startswith(b"\x1f\x8b") or head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return "a compressed or tar archive; unpack it and name the checkpoint inside"
    if _is_text(head):
        return f"text ({excerpt})"
    return None


def _is_pickle(head: bytes) -> bool:
    """Protocol 2 or later; or an early one, which opens with MARK, ``c`` or ``(`` and is all text."""
    return (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or (
        head[:1] in (b"c", b"(") and b"\n" in head and head.rstrip(b"\n").endswith(b".")
    )


def _is_text(head: bytes) -> bool:
    if any(byte < 0x20 and byte not in b"\t\r\n" for byte in head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return True
