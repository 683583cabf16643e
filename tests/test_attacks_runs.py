"""Run directories and teacher data that were damaged, changed or forged: one line, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reincarnate.errors import UserError
from reincarnate.runner import Run

from small_runs import quiet, small_config

Edit = Callable[[Any], Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run with its cache, never changed."""
    root = tmp_path_factory.mktemp("attacked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REINCARNATE_CACHE", str(root / "cache"))
        Run.start(small_config(), root / "run", quiet()).execute()
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run and its cache."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "copy" / "cache"))
    return tmp_path / "copy"


def edit(path: Path, change: Edit) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def without(*names: str) -> Edit:
    return lambda document: {name: value for name, value in document.items() if name not in names}


def inside(name: str, change: Edit) -> Edit:
    return lambda document: document | {name: change(document[name])}


def refused(act: Callable[[], Any], match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        act()
    assert "\n" not in str(caught.value)


STATES: dict[str, Edit] = {
    "a list": lambda document: [document],
    "no tensors": without("tensors"),
    "a file elsewhere": lambda document: document | {"tensors": "../../other.pt"},
    "a state that is text": lambda document: document | {"state": "all"},
    "an empty state": inside("state", lambda state: {}),
    "no finished phases": inside("state", without("finished")),
    "an unknown counter": inside("state", inside("online", lambda online: online | {"more": 1})),
    "curves of text": inside("state", lambda state: state | {"curves": "x"}),
    "segments of text": lambda document: document | {"student_data": ["x"]},
    "a segment's name that is none": inside(
        "student_data", lambda records: [record | {"file": None} for record in records]
    ),
    "a segment's ends that are none": inside(
        "student_data", lambda records: [record | {"ends": 3, "ring": "x"} for record in records]
    ),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_a_damaged_state_is_one_line(root: Path, change: Edit) -> None:
    edit(root / "run" / "checkpoint" / "state.json", change)
    refused(lambda: Run.resume(root / "run", quiet()), r"state\.json")


def test_deep_json_is_one_line(root: Path) -> None:
    (root / "run" / "checkpoint" / "state.json").write_text("[" * 100_000)
    refused(lambda: Run.resume(root / "run", quiet()), r"state\.json .*damaged")


def test_tensors_of_something_else_are_one_line(root: Path) -> None:
    (tensors,) = (root / "run" / "checkpoint").glob("tensors-*.pt")
    torch.save([1, 2], tensors)
    refused(lambda: Run.resume(root / "run", quiet()), r"tensors-\d+\.pt is missing or damaged")


def test_another_network_in_the_configuration_is_one_line(root: Path) -> None:
    edit(root / "run" / "config.json", inside("network", lambda network: "nature"))
    refused(lambda: Run.resume(root / "run", quiet()), r"nature network takes observations")
