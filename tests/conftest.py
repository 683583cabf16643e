"""Fixtures that several test files share; what they are made of stands in the helper modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_checkpoint import FULL, checkpoint_repository
from loopback_hub import LoopbackHub
from loopback_repository import Repository


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Teacher data of a module's runs, shared as a user's cache is."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REINCARNATE_CACHE", str(folder))
        yield folder


@pytest.fixture
def repository() -> Repository:
    """What stands at :data:`hub_checkpoint.FULL` on :func:`hub`."""
    return checkpoint_repository()


@pytest.fixture
def hub(repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A Hub with one teacher; the real client is pointed at it, with an empty cache."""
    with LoopbackHub({FULL: repository}) as hub, hub.used(monkeypatch, tmp_path):
        yield hub
