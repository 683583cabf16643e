"""Returns that several runs share: measured once, kept in the artefact cache beside the teacher's data.

Runs that are compared have one ``teacher_seed``, so that a difference between them is not one between two
measurements of the same teacher. What is kept is found again by everything that it depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.types import Returns

FORMAT = 1


def shared(
    what: Mapping[str, Any], measure: Callable[[], Returns], while_waiting: Callable[[], None]
) -> tuple[Returns, bool]:
    """The returns of ``what``, and whether they were there already; else they are measured and kept.

    Args:
        what: JSON values, everything that the returns depend on.
        measure: plays; no two processes measure the same at the same time.
        while_waiting: called every second while another process measures; may raise to stop.
    """
    path = _path(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _locked(path.with_suffix(".lock"), while_waiting)
    try:
        kept = _read(path, what)
        if kept is not None:
            return kept, True
        returns = measure()
        files.write_json(path, {"format": FORMAT, "of": dict(what), "return": returns.to_dict()})
        return returns, False
    finally:
        lock.release()


def folder() -> Path:
    """Where they are kept."""
    return files.cache_folder() / "shared-returns"


def _path(what: Mapping[str, Any]) -> Path:
    text = json.dumps({"format": FORMAT} | dict(what), sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _read(path: Path, what: Mapping[str, Any]) -> Returns | None:
    """What is kept; None where there is nothing, or something damaged, which is measured again."""
    try:
        values = files.read_json(path)
        return Returns.from_dict(values["return"]) if values["of"] == _plain(what) else None
    except (UserError, KeyError, TypeError, ValueError):
        return None


def _plain(what: Mapping[str, Any]) -> Any:
    """As it comes back from a file: tuples are lists."""
    return json.loads(json.dumps(dict(what)))


def _locked(path: Path, while_waiting: Callable[[], None]) -> FileLock:
    lock = FileLock(path)
    while not _acquired(lock):
        while_waiting()
    return lock


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        return False
    return True
