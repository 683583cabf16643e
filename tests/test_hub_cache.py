"""What has been downloaded once: used again, used without a network, and mended."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from reincarnate.teachers.hub import Cached, cached_repositories

from hub_checkpoint import CARD, FILE, FULL, OTHER, SHORT, WEIGHTS, fails, load
from loopback_hub import LoopbackHub
from loopback_repository import Repository


def test_second_load_downloads_nothing(hub: LoopbackHub) -> None:
    first = load()
    hub.heal()
    lines: list[str] = []
    second = load(FULL, lines)
    assert hub.paths() == [f"/api/models/{FULL}"]
    assert (second, lines) == (first, [])


def test_cache_answers_when_nothing_listens(hub: LoopbackHub) -> None:
    online = load(SHORT)
    hub.close()
    lines: list[str] = []
    offline = load(SHORT, lines)
    assert offline.offline
    assert (offline.path, offline.repo, offline.revision) == (online.path, FULL, online.revision)
    assert offline.card_text == CARD.decode()
    assert len(lines) == 1
    assert "cannot reach the Hub at http://127.0.0.1" in lines[0]
    assert f"using the cached copy of {FULL}, commit {online.revision[:12]}" in lines[0]


def test_offline_mode_asks_nobody(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    hub.heal()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lines: list[str] = []
    assert load(FULL, lines).offline
    assert lines[0].startswith("offline mode is on (HF_HUB_OFFLINE): using the cached copy")
    fails("offline mode is on .*is not in the cache; go online, or use a local or a bundled", "me/other")
    assert hub.paths() == []


def test_offline_revisions(hub: LoopbackHub, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = repository.push({FILE: OTHER}, branch="v1")
    load(f"{FULL}@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load(f"{FULL}@v1").path.read_bytes() == OTHER
    assert load(f"{FULL}@{commit}").path.read_bytes() == OTHER
    fails(f"{FULL} is not in the cache", FULL)  # main was never loaded
    fails("the cached copy of .* has no file 'x.pt'", f"{FULL}@v1:x.pt")


def test_cached_repositories(hub: LoopbackHub, tmp_path: Path) -> None:
    assert cached_repositories() == []
    load()
    assert cached_repositories() == [Cached(FULL, ("README.md", FILE))]


def test_cache_that_cannot_be_written(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    fails("cannot store .* in .*Not a directory.; check its room and rights")


@pytest.mark.parametrize("large", [True, False])
def test_damaged_cache_is_mended(hub: LoopbackHub, large: bool) -> None:
    hub.repositories["me/x"] = Repository({FILE: WEIGHTS}, large=large)
    path = load("me/x").path
    path.resolve().write_bytes(OTHER)
    assert load("me/x").path.read_bytes() == WEIGHTS
