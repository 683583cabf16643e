"""Comparisons of damaged, foreign, repeated and alike-named runs: one line, or counted rightly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reincarnate.comparison import compare, report_runs, resume
from reincarnate.comparison.cells import of_grid, of_runs
from reincarnate.comparison.document import build
from reincarnate.comparison.grid import Grid
from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell, cell_folder, state_of
from reincarnate.launching.choice import Launch
from reincarnate.report import read_run
from reincarnate.runner import Run

from compared_runs import make_run
from small_runs import quiet


def edit(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    result = json.loads((run / "result.json").read_text())
    change(result)
    (run / "result.json").write_text(json.dumps(result))


def cell_of(seed: int = 1, env: str = "Breakout-v5", student: str = "qdagger-dqn") -> Cell:
    return Cell(f"cell-s{seed}", "bundled/Breakout-dqn", student, env, seed, True, ())


def grid_of(*cells: Cell) -> Grid:
    return Grid(cells, (), {}, "quick")


def test_the_verdict_tells_teachers_apart_whose_short_names_are_one(tmp_path: Path) -> None:
    best, worst, between = "/home/x/two/models/t.pt", "/home/x/one/models/t.pt", "C"
    made = [
        make_run(tmp_path / f"{letter}{seed}", final + seed, seed=seed, ref=ref)
        for letter, ref, final in (("w", worst, 10.0), ("b", best, 90.0), ("c", between, 50.0))
        for seed in range(5)
    ]
    document = build(of_runs(made), tmp_path)
    names = [row["name"] for row in document["summary"]]
    assert len(set(names)) == 3
    assert names[1] == f"qdagger-dqn from {best}"
    assert document["verdict"][0].startswith(f"Highest: qdagger-dqn from {best}, ")
    told = " ".join(document["verdict"][1:])
    assert f"It beats qdagger-dqn from {worst}: a run of it wins with probability 1.00" in told
    assert "It beats qdagger-dqn from C: a run of it wins with probability 1.00" in told


def test_a_run_given_twice_is_refused(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a", 50.0), make_run(tmp_path / "b", 40.0, seed=2)
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(UserError, match=r"link is given more than once; every run counts once"):
        report_runs([run, other, tmp_path / "link"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_files_of_one_reference_are_not_pooled(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 50.0, seed=seed, ref="t.pt") for name, seed in (("a", 1), ("b", 2))]
    runs[1] = make_run(tmp_path / "c", 50.0, seed=2, ref="t.pt", sha256="cd" * 32)
    with pytest.raises(UserError, match=r"t\.pt is another policy in .*c than in .*a; report the runs"):
        report_runs(runs, tmp_path / "out")


def test_a_copy_of_a_run_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50.0)
    shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(UserError, match=r"copy is a copy of .*run; every run counts once"):
        report_runs([run, tmp_path / "copy"], tmp_path / "out")


def test_two_runs_of_one_seed_are_told(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, final) for name, final in (("a", 50.0), ("b", 51.0))]
    said = build(of_runs(runs), tmp_path)["verdict"]
    assert "has more than one run of seed 1 in Breakout-v5" in said[-1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", {}),
        ("config.json", {"student": "dqn"}),
        ("teacher.json", {}),
        ("teacher.json", {"sha256": "00" * 32}),
        ("curves.json", "an unknown phase"),
    ],
)
def test_files_that_do_not_fit_their_result_fail_their_cell_alone(
    name: str, content: Any, tmp_path: Path
) -> None:
    cells = (cell_of(1), cell_of(2))
    for cell in cells:
        make_run(cell_folder(tmp_path, cell), 50.0, seed=cell.seed)
    path = cell_folder(tmp_path, cells[0]) / name
    if name == "curves.json":
        content = json.loads(path.read_text())
        content["evaluations"][0]["phase"] = "foo"
    path.write_text(json.dumps(content))
    first, second = of_grid(tmp_path, grid_of(*cells), {})
    assert (first.status, second.status) == ("failed", "done")
    assert f"{name} is damaged" in str(first.error)


def test_a_cell_that_holds_another_teachers_run_has_failed(tmp_path: Path) -> None:
    cell = cell_of(1)
    run = make_run(cell_folder(tmp_path, cell), 50.0)
    sha256 = json.loads((run / "result.json").read_text())["teacher"]["sha256"]
    teacher = {"ref": str(cell.teacher), "exact": "", "sha256": sha256, "env": cell.env}
    assert of_grid(tmp_path, Grid((cell,), (teacher,), {}, "quick"), {})[0].status == "done"
    other = Grid((cell,), (teacher | {"sha256": "00" * 32},), {}, "quick")
    assert "holds a run of another teacher than" in str(of_grid(tmp_path, other, {})[0].error)


def test_a_list_is_not_one_text() -> None:
    with pytest.raises(UserError, match=r"teachers is a list, got the text 'bundled/CartPole-dqn'; pass \["):
        compare("bundled/CartPole-dqn")


def test_a_strongest_teacher_of_return_0_is_the_scale(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", -5.0, ref="A", teacher=0.0, random=-20.0),
        make_run(tmp_path / "b", -5.0, ref="B", teacher=-10.0, random=-20.0),
    ]
    document = build(of_runs(runs), tmp_path)
    assert document["scales"]["Breakout-v5"] == {"zero": -20.0, "one": 0.0, "one_is": "A"}
    assert [cell["score"] for cell in document["cells"]] == [0.75, 0.75]


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result["student"].update(final_return="much"),
        lambda result: result["student"]["final_return"].update(mean="much"),
        lambda result: result["student"]["final_return"].update(mean=float("nan")),
        lambda result: result["student"].pop("final_return"),
        lambda result: result["student"].pop("teacher_normalized"),
        lambda result: result.pop("random"),
        lambda result: result.update(phases={}),
        lambda result: result["phases"].update(online=[]),
        lambda result: result["phases"]["offline"].update(seconds="long"),
        lambda result: result.update(teacher="bundled/Breakout-dqn"),
        lambda result: result.update(teacher={}),
        lambda result: result.update(buffers={}),
        lambda result: result.update(seed="one"),
    ],
)
def test_damage_below_the_top_level_fails_its_cell_alone(
    change: Callable[..., object], tmp_path: Path
) -> None:
    cells = (cell_of(1), cell_of(2))
    for cell in cells:
        make_run(cell_folder(tmp_path, cell), 50.0, seed=cell.seed)
    broken = cell_folder(tmp_path, cells[0])
    edit(broken, change)
    with pytest.raises(UserError, match=r"result\.json.* is damaged") as raised:
        read_run(broken)
    assert "\n" not in str(raised.value)
    first, second = of_grid(tmp_path, grid_of(*cells), {})
    assert (first.status, second.status) == ("failed", "done")
    assert build([first, second], tmp_path)["summary"][0]["n"] == 1


@pytest.mark.parametrize("other", [{"seed": 2}, {"env": "Pong-v5"}, {"student": "dqn"}])
def test_a_cell_that_holds_another_run_is_not_counted(other: dict[str, Any], tmp_path: Path) -> None:
    make_run(cell_folder(tmp_path, cell_of()), 50.0, **other)
    (outcome,) = of_grid(tmp_path, grid_of(cell_of()), {})
    assert outcome.status == "failed"
    assert "holds a run of" in str(outcome.error)


@pytest.mark.parametrize("jobs", [0, -3])
def test_going_on_with_no_job_is_refused(jobs: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"at least one job, got --jobs {jobs}"):
        resume(tmp_path, jobs=jobs)


@pytest.mark.parametrize("gpus", [float("nan"), float("inf"), -1.0])
def test_shares_of_gpus_are_numbers(gpus: float) -> None:
    with pytest.raises(UserError, match="--gpus-per-cell"):
        Launch(gpus_per_cell=gpus)


def test_a_report_goes_nowhere_that_holds_something_else(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a", 50.0), make_run(tmp_path / "b", 40.0, seed=2)
    (tmp_path / "file").write_text("mine")
    for out, line in ((run, r"a holds a run; choose another --out"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(UserError, match=line):
            report_runs([run, other], out)
    assert not (run / "compare.json").exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_runs_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", 50.0)
    with pytest.raises(UserError, match=r"runs is no run but holds some; name them, e\.g\. .*runs/a"):
        report_runs([tmp_path / "runs"], tmp_path / "out")


def test_a_cell_that_has_lost_its_configuration_is_told_so(tmp_path: Path) -> None:
    """Started anew, it was refused for the README.md that stands in its way."""
    run = make_run(tmp_path / "run", 50.0, status="stopped")
    (run / "config.json").unlink()
    assert state_of(run) == "begun"
    with pytest.raises(UserError, match=r"run has lost its config\.json; put it back or start a new run"):
        Run.resume(run, quiet())
