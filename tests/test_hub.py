"""Teachers from the Hub: which repository, commit and file a reference means."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from huggingface_hub import constants

from reincarnate.teachers.hub import find_and_download, sha256_of
from reincarnate.teachers.reference import parse_reference

from hub_checkpoint import CARD, FILE, FULL, OTHER, SHORT, WEIGHTS, fails, load
from loopback_hub import LoopbackHub
from loopback_repository import TOKEN, Repository

# ------------------------------------------------------------ finding the repository


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


# ------------------------------------------------------------ choosing revision and file


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


# ------------------------------------------------------------ downloading


def test_small_files_come_from_git_and_large_ones_from_the_cdn(hub: LoopbackHub) -> None:
    load()
    assert [path.rpartition("/")[2] for path in hub.paths("HEAD")] == [FILE, "README.md"]
    served = [(request.cdn, request.path) for request in hub.requests if request.method == "GET"][1:]
    assert [cdn for cdn, _ in served] == [True, False]


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
