"""``--teacher-data owner/name``: what `teachers collect` wrote, shared as a dataset of the (loopback) Hub."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from reincarnate import api
from reincarnate.errors import UserError
from reincarnate.replay import Replay, memory
from reincarnate.runner import Run
from reincarnate.teachers.collect import Collected, load_teacher_data
from reincarnate.teachers.shared_data import TeacherData, exact_text, find_teacher_data
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher

from loopback_hub import LoopbackHub
from loopback_repository import Repository
from small_runs import TEACHER, quiet, read, small_config

REPO = "someone/cartpole-data"
KEY = f"datasets/{REPO}"


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return load_teacher(TEACHER)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "TAIL_ROWS", 100)  # several segments
        return api.collect_teacher(TEACHER, folder, agent_steps=400, num_envs=4, progress=quiet())


@pytest.fixture
def files(collected: Collected) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in collected.folder.iterdir() if path.name != "lock"}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub({KEY: Repository(files)}) as hub, hub.used(monkeypatch, tmp_path):
        yield hub


def find(teacher: Teacher, text: str = REPO, lines: list[str] | None = None) -> TeacherData:
    say = (lambda line: None) if lines is None else lines.append
    return find_teacher_data(text, teacher, teacher.spec.env, say)


def load(data: TeacherData, teacher: Teacher) -> Replay:
    def make(num_envs: int, agent_steps: int) -> Replay:
        return Replay(teacher.spec.env, num_envs, agent_steps, n_step=3, discount=0.99)

    return load_teacher_data(data.folder, make, teacher, teacher.spec.env).replay


def downloads(hub: LoopbackHub) -> list[str]:
    return [path for path in hub.paths("GET") if path.startswith("/blob/")]


def test_a_dataset_gives_the_same_buffer_as_the_folder(hub, teacher, collected):
    lines: list[str] = []
    data = find(teacher, lines=lines)
    assert not downloads(hub)  # the manifest alone tells whether it fits
    data.fetch()
    assert data.exact == f"{REPO}@{hub.repositories[KEY].refs['main']}"
    assert any("segments to download" in line for line in lines)
    here = load(data, teacher)
    rows = here.sampleable_rows()
    assert torch.equal(here.gather(rows).obs, collected.replay.gather(rows).obs)
    assert here.agent_steps == collected.agent_steps


def test_what_is_cached_is_not_downloaded_again(hub, teacher):
    find(teacher).fetch()
    hub.heal()
    find(teacher).fetch()
    assert not downloads(hub)


def test_without_the_hub_the_cache_answers(hub, teacher, monkeypatch):
    exact = find(teacher)
    exact.fetch()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.inject("/api/", status=503)
    lines: list[str] = []
    again = find(teacher, lines=lines)
    again.fetch()
    assert again.exact == exact.exact
    assert any("using the cached copy of dataset" in line for line in lines)
    assert load(again, teacher).agent_steps >= 400


def test_a_revision_is_kept_when_the_dataset_changes(hub, teacher, files):
    before = find(teacher)
    hub.repositories[KEY].push(files | {"README.md": b"new"})
    assert find(teacher).exact != before.exact
    assert find(teacher, before.exact).exact == before.exact


def test_a_download_that_breaks_off_goes_on_where_it_was(hub, teacher, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)  # the client resumes behind a whole chunk
    hub.inject("/blob/", keep_bytes=1000, times=1)
    data = find(teacher)
    data.fetch()
    assert any(request.range for request in hub.requests if request.cdn)
    assert load(data, teacher).agent_steps >= 400


def test_a_segment_that_arrives_damaged_is_downloaded_once_more(hub, teacher, files):
    name = min(name for name in files if name.startswith("rows-"))
    hub.inject("/blob/", replace=bytes(len(files[name])), times=1)
    lines: list[str] = []
    data = find(teacher, lines=lines)
    data.fetch()
    assert any("is damaged in the cache; downloading it again" in line for line in lines)
    assert load(data, teacher).agent_steps >= 400


def refuses(teacher: Teacher, match: str, text: str = REPO) -> None:
    with pytest.raises(UserError, match=match) as caught:
        find(teacher, text).fetch()
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_one_line(hub, teacher):
    refuses(
        teacher,
        "'someone/else' is no folder here, and read as .* there is no dataset someone/",
        "someone/else",
    )
    refuses(teacher, "has no revision 'v9'", f"{REPO}@v9")
    refuses(teacher, "no folder with teacher data: 'no/such/folder'", "no/such/folder")


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (404, "there is no dataset data/cartpol "),
        (503, "status 503), and dataset data/cartpol is not in the cache"),
    ],
)
def test_a_mistyped_folder_is_told_in_both_readings(hub, teacher, monkeypatch, tmp_path, status, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    (tmp_path / "data" / "cartpole").mkdir(parents=True)
    hub.inject("/api/", status=status)
    with pytest.raises(UserError) as caught:
        find(teacher, "data/cartpol")
    line = str(caught.value)
    assert line.startswith("'data/cartpol' is no folder here (did you mean 'data/cartpole'?), and read as ")
    assert why in line
    assert "name the folder of a `teachers collect`, or a dataset as owner/name[@revision]" in line
    assert "bundled" not in line  # what would serve for a teacher is no data


def test_a_dataset_of_something_else_is_refused(hub, teacher, files):
    hub.repositories[KEY].push({"data.csv": b"1,2"})
    refuses(teacher, "has no manifest.json at [0-9a-f]{12}; it holds no teacher data")
    hub.repositories[KEY].push({"manifest.json": b"{}"})
    refuses(teacher, "dataset someone/cartpole-data@[0-9a-f]{40} holds no teacher data of a known format")


def test_another_teacher_or_environment_is_refused_before_the_download(hub, teacher):
    other = copy.copy(teacher)
    other.card = dataclasses.replace(teacher.card, sha256="0" * 64)
    with pytest.raises(UserError, match=r"dataset .* was collected with another teacher \(sha256"):
        find(other)
    env = dataclasses.replace(teacher.spec.env, max_agent_steps=7)
    with pytest.raises(UserError, match="was collected in another environment: max_agent_steps"):
        find_teacher_data(REPO, teacher, env, lambda line: None)
    assert not downloads(hub)


def test_an_unfinished_collection_is_refused(hub, teacher, files):
    manifest = json.loads(files["manifest.json"]) | {"complete": False}
    hub.repositories[KEY].push(files | {"manifest.json": json.dumps(manifest).encode()})
    refuses(teacher, "holds an unfinished collection")


def test_a_segment_that_is_not_the_manifests_is_refused_without_a_download(hub, teacher, files):
    name = max(name for name in files if name.startswith("rows-"))
    hub.repositories[KEY].push(files | {name: files[name][:-1] + b"\1"})
    refuses(teacher, f"{name} of dataset {REPO} is not the one that its manifest lists")
    del files[name]
    hub.repositories[KEY].push(files)
    refuses(teacher, f"has no {name} at")


def test_a_manifest_cannot_name_other_files(hub, teacher, files):
    manifest = json.loads(files["manifest.json"])
    manifest["segments"][0]["file"] = "../../secret"
    hub.repositories[KEY].push(files | {"manifest.json": json.dumps(manifest).encode()})
    refuses(teacher, "no name of a segment; refused")


def test_names_of_datasets_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exact_text("someone/data") == "someone/data"
    assert exact_text("someone/data@v1") == "someone/data@v1"
    assert exact_text("./data") == str(tmp_path / "data")
    (tmp_path / "someone" / "data").mkdir(parents=True)
    assert exact_text("someone/data") == str(tmp_path / "someone" / "data")


def test_a_run_on_a_dataset_names_its_commit(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    changes = {"offline__updates": 5, "online__agent_steps": 0, "evaluate__games": 4}
    config = small_config(
        collect__teacher_data=REPO, offline__evaluations=0, online__evaluations=0, **changes
    )
    result = Run.start(config, tmp_path / "run", quiet()).execute()
    assert result["phases"]["collect"]["reused"]
    exact = f"{REPO}@{hub.repositories[KEY].refs['main']}"
    assert read(tmp_path / "run", "config.json")["collect"]["teacher_data"] == exact
