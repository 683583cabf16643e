"""Finished runs in experiment trackers: one of a test's own, and Weights & Biases offline."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from reincarnate.cli import main
from reincarnate.comparison import report_runs, trackers
from reincarnate.comparison.trackers import TrackedRun
from reincarnate.errors import UserError

from compared_runs import make_run


class Notebook:
    """A tracker that keeps what it is told; it fails when it is full."""

    told: ClassVar[list[TrackedRun]] = []
    room = 99

    def track(self, run: TrackedRun, folder: Path) -> str:
        if len(self.told) >= self.room:
            raise UserError("the notebook is full")
        self.told.append(run)
        return f"page {len(self.told)}"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> type[Notebook]:
    """As a package would offer it, through an entry point."""
    module = ModuleType("a_notebook")
    module.Notebook = Notebook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_notebook", module)
    point = trackers.importlib.metadata.EntryPoint("notebook", "a_notebook:Notebook", trackers.GROUP)
    monkeypatch.setattr(trackers.importlib.metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr(Notebook, "told", [])
    return Notebook


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = [make_run(tmp_path / f"r{n}", 50.0 + n, seed=n, online=(35.0,)) for n in (1, 2)]
    return [*made, make_run(tmp_path / "late", 20.0, status="stopped")]


def test_every_finished_run_is_told_once(notebook: type[Notebook], runs: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    found = report_runs(runs, tmp_path / "out")
    notebook.room = 1
    with pytest.raises(UserError, match="the notebook is full"):
        found.track("notebook", said.append)
    notebook.room = 99
    found.track("notebook", said.append)
    report_runs(runs, tmp_path / "out").track("notebook", said.append)  # nothing is new
    assert [run.name for run in notebook.told] == ["r1", "r2"]
    assert said == ["notebook: r1: page 1", "notebook: r2: page 2"]
    first = notebook.told[0]
    assert first.group == "out"
    assert len(first.key) == 16
    assert first.config | {"student": "qdagger-dqn", "env": "Breakout-v5", "seed": 1} == first.config
    assert list(first.points) == [
        {"offline/updates": 100, "offline/return": 20.0},
        {"online/agent_steps": 500, "online/return": 35.0},
        {"online/agent_steps": 1000, "online/return": 51.0},
    ]
    cell = found.document["cells"][0]
    assert first.summary["final"] == cell["final"] == 51.0
    assert first.summary["agent_steps_to.0.5"] == cell["agent_steps_to"]["0.5"]
    assert "human_normalized" in first.summary
    assert "error" not in first.summary


def test_trackers_that_are_not_there_are_one_line_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name, message in (("wandb", "pip install 'reincarnate[wandb]'"), ("wandbb", "did you mean 'wandb'?")):
        arguments = ["compare", "--teacher", "bundled/CartPole-dqn", "--tracker", name]
        result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "out")])
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- Weights & Biases


def records(path: Path) -> Iterator[Any]:
    """What stands in a ``.wandb`` file: protocol buffers in the log format of LevelDB, after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for a header in this block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def items(changes: Any) -> dict[str, Any]:
    """Keys of W&B are plain, or nested ones as a list."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in changes}


def test_wandb_gets_runs_offline(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    out = tmp_path / "out"
    arguments = ["report", *map(str, runs[:1]), "--out", str(out), "--tracker", "wandb", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cells"]
    (path,) = out.glob("wandb/offline-run-*/run-*.wandb")
    read = list(records(path))
    (run,) = [record.run for record in read if record.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.run_group, run.project) == ("r1", "out", "reincarnate")
    config = items(run.config.update)
    assert (config["student"], config["seed"]) == ("qdagger-dqn", 1)
    history = [items(record.history.item) for record in read if record.WhichOneof("record_type") == "history"]
    plain = [{name: value for name, value in row.items() if not name.startswith("_")} for row in history]
    assert plain == [
        {"offline/updates": 100, "offline/return": 20.0},
        {"online/agent_steps": 500, "online/return": 35.0},
        {"online/agent_steps": 1000, "online/return": 51.0},
    ]
    axes = {
        (record.metric.name or record.metric.glob_name): record.metric.step_metric
        for record in read
        if record.WhichOneof("record_type") == "metric"
    }
    assert axes["online/*"] == "online/agent_steps"
    summary: dict[str, Any] = {}
    for record in read:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    assert summary["final"] == 51.0
