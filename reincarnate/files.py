"""Files that are never half-written, and where artefacts are cached."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from reincarnate.errors import UserError

_MOST_NAMES = 2_000  # that a mistyped one is compared with


def write_bytes(path: Path, data: bytes) -> None:
    """Write aside, flush to disk, rename: a reader sees the old file or the new one, never a part."""
    try:
        _write_aside(path, data)
    except OSError as error:  # a full disk does not say where, and nobody knows the file aside
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_aside(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, atomically. NaN is refused: a missing value is null."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """JSON of a file.

    Raises:
        UserError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); it is damaged") from None


def did_you_mean(path: Path) -> str:
    """`` (did you mean 'runs/demo'?)`` for a path that does not exist; empty where nothing is near.

    The first part that is missing is compared with what lies in its folder.
    """
    missing = path
    try:
        while not missing.parent.exists() and missing != missing.parent:
            missing = missing.parent
        there = (each.name for each in missing.parent.iterdir() if not each.name.startswith("."))
        names = list(itertools.islice(there, _MOST_NAMES))
    except (OSError, ValueError):  # no right to look, or no path at all
        return ""
    close = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.6)
    return f" (did you mean {str(missing.parent / close[0])!r}?)" if close else ""


def existing(path: Path) -> Path:
    """``path``, or the nearest of its parents that is there, be it a link that leads nowhere."""
    return next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))


def cache_folder() -> Path:
    """``$REINCARNATE_CACHE``, or ``reincarnate`` in the user's cache folder.

    Raises:
        UserError: there is no home folder that it could be in.
    """
    explicit = os.environ.get("REINCARNATE_CACHE")
    folder = Path(explicit or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return folder.expanduser() if explicit else folder.expanduser() / "reincarnate"
    except RuntimeError:  # an unknown user's
        raise UserError(
            f"the cache cannot be in {folder}, as there is no such home folder; name another one in "
            "REINCARNATE_CACHE"
        ) from None


def refuse_unwritable(cached: Path) -> None:
    """Try whether ``cached``, a folder of the cache, can be made and written; leaves nothing there.

    Raises:
        UserError: what stands in its place is not a folder, or no files can be made there.
    """
    there = existing(cached)
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions alone do not tell of a read-only disk
            return
    except OSError as error:
        why = f"cannot be written ({error.strerror})" if there.is_dir() else "is not a folder"
    raise UserError(
        f"the cache cannot be in {cache_folder()}, as {there} {why}; name another folder in REINCARNATE_CACHE"
    )
