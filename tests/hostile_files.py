"""Files that mean harm: what they plant, and reading them within limits."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Hints, detect_and_read

CARTPOLE = Hints("CartPole-v1")


class Planted:
    """Whoever unpickles it makes the file ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """No more than 256 MiB of new memory and 20 seconds."""
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc to read the memory in use from")
    start, before = time.perf_counter(), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.perf_counter() - start < 20.0


def refused(path: Path, message: str, hints: Hints = CARTPOLE) -> None:
    """Reading is, in one clear line that names the place."""
    with bounded(), pytest.raises(UserError) as caught:
        detect_and_read(path, hints)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(caught.value).isprintable()
    assert str(path.parent) in str(caught.value)
