import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from reincarnate.errors import UserError
from reincarnate.teachers.hub import (
    Cached,
    Downloaded,
    cached_repositories,
    find_and_download,
    sha256_of,
)
from reincarnate.teachers.reference import parse_reference

from loopback_hub import LoopbackHub
from loopback_repository import TOKEN, Repository

SHORT = "cleanrl/Breakout-v5-dqn_atari_jax"
FULL = "cleanrl/BreakoutNoFrameskip-v4-dqn_atari_jax-seed1"
FILE = "dqn_atari_jax.cleanrl_model"
WEIGHTS = bytes(range(256)) * 400  # 100 kB, with NUL bytes: stored apart from git
OTHER = bytes(reversed(range(256))) * 400
CARD = b"# A card without NUL bytes: stored in git\n"


@pytest.fixture
def repository() -> Repository:
    return Repository({FILE: WEIGHTS, "README.md": CARD, "dqn_atari_jax.py": b"import jax\n"})


@pytest.fixture
def hub(repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub({FULL: repository}) as hub, hub.used(monkeypatch, tmp_path):
        yield hub


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client and we would have slept."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


def load(ref: str = FULL, lines: list[str] | None = None) -> Downloaded:
    return find_and_download(parse_reference(ref), announce=None if lines is None else lines.append)


def fails(match: str, ref: str = FULL, lines: list[str] | None = None) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load(ref, lines)
    assert "\n" not in str(caught.value)
    assert ref.partition("@")[0].partition(":")[0] in str(caught.value)


# Finding the repository


def test_short_form_tries_the_literal_repository_then_cleanrls_names(
    hub: LoopbackHub, repository: Repository
) -> None:
    lines: list[str] = []
    got = load(SHORT, lines)
    asked = [path.removeprefix("/api/models/") for path in hub.paths() if path.startswith("/api/")]
    assert asked == [SHORT, f"{SHORT}-seed1", FULL]
    assert (got.repo, got.revision, got.file) == (FULL, repository.refs["main"], FILE)
    assert got.path.read_bytes() == WEIGHTS
    assert got.card_text == CARD.decode()
    assert lines[0] == f"{SHORT} is {FULL} on the Hub"
    assert lines[1].startswith(f"downloading {FILE} (102.4 kB) from {FULL} at {got.revision[:12]}")


def test_the_literal_repository_wins(hub: LoopbackHub) -> None:
    hub.repositories[SHORT] = Repository({FILE: OTHER})
    got = load(SHORT)
    assert got.repo == SHORT
    assert got.path.read_bytes() == OTHER


def test_repository_that_needs_permission_is_not_replaced_by_another(hub: LoopbackHub) -> None:
    hub.repositories[SHORT] = Repository({FILE: OTHER}, gated=True)
    fails(f"{SHORT} is gated: accept its terms .*HF_TOKEN", SHORT)


@pytest.mark.parametrize(("status", "named"), [(401, True), (401, False), (404, True), (404, False)])
def test_absent_repository_tells_what_was_tried(hub: LoopbackHub, status: int, named: bool) -> None:
    hub.absent_status, hub.names_absence = status, named
    fails(
        r"no Hub repository me/Pong-v5-dqn \(tried me/Pong-v5-dqn-seed1, .*private.*HF_TOKEN",
        "me/Pong-v5-dqn",
    )


def test_an_absent_repository_may_have_been_meant_as_a_path(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "me" / "student-2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    here = r"no such file or folder here \(did you mean 'me/student-2'\?\)"
    fails(rf"no Hub repository me/student2 \(.*\), and {here}; if it is private", "me/student2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails(r"me/zzz is not in the cache, nor is there such a file or folder here; go online", "me/zzz")


def test_renamed_repository_is_followed_and_told(hub: LoopbackHub) -> None:
    hub.repositories["old/name"] = Repository(moved_to=FULL)
    lines: list[str] = []
    got = load("old/name", lines)
    assert got.repo == FULL
    assert got.path.read_bytes() == WEIGHTS
    assert f"old/name is called {FULL} now" in lines
    hub.close()
    assert load("old/name").path.read_bytes() == WEIGHTS


def test_private_repository_needs_a_token(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["me/secret"] = Repository({FILE: WEIGHTS}, private=True)
    fails("no Hub repository me/secret .*private", "me/secret")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load("me/secret").path.read_bytes() == WEIGHTS
    assert {request.token for request in hub.requests if request.cdn} == {None}  # no secrets for the CDN


def test_refused_token(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    fails("refuses the access token")


def test_gated_repository_lists_but_does_not_serve(hub: LoopbackHub, repository: Repository) -> None:
    repository.gated = True
    fails("is gated")


def test_denied(hub: LoopbackHub) -> None:
    hub.inject("/api/models", status=403, headers={"X-Error-Message": "Your country is not served"})
    fails("denies access.*Your country is not served")


# Choosing revision and file


def test_revisions(hub: LoopbackHub, repository: Repository) -> None:
    first = repository.refs["main"]
    second = repository.push({FILE: OTHER}, branch="refs/pr/1")
    assert load(f"{FULL}@refs/pr/1").revision == second
    assert load(f"{FULL}@{second}").path.read_bytes() == OTHER
    assert load(f"{FULL}@{second[:8]}").revision == second
    assert load(FULL).revision == first
    fails("has no revision 'v9'; give a branch, tag or commit", f"{FULL}@v9")


def test_a_push_during_the_download_does_not_mix_commits(hub: LoopbackHub, repository: Repository) -> None:
    first = repository.refs["main"]

    def announce(line: str) -> None:
        if line.startswith("downloading"):
            repository.push({FILE: OTHER, "README.md": b"another card"})

    got = find_and_download(parse_reference(FULL), announce=announce)
    assert repository.refs["main"] != first
    assert (got.revision, got.path.read_bytes(), got.card_text) == (first, WEIGHTS, CARD.decode())
    assert all(f"/resolve/{first}/" in path for path in hub.paths() if "/resolve/" in path)


def test_a_later_push_is_noticed(hub: LoopbackHub, repository: Repository) -> None:
    before = load()
    repository.push({FILE: OTHER})
    lines: list[str] = []
    after = load(FULL, lines)
    assert after.revision == repository.refs["main"] != before.revision
    assert sha256_of(after.path) != sha256_of(before.path)
    assert f"{FULL} has changed on the Hub: commit {after.revision[:12]} now" in lines[0]
    assert load(f"{FULL}@{before.revision}").path.read_bytes() == WEIGHTS


def test_named_file(hub: LoopbackHub, repository: Repository) -> None:
    repository.push({FILE: WEIGHTS, "old/q_network.pth": OTHER})
    assert load(f"{FULL}:old/q_network.pth").path.read_bytes() == OTHER
    fails("has no file 'x.pt'; it holds dqn_atari_jax.cleanrl_model, old/q_network.pth", f"{FULL}:x.pt")


def test_no_known_checkpoint_lists_what_is_there(hub: LoopbackHub, repository: Repository) -> None:
    repository.push({"README.md": CARD, "events.out.tfevents": b"\0"})
    fails(r"no known checkpoint in .*\.cleanrl_model.*it holds README.md, events.out.tfevents")
    repository.push({})
    fails("it holds nothing")


def test_several_checkpoints_are_listed(hub: LoopbackHub) -> None:
    hub.repositories["me/x"] = Repository({"a.safetensors": WEIGHTS, "b.safetensors": OTHER})
    fails("me/x holds several checkpoints: a.safetensors, b.safetensors; name one", "me/x")


@pytest.mark.parametrize(
    "name", ["../../evil.safetensors", "/etc/evil.safetensors", "a\\..\\b.zip", "a//b.zip"]
)
def test_file_names_that_leave_the_repository_are_refused(
    hub: LoopbackHub, repository: Repository, name: str, tmp_path: Path
) -> None:
    repository.push({name: WEIGHTS})
    fails("lists a file with an unsafe name")
    assert not list(tmp_path.rglob("*evil*"))


def test_listed_but_not_served(hub: LoopbackHub) -> None:
    hub.inject("/resolve/", method="HEAD", status=404, headers={"X-Error-Code": "EntryNotFound"})
    fails(f"lists '{FILE}' but does not serve it")


def test_what_is_not_a_hub(hub: LoopbackHub) -> None:
    hub.inject("/api/models", status=200, headers={"Content-Type": "text/html"}, body=b"<html>Sign in</html>")
    fails("does not answer like a Hub .*check HF_ENDPOINT and the proxy")


def test_hub_without_commits(hub: LoopbackHub) -> None:
    hub.inject("/api/models", status=200, body=f'{{"id": "{FULL}", "siblings": []}}'.encode())
    fails("names no commit for")


# The cache


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


@pytest.mark.parametrize("endpoint", ["localhost", "http://localhost:port"])
def test_nonsense_endpoint(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    fails(f"{endpoint} .*; check ")


def test_nothing_listens_and_nothing_cached(hub: LoopbackHub) -> None:
    hub.close()
    fails(
        r"cannot reach the Hub at http://127.0.0.1:\d+ \(.*refused\), and .* is not in the cache; check the "
    )


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


# Trouble that passes, and trouble that stays


@pytest.mark.parametrize("status", [500, 503, 429])
def test_passing_trouble_is_waited_for(hub: LoopbackHub, sleeps: list[float], status: int) -> None:
    hub.inject("/api/models", status=status, times=2)
    hub.inject("/resolve/", method="HEAD", status=status, times=2)
    hub.inject("/blob/", status=status, times=2)
    lines: list[str] = []
    assert load(FULL, lines).path.read_bytes() == WEIGHTS
    assert sleeps
    assert any(line.startswith("Hub: ") and str(status) in line for line in lines)


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


@pytest.mark.parametrize("large", [True, False])
def test_damaged_cache_is_mended(hub: LoopbackHub, large: bool) -> None:
    hub.repositories["me/x"] = Repository({FILE: WEIGHTS}, large=large)
    path = load("me/x").path
    path.resolve().write_bytes(OTHER)
    assert load("me/x").path.read_bytes() == WEIGHTS


def test_small_files_come_from_git_and_large_ones_from_the_cdn(hub: LoopbackHub) -> None:
    load()
    assert [path.rpartition("/")[2] for path in hub.paths("HEAD")] == [FILE, "README.md"]
    served = [(request.cdn, request.path) for request in hub.requests if request.method == "GET"][1:]
    assert [cdn for cdn, _ in served] == [True, False]


def test_nothing_is_printed(hub: LoopbackHub, sleeps: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    hub.inject("/resolve/", method="HEAD", status=503, times=2)
    load()
    assert capfd.readouterr() == ("", "")


def test_a_new_process_is_led_by_its_environment(hub: LoopbackHub, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        from reincarnate.teachers.hub import find_and_download
        from reincarnate.teachers.reference import parse_reference
        got = find_and_download(parse_reference({SHORT!r}), announce=print)
        print(got.repo, got.revision, got.path)
    """)
    env = os.environ | hub.env(tmp_path / "other")
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    repo, _, path = done.stdout.splitlines()[-1].split(" ")
    assert repo == FULL
    assert Path(path).is_relative_to(tmp_path / "other")
    assert f"/api/models/{SHORT}" in hub.paths()


# Model cards
