"""Pushing real runs to a Hub on the loopback interface with the Hub's own client."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, close_session
from safetensors import safe_open
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from reincarnate.errors import UserError
from reincarnate.runner import Run
from reincarnate.sharing import Pushed, push, upload
from reincarnate.sharing.redact import Redactor
from reincarnate.sharing.stage import stage
from reincarnate.teachers.hub import sha256_of
from reincarnate.teachers.reference import BUNDLED
from reincarnate.teachers.zoo import load_teacher

from loopback_hub import LoopbackHub
from loopback_repository import TOKEN, Repository
from small_runs import quiet, small_config

REPO = "me/CartPole-student"
SECRET = "home-of-somebody"
TINY = {"collect__agent_steps": 200, "offline__updates": 20, "online__agent_steps": 200}
FILES = {
    *("README.md", "config.json", "teacher.json", "result.json", "curves.json", "lineage.json"),
    *("student.safetensors", "report.html", "curves.png", "curves.svg", "losses.png", "losses.svg"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``first``: with a teacher file of this machine; ``second``: with the first's student."""
    base = tmp_path_factory.mktemp(SECRET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REINCARNATE_CACHE", str(base / "cache"))
        model = base / "models" / "my-model.safetensors"
        model.parent.mkdir()
        shutil.copyfile(BUNDLED / "CartPole-dqn" / "teacher.safetensors", model)
        for name, teacher in (("first", model), ("second", base / "first")):
            Run.start(small_config(str(teacher), **TINY), base / name, quiet()).execute()
        yield base


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub({}) as hub, hub.used(monkeypatch, tmp_path):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield hub


@pytest.fixture(scope="module")
def staged(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("staged")
    stage(runs / "first", target, REPO)
    return target


@pytest.fixture
def quick(staged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes its time, and is not what the faults are about: take what was staged once."""

    def copy(folder: Path, target: Path, repo: str) -> list[Path]:
        return [Path(shutil.copyfile(each, target / each.name)) for each in sorted(staged.iterdir())]

    monkeypatch.setattr(upload, "stage", copy)


def on_hub(hub: LoopbackHub, repo: str = REPO, revision: str = "main") -> dict[str, bytes]:
    repository = hub.repositories[repo]
    return {name: blob.content for name, blob in repository.commits[repository.refs[revision]].items()}


def test_a_run_becomes_a_repository_that_is_a_teacher(runs: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "first", run)
    (run / "replay.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    (run / "notes.txt").write_text("not for others")
    lines: list[str] = []
    pushed = push(run, REPO, announce=lines.append)
    files = on_hub(hub)
    events = {name for name in files if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    assert set(files) == FILES | events | {"replay.mp4", ".gitattributes"}
    assert pushed == Pushed(REPO, f"{hub.endpoint}/{REPO}", hub.repositories[REPO].refs["main"], pushed.files)
    assert set(pushed.files) == set(files) - {".gitattributes"}
    assert hub.messages == ["qdagger-dqn on CartPole-v1"]
    assert not hub.repositories[REPO].private
    assert [line for line in lines if line.startswith("uploading")] == [lines[0]]
    teacher = load_teacher(REPO)
    mine = load_teacher(str(run))
    assert teacher.card.revision == pushed.commit
    assert teacher.spec == mine.spec
    for name, value in mine.network.state_dict().items():
        assert value.equal(teacher.network.state_dict()[name])
    final = json.loads(files["result.json"])["student"]["final_return"]
    assert teacher.card.reported is not None
    assert teacher.card.reported.mean == pytest.approx(final["mean"])


def test_nothing_names_this_machine(runs: Path, staged: Path) -> None:
    for path in staged.iterdir():
        content = path.read_bytes()
        for secret in (SECRET, str(Path.home()) + "/", str(runs), str(Path.cwd())):
            assert secret.encode() not in content, path.name
        assert socket.gethostname() not in path.name.split(".")
    teacher = json.loads((staged / "teacher.json").read_text())
    assert (teacher["ref"], teacher["resolved"]) == ("local:my-model.safetensors",) * 2
    assert teacher["sha256"] == sha256_of(runs / "models" / "my-model.safetensors")
    assert json.loads((staged / "config.json").read_text())["teacher"] == "local:my-model.safetensors"
    result = json.loads((staged / "result.json").read_text())
    assert result["teacher"]["ref"] == "local:my-model.safetensors"
    assert result["buffers"]["teacher"]["path"] is None
    with safe_open(staged / "student.safetensors", framework="np") as file:
        header = json.loads(file.metadata()["reincarnate"])
    assert header["metadata"]["teacher"] == "local:my-model.safetensors"


def test_tensorboard_still_reads_what_was_cleaned(runs: Path, staged: Path) -> None:
    def read(folder: Path) -> tuple[list[tuple[str, int, float]], str]:
        (path,) = folder.glob("events.out.tfevents.*")
        scalars, settings = [], ""
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" and value.tensor.float_val:
                    scalars.append((value.tag, event.step, value.tensor.float_val[0]))
                settings += str(value.metadata.plugin_data.content)
        return scalars, settings

    before, after = read(runs / "first"), read(staged)
    assert len(before[0]) > 20
    assert after[0] == before[0]
    assert SECRET in before[1]
    assert "local:my-model.safetensors" in after[1]


def test_the_card_has_the_hubs_metadata(staged: Path) -> None:
    card = ModelCard((staged / "README.md").read_text())
    measured = json.loads((staged / "result.json").read_text())["student"]["final_return"]
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_name) == ("reinforcement-learning", "CartPole-v1")
    assert result.metric_type == "mean_reward"
    assert result.metric_value == f"{measured['mean']:.2f} +/- {measured['std']:.2f}"
    assert result.verified is False
    assert card.data.library_name == "reincarnate"
    assert {"CartPole-v1", "reinforcement-learning", "qdagger-dqn"} <= set(card.data.tags)
    assert card.data.get("base_model") is None  # a file of this machine is no repository
    assert f"reincarnate run --teacher {REPO} --student" in card.text
    assert f'reincarnate.load_teacher("{REPO}")' in card.text


def test_the_lineage_goes_back_through_runs_of_this_machine(runs: Path, tmp_path: Path) -> None:
    stage(runs / "second", tmp_path, REPO)
    document = json.loads((tmp_path / "lineage.json").read_text())
    chain = document["chain"]
    assert [entry["name"] for entry in chain] == [
        "local:my-model.safetensors",
        "local:student.safetensors",
        REPO,
    ]
    assert chain[0]["sha256"] == sha256_of(runs / "models" / "my-model.safetensors")
    assert chain[1]["sha256"] == sha256_of(runs / "first" / "student.safetensors")
    assert chain[2]["sha256"] == sha256_of(tmp_path / "student.safetensors")
    assert chain[2]["return"]["n"] == 4
    card = (tmp_path / "README.md").read_text()
    assert "## Lineage\n\n1. `local:my-model.safetensors`: `dqn`" in card
    assert SECRET not in card + json.dumps(document)


def test_the_lineage_goes_on_from_a_pushed_teacher(
    runs: Path, hub: LoopbackHub, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    first = push(runs / "first", REPO)
    run = tmp_path / "next"
    Run.start(small_config(REPO, **TINY), run, quiet()).execute()
    target = tmp_path / "files"
    target.mkdir()
    stage(run, target, "me/next")
    chain = json.loads((target / "lineage.json").read_text())["chain"]
    assert [entry["name"] for entry in chain] == ["local:my-model.safetensors", REPO, "me/next"]
    assert chain[1]["revision"] == first.commit
    assert ModelCard((target / "README.md").read_text()).data.base_model == REPO


# What can go wrong


def fails(run: Path, message: str, repo: str = REPO, **options: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        push(run, repo, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_no_token_and_a_wrong_one(runs: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        fails(runs / "first", "does not know who pushes to .*HF_TOKEN, with a token that may write")
    assert hub.repositories == {}


@pytest.mark.usefixtures("quick")
def test_no_permission(runs: Path, hub: LoopbackHub) -> None:
    fails(runs / "first", "no permission to write to other/x: .* may write for other", "other/x")
    hub.repositories["other/x"] = Repository({"student.safetensors": b"theirs"})
    fails(runs / "first", "no permission to write to other/x", "other/x")
    assert on_hub(hub, "other/x") == {"student.safetensors": b"theirs"}


@pytest.mark.usefixtures("quick")
def test_a_repository_that_exists(runs: Path, hub: LoopbackHub) -> None:
    """A push over an earlier one takes away what the run no longer has, and nothing else."""
    old = {
        "student.safetensors": b"old",
        "replay.mp4": b"old",
        "events.out.tfevents.1.x": b"",
        "mine.md": b"m",
    }
    hub.repositories[REPO] = Repository(old)
    push(runs / "first", REPO, message="again")
    files = on_hub(hub)
    assert {"replay.mp4", "events.out.tfevents.1.x"}.isdisjoint(files)
    assert files["mine.md"] == b"m"
    assert set(files) >= FILES
    assert hub.messages == ["again"]
    commits = len(hub.repositories[REPO].commits)
    again = push(runs / "first", REPO)  # the same bytes
    assert again.commit in hub.repositories[REPO].commits
    assert on_hub(hub) == files
    assert len(hub.repositories[REPO].commits) <= commits + 1


@pytest.mark.usefixtures("quick")
def test_a_repository_of_something_else_is_not_written_over(runs: Path, hub: LoopbackHub) -> None:
    hub.repositories[REPO] = Repository({"README.md": b"a llama", "model.gguf": b"x"})
    fails(runs / "first", r"already holds something else \(README.md, model.gguf\); .*--force")
    assert on_hub(hub)["README.md"] == b"a llama"
    push(runs / "first", REPO, force=True)
    assert on_hub(hub)["model.gguf"] == b"x"
    assert b"reincarnate" in on_hub(hub)["README.md"]


@pytest.mark.usefixtures("quick")
def test_private_and_branches(runs: Path, hub: LoopbackHub) -> None:
    pushed = push(runs / "first", REPO, private=True, revision="seed-1")
    assert hub.repositories[REPO].private
    assert hub.repositories[REPO].refs["seed-1"] == pushed.commit
    assert set(on_hub(hub)) == {".gitattributes"}
    assert set(on_hub(hub, revision="seed-1")) >= FILES
    hub.repositories["me/open"] = Repository({"student.safetensors": b"x"})
    fails(runs / "first", "me/open exists and is public", "me/open", private=True)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "where", ["/api/repos/create", "/preupload/", "/objects/batch", "/upload/", "/commit/"]
)
def test_a_server_in_trouble(where: str, runs: Path, hub: LoopbackHub) -> None:
    """A passing error is waited out; a lasting one is said, and nothing is half there."""
    hub.inject(where, method="*", status=503, times=1)
    push(runs / "first", REPO)
    hub.repositories.clear()
    hub.blobs.clear()
    hub.inject(where, method="*", status=500)
    fails(runs / "first", rf"the Hub has trouble taking {REPO} \(status 500\)")
    assert REPO not in hub.repositories or set(on_hub(hub)) == {".gitattributes"}


@pytest.mark.usefixtures("quick")
def test_no_network(runs: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    fails(runs / "first", "cannot reach the Hub at http://127.0.0.1:.*check the network")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    fails(runs / "first", "offline mode is on .*go online")


@pytest.mark.usefixtures("quick")
def test_what_is_no_finished_run(runs: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    fails(tmp_path, "is not a run directory")
    fails(tmp_path / "nowhere", "is not a run directory")
    run = tmp_path / "stopped"
    shutil.copytree(runs / "first", run)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"status": "stopped"}))
    fails(run, r"is not finished \(status: stopped\); go on with `reincarnate run --resume .*--force")
    assert hub.requests == []
    push(run, REPO, force=True)
    assert set(on_hub(hub)) >= FILES
    (run / "student.safetensors").unlink()
    fails(run, "has no student yet", force=True)
    for name in ("one-word", "a/b/c", "me/bad name", "https://x.org/a/b", "-/x"):
        fails(runs / "first", "is no name of a Hub repository; write it as owner/name", name)


def test_a_leak_is_refused(runs: Path) -> None:
    redactor = Redactor(runs / "first", None)
    with pytest.raises(UserError, match=r"x\.json would still name a folder of this machine"):
        redactor.refuse_leak("x.json", json.dumps({"a": f"see {runs / 'first'}"}).encode())
    for path in ("/a/b", "~/x", "../x", "./x", r"C:\x", r"\\server\x"):
        assert redactor.clean({"a": [path]}) == {"a": ["local"]}
    for text in ("bundled/CartPole-dqn", "me/model", "ALE/Breakout-v5", "a/b", "…"):
        assert redactor.text(text) == text


def test_command_line(runs: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    def run(*arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "reincarnate", "push", str(runs / "first"), *arguments]
        env = os.environ | hub.env(tmp_path) | {"HF_TOKEN": token}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    done = run(REPO, "--private")
    assert done.returncode == 0, done.stderr
    commit = hub.repositories[REPO].refs["main"]
    count = len(on_hub(hub)) - 1
    assert done.stdout == f"{hub.endpoint}/{REPO} (commit {commit[:12]}, {count} files)\n"
    again = json.loads(run(REPO, "--private", "--json").stdout)
    assert again == {
        "repo": REPO,
        "url": f"{hub.endpoint}/{REPO}",
        "commit": hub.repositories[REPO].refs["main"],
        "files": again["files"],
    }
    assert set(again["files"]) >= FILES
    refused = run("other/x")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("reincarnate: no permission to write to other/x")
