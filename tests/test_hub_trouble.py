"""A Hub that is not there, that is busy or broken, and downloads that arrive cut or damaged."""

import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from reincarnate.teachers.hub import cached_repositories

from hub_checkpoint import FILE, FULL, OTHER, WEIGHTS, fails, load
from loopback_hub import LoopbackHub
from loopback_repository import Repository


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client and we would have slept."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


# ------------------------------------------------------------ no Hub


@pytest.mark.parametrize("endpoint", ["localhost", "http://localhost:port"])
def test_nonsense_endpoint(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    fails(f"{endpoint} .*; check ")


def test_nothing_listens_and_nothing_cached(hub: LoopbackHub) -> None:
    hub.close()
    fails(
        r"cannot reach the Hub at http://127.0.0.1:\d+ \(.*refused\), and .* is not in the cache; check the "
    )


def test_what_is_not_a_hub(hub: LoopbackHub) -> None:
    hub.inject("/api/models", status=200, headers={"Content-Type": "text/html"}, body=b"<html>Sign in</html>")
    fails("does not answer like a Hub .*check HF_ENDPOINT and the proxy")


def test_hub_without_commits(hub: LoopbackHub) -> None:
    hub.inject("/api/models", status=200, body=f'{{"id": "{FULL}", "siblings": []}}'.encode())
    fails("names no commit for")


def test_listed_but_not_served(hub: LoopbackHub) -> None:
    hub.inject("/resolve/", method="HEAD", status=404, headers={"X-Error-Code": "EntryNotFound"})
    fails(f"lists '{FILE}' but does not serve it")


def test_hub_that_does_not_answer_in_time(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, sleeps: list[float]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.inject("/api/models", delay_seconds=5.0)
    fails(r"\(no answer in time\), and .* is not in the cache")
    assert sleeps == []


def test_download_that_does_not_start_in_time(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, sleeps: list[float]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.inject("/blob/", delay_seconds=5.0)
    fails(f"the download of {FILE} from .* failed .no answer in time.; try again")


# ------------------------------------------------------------ busy and broken


@pytest.mark.parametrize("status", [500, 503, 429])
def test_passing_trouble_is_waited_for(hub: LoopbackHub, sleeps: list[float], status: int) -> None:
    hub.inject("/api/models", status=status, times=2)
    hub.inject("/resolve/", method="HEAD", status=status, times=2)
    hub.inject("/blob/", status=status, times=2)
    lines: list[str] = []
    assert load(FULL, lines).path.read_bytes() == WEIGHTS
    assert sleeps
    assert any(line.startswith("Hub: ") and str(status) in line for line in lines)


def test_nothing_is_printed(hub: LoopbackHub, sleeps: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    hub.inject("/resolve/", method="HEAD", status=503, times=2)
    load()
    assert capfd.readouterr() == ("", "")


def test_rate_limit_says_when_to_come_back(hub: LoopbackHub, sleeps: list[float]) -> None:
    hub.inject("/api/models", status=429, headers={"Retry-After": "120"})
    fails("limits requests.*is not in the cache; try again in 120 seconds, or log in .*HF_TOKEN")
    assert sleeps == []  # two minutes are for the user to wait, not for us
    assert len(hub.paths()) == 1


def test_short_rate_limit_is_waited_out(hub: LoopbackHub, sleeps: list[float]) -> None:
    hub.inject("/api/models", status=429, times=1, headers={"Retry-After": "1"})
    assert load().path.read_bytes() == WEIGHTS
    assert sleeps == [1.0]


def test_broken_hub_says_so(hub: LoopbackHub, sleeps: list[float]) -> None:
    hub.inject("/api/models", status=502)
    fails(r"has trouble serving .*\(status 502\), and .* is not in the cache; try again later")
    assert sleeps == [1.0, 2.0, 4.0]


def test_broken_hub_with_a_cached_copy(hub: LoopbackHub, sleeps: list[float]) -> None:
    load()
    hub.inject("/api/models", status=502)
    assert load().offline


@pytest.mark.parametrize("match", ["/resolve/", "/blob/"])
def test_download_of_a_broken_hub(hub: LoopbackHub, sleeps: list[float], match: str) -> None:
    hub.inject(match, method="*", status=503)
    fails(r"has trouble serving .*\(status 503\); try again later")


# ------------------------------------------------------------ cut and damaged downloads


def test_truncated_download_is_resumed(
    hub: LoopbackHub, sleeps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client resumes behind the last whole chunk; with its 10 MB chunks a small file starts again.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 10)
    hub.inject("/blob/", keep_bytes=50_000, times=1)
    assert load().path.read_bytes() == WEIGHTS
    ranges = [request.range for request in hub.requests if request.cdn]
    assert ranges[0] is None
    assert ranges[1] is not None
    assert 40_000 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 50_000


def test_truncated_small_download_starts_again(hub: LoopbackHub, sleeps: list[float]) -> None:
    hub.inject("/blob/", keep_bytes=50_000, times=1)
    assert load().path.read_bytes() == WEIGHTS
    assert [request.range for request in hub.requests if request.cdn] == [None, None]


def test_download_that_is_always_truncated(hub: LoopbackHub, sleeps: list[float], tmp_path: Path) -> None:
    hub.inject("/blob/", keep_bytes=10)
    fails(f"the download of {FILE} from {FULL} failed .*received 10 bytes")
    assert not list(tmp_path.rglob("*incomplete*"))
    assert not any(each.files for each in cached_repositories())


def test_server_that_sends_less_than_it_announced(hub: LoopbackHub) -> None:
    hub.inject("/blob/", replace=WEIGHTS[:-1])
    fails("the download of .* failed .*should be of size 102400 but has size 102399")


def test_damaged_download_is_repeated(hub: LoopbackHub) -> None:
    hub.inject("/blob/", replace=OTHER, times=1)
    lines: list[str] = []
    assert load(FULL, lines).path.read_bytes() == WEIGHTS
    assert f"{FILE} of {FULL} is damaged in the cache; downloading it again" in lines


def test_download_that_stays_damaged_is_not_kept(
    hub: LoopbackHub, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.inject("/blob/", replace=OTHER)
    fails("arrives damaged: its hash is not the one")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails("is not in the cache", f"{FULL}@{repository.refs['main']}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.heal()
    assert load().path.read_bytes() == WEIGHTS
