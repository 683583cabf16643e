"""Teacher data that was damaged or forged: one line, never a traceback, never other rows."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from reincarnate import api
from reincarnate.errors import UserError
from reincarnate.replay import Replay
from reincarnate.teachers.collect import load_teacher_data
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher

from small_runs import TEACHER, quiet, read

Edit = Callable[[Any], Any]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return load_teacher(TEACHER)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, teacher: Teacher) -> Path:
    """A small D_T, never changed."""
    folder = tmp_path_factory.mktemp("made") / "data"
    api.collect_teacher(teacher, folder, agent_steps=400, num_envs=4, device="cpu", progress=quiet())
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


def load(folder: Path, teacher: Teacher) -> Replay:
    def replay_of(num_envs: int, agent_steps: int) -> Replay:
        return Replay(teacher.spec.env, num_envs, agent_steps, n_step=3, discount=0.99)

    return load_teacher_data(folder, replay_of, teacher, teacher.spec.env).replay


def refused(folder: Path, teacher: Teacher, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load(folder, teacher)
    assert "\n" not in str(caught.value)


def without(*names: str) -> Edit:
    return lambda document: {name: value for name, value in document.items() if name not in names}


def inside(name: str, change: Edit) -> Edit:
    return lambda document: document | {name: change(document[name])}


def test_what_was_made_loads(folder: Path, teacher: Teacher) -> None:
    assert load(folder, teacher).agent_steps >= 400


MANIFESTS: dict[str, Edit] = {
    "a list": lambda manifest: [manifest],
    "no collection": without("collection"),
    "a collection of text": lambda manifest: manifest | {"collection": "x"},
    "an environment of text": inside("collection", lambda values: values | {"env": "x"}),
    "no steps": inside("collection", lambda values: values | {"agent_steps": 0}),
    "steps of text": inside("collection", lambda values: values | {"agent_steps": "600"}),
    "environments below zero": inside("collection", lambda values: values | {"num_envs": -4}),
    "a hash that is a number": inside("collection", lambda values: values | {"teacher_sha256": 3}),
    "an older format": lambda manifest: manifest | {"format": 1},
    "unfinished": lambda manifest: manifest | {"complete": False},
    "segments of text": lambda manifest: manifest | {"segments": ["x"]},
    "a segment elsewhere": inside(
        "segments", lambda records: [record | {"file": "../../x.safetensors"} for record in records]
    ),
    "a ring of one": inside("segments", lambda records: [record | {"ring": [1]} for record in records]),
    "returns of text": lambda manifest: manifest | {"game_returns": "none"},
    "returns that are none": lambda manifest: manifest | {"game_returns": [None]},
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_damaged_manifest_is_one_line(folder: Path, teacher: Teacher, change: Edit) -> None:
    manifest = change(read(folder, "manifest.json"))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(folder, teacher, "teacher data|damaged|collection|name of a replay segment|another teacher")


def forge_segment(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Other rows under the same name, and a manifest that vouches for them."""
    manifest = read(folder, "manifest.json")
    record = manifest["segments"][0]
    path = folder / record["file"]
    arrays = dict(safetensors.numpy.load_file(path))
    change(arrays)
    data = safetensors.numpy.save({name: np.ascontiguousarray(each) for name, each in arrays.items()})
    path.write_bytes(data)
    record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


SEGMENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no frames": lambda arrays: arrays.pop("frame"),
    "frames of another size": lambda arrays: arrays.update(frame=arrays["frame"][:, :2]),
    "frames of another type": lambda arrays: arrays.update(frame=arrays["frame"].astype(np.float64)),
    "too few rewards": lambda arrays: arrays.update(reward=arrays["reward"][:5]),
    "too few actions": lambda arrays: arrays.update(action=arrays["action"][:5]),
    "actions that do not exist": lambda arrays: arrays.update(action=arrays["action"] + 100),
    "fractions of actions": lambda arrays: arrays.update(action=arrays["action"] + np.float32(0.5)),
    "rewards that are no numbers": lambda arrays: arrays.update(reward=arrays["reward"] * np.nan),
    "outputs that are no numbers": lambda arrays: arrays.update(
        teacher_outputs=arrays["teacher_outputs"] * np.inf
    ),
    "frames that are no numbers": lambda arrays: arrays.update(frame=arrays["frame"] * np.nan),
    "lanes below zero": lambda arrays: arrays.update(counts=-arrays["counts"]),
    "one lane only": lambda arrays: arrays.update(starts=arrays["starts"][:1], counts=arrays["counts"][:1]),
    "starts below zero": lambda arrays: arrays.update(starts=arrays["starts"] - 7),
    "flags of another type": lambda arrays: arrays.update(terminal=arrays["terminal"].astype(np.float32)),
}


@pytest.mark.parametrize("change", SEGMENTS.values(), ids=SEGMENTS)
def test_forged_rows_are_one_line(
    folder: Path, teacher: Teacher, change: Callable[[dict[str, Any]], Any]
) -> None:
    forge_segment(folder, change)
    refused(folder, teacher, r"rows-\d+\.safetensors does not fit this buffer")
