"""Reports of runs that were made one by one: settings and teachers told apart, one baseline of each."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from reincarnate.comparison import pages, pictures, report_runs
from reincarnate.comparison.baselines import Baselines
from reincarnate.comparison.cells import Method, Outcome, of_runs
from reincarnate.comparison.document import build
from reincarnate.comparison.grid import Grid
from reincarnate.comparison.variants import told_apart
from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell, cell_folder

from compared_runs import make_run

REF = "bundled/Breakout-dqn"


def settings(steps: int, **more: Any) -> dict[str, Any]:
    return {"preset": "quick", "collect": {"agent_steps": steps}, "env": {"id": None}} | more


def variants(runs: list[Path]) -> list[str | None]:
    return [outcome.method.variant for outcome in told_apart(of_runs(runs))]


# ---------------------------------------------------------------- settings


def test_runs_with_other_settings_are_methods_of_their_own(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{steps}-{seed}", final, seed=seed, settings=settings(steps))
        for steps, final in ((5000, 30.0), (20000, 50.0))
        for seed in (1, 2, 3)
    ]
    document = report_runs(runs, tmp_path / "out").document
    few, many = document["summary"]
    assert (few["n"], many["n"]) == (3, 3)
    assert few["variant"] == "collect.agent_steps=5000"
    assert many["name"] == f"qdagger-dqn (collect.agent_steps=20000) from {REF}"
    assert (few["iqm"], many["iqm"]) == pytest.approx(((30 - 10) / 50, (50 - 10) / 50))
    (pair,) = document["pairs"]
    assert (pair["a"], pair["b"], pair["probability_of_improvement"]) == (few["name"], many["name"], 0.0)
    assert document["verdict"][0].startswith(f"Highest: {many['name']}, 0.80")
    assert [row["variant"] for row in document["students"]["summary"]] == [few["variant"], many["variant"]]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "compare.csv").read_text())))
    assert [row["variant"] for row in rows] == [few["variant"]] * 3 + [many["variant"]] * 3
    html = (tmp_path / "out" / "compare.html").read_text()
    assert "qdagger-dqn (collect.agent_steps=5000)" in html


def test_a_table_of_variants_has_each_ones_own_means(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), 10.0 * n, settings=settings(n)) for n in (3, 5)]
    tables = {title: rows for title, _, rows in pages.tables(build(told_apart(of_runs(runs)), tmp_path))}
    finals = {row[0]: row[5] for row in tables["Students"]}
    assert finals == {
        "qdagger-dqn (collect.agent_steps=3)": "30.0",
        "qdagger-dqn (collect.agent_steps=5)": "50.0",
    }


def test_what_does_not_change_learning_makes_no_variant(tmp_path: Path) -> None:
    other = settings(5, system={"device": "cuda"}, versions={"torch": "3"}, evaluate={"games": 8}, seed=7)
    runs = [
        make_run(
            tmp_path / "a", 30.0, settings=settings(5, system={"device": "cpu"}, evaluate={"games": 32})
        ),
        make_run(tmp_path / "b", 30.0, settings=other | {"teacher_seed": 4, "env": {"id": "Breakout-v5"}}),
        make_run(tmp_path / "old", 30.0, settings=settings(5, td={"n_step": 3})),  # knows a setting more
    ]
    assert variants(runs) == [None, None, None]


def test_settings_of_the_environment_differ_within_one_environment_alone(tmp_path: Path) -> None:
    def scratch(name: str, env: str, sticky: float) -> Path:
        values = settings(5) | {"env": {"sticky_probability": sticky}}
        return make_run(tmp_path / name, 9.0, student="dqn", teacher=None, env=env, settings=values)

    two = [scratch("a", "Breakout-v5", 0.25), scratch("b", "Pong-v5", 0.0)]
    assert variants(two) == [None, None]
    sticky = [f"env.sticky_probability={value}" for value in (0.25, 0.0, 0.0)]
    assert variants([*two, scratch("c", "Breakout-v5", 0.0)]) == sticky


def test_presets_are_named_instead_of_all_that_they_set(tmp_path: Path) -> None:
    default = settings(9) | {"preset": "default", "td": {"n_step": 1}}
    runs = [make_run(tmp_path / "q", 30.0, settings=settings(5, td={"n_step": 3}))]
    runs.append(make_run(tmp_path / "d", 30.0, settings=default))
    assert variants(runs) == ["preset=quick", "preset=default"]
    runs.append(make_run(tmp_path / "x", 30.0, settings=default | {"td": {"n_step": 5}}))
    assert variants(runs)[2] == "preset=default, td.n_step=5"


def test_many_settings_are_cut_and_stay_different(tmp_path: Path) -> None:
    made = [
        make_run(tmp_path / str(n), 30.0, settings=settings(5, td=dict.fromkeys("abcde", 1) | {"e": n}))
        for n in (1, 2)
    ]
    made.append(make_run(tmp_path / "3", 30.0, settings=settings(5, td=dict.fromkeys("abcde", 0))))
    cut = "td.a=1, td.b=1, td.c=1 and 2 more"
    assert variants(made) == [f"{cut} (1)", f"{cut} (2)", "td.a=0, td.b=0, td.c=0 and 2 more"]


def test_a_whole_comparison_beside_another_is_told_from_it(tmp_path: Path) -> None:
    folders = []
    for steps in (5, 20):
        cells = tuple(Cell(f"cell-s{n}", REF, "qdagger-dqn", "Breakout-v5", n, True, ()) for n in (1, 2))
        folder = tmp_path / str(steps)
        folder.mkdir()
        Grid(cells, (), {}, "quick").save(folder)
        make_run(cell_folder(folder, cells[0]), float(steps), settings=settings(steps))
        folders.append(folder)
    document = report_runs(folders, tmp_path / "out").document
    named = [(cell["variant"], cell["status"]) for cell in document["cells"]]
    assert ("collect.agent_steps=5", "done") in named
    assert ("collect.agent_steps=20", "done") in named
    assert ("collect.agent_steps=20", "not begun") in named  # as its comparison's other cells


def test_settings_are_compared_whole_and_as_they_were_in_the_run(tmp_path: Path) -> None:
    data = [{"collect": {"teacher_data": f"/data/{name}/x/y/d_t"}} for name in ("one", "two")]
    made = [make_run(tmp_path / str(n), 30.0, seed=n, settings=each) for n, each in enumerate(data)]
    assert variants(made) == [f"collect.teacher_data=/data/{name}/x/y/d_t" for name in ("one", "two")]
    rules = {"max_agent_steps": 500}  # given in one, and the environment's own in the other
    for name, given in (("g", 500), ("h", None)):
        settings = {"env": {"max_agent_steps": given}}
        make_run(tmp_path / name, 30.0, settings=settings, rules=rules)
    assert variants([tmp_path / "g", tmp_path / "h"]) == [None, None]


def test_a_setting_that_the_student_does_not_read_makes_no_variant(tmp_path: Path) -> None:
    made = [
        make_run(
            tmp_path / str(n), 30.0, seed=n, student="dqn", teacher=None, settings={"muesli": {"bins": n}}
        )
        for n in (1, 2)
    ]
    assert variants(made) == [None, None]


def test_pictures_draw_every_variant(tmp_path: Path) -> None:
    ref = "/data/checkpoints/of/somebody/Breakout-ppo-mid/ppo_atari_envpool.cleanrl_model"
    runs = [make_run(tmp_path / str(n), 30.0 + n, ref=ref, settings=settings(10**9 + n)) for n in (1, 2)]
    outcomes = told_apart(of_runs(runs))
    looks = pictures.looks_of([outcome.method for outcome in outcomes])
    assert len({look.label for look in looks.values()}) == 2
    figure = pictures.learning_figure("Breakout-v5", outcomes, looks, Baselines.of(outcomes))
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {look.label for look in looks.values()} <= labels
    matrix = pictures.matrix_figure(build(outcomes, tmp_path)["summary"])
    assert [text.get_text() for text in matrix.axes[0].get_xticklabels()] == [
        f"qdagger-dqn\n(collect.agent_steps={10**9 + n})" for n in (1, 2)
    ]


def test_runs_under_other_rules_of_the_environment_are_told(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(sticky), 30.0, ref=str(sticky), rules={"sticky_probability": sticky})
        for sticky in (0.0, 0.25)
    ]
    said = build(told_apart(of_runs(runs)), tmp_path)["verdict"]
    assert said[-1] == (
        "Breakout-v5 is not one problem in all runs (sticky_probability 0.0 and 0.25): their scores do not "
        "compare."
    )
    assert not any("one problem" in line for line in build(of_runs(runs[:1]), tmp_path)["verdict"])


# ---------------------------------------------------------------- teachers


def test_one_file_under_two_names_is_one_teacher(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / ref, 40.0, ref=ref, seed=seed, sha256="ab" * 32)
        for seed, ref in enumerate(("here.pt", "there.pt"))
    ]
    runs.append(make_run(tmp_path / "other", 40.0, ref="third.pt"))
    document = report_runs(runs, tmp_path / "out").document
    assert [teacher["ref"] for teacher in document["teachers"]] == ["here.pt", "third.pt"]
    assert [row["n"] for row in document["summary"]] == [2, 1]


def test_runs_that_know_less_of_a_teacher_are_of_the_same_one(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), 40.0, seed=n) for n in (1, 2)]
    known = json.loads((runs[0] / "teacher.json").read_text())
    (runs[0] / "teacher.json").write_text(json.dumps(known | {"policy_sha256": "12" * 32}))
    assert [row["n"] for row in report_runs(runs, tmp_path / "out").document["summary"]] == [2]


def test_measurements_of_other_seeds_that_came_to_the_same_returns_count(tmp_path: Path) -> None:
    own = [make_run(tmp_path / str(n), 40.0, seed=n, settings={"teacher_seed": None}) for n in (1, 2)]
    (teacher,) = build(told_apart(of_runs(own)), tmp_path)["teachers"]
    assert (teacher["measurements"], teacher["return"]["n"]) == (2, 8)


def test_teachers_of_one_short_name_are_whole_in_every_table(tmp_path: Path) -> None:
    refs = ["/data/one/m/t.pt", "/data/two/m/t.pt", "/data/three/m/u.pt"]
    made = [make_run(tmp_path / str(n), 40.0, ref=ref) for n, ref in enumerate(refs)]
    tables = {title: rows for title, _, rows in pages.tables(build(told_apart(of_runs(made)), tmp_path))}
    shown = [*refs[:2], "…/m/u.pt"]
    assert [row[0] for row in tables["Teachers"]] == shown
    assert {row[1] for row in tables["Students"]} == set(shown)
    assert [row[0] for row in tables["Cells"]] == [f"qdagger-dqn from {name}" for name in shown]


def test_a_teacher_measured_under_two_acting_rules_is_refused(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / act, 40.0, act=act, seed=n) for n, act in enumerate(("greedy", "sample"))]
    with pytest.raises(UserError, match=r"measured with greedy in .* and with sample in .*report them apart"):
        report_runs(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def measured_twice(tmp_path: Path) -> list[Outcome]:
    """Two students of one teacher, each run with its own G_T and G_random: 60 and 64, 10 and 14."""
    return told_apart(
        of_runs(
            [
                make_run(tmp_path / "dqn", 50.0),
                make_run(tmp_path / "muesli", 50.0, student="qdagger-muesli", teacher=64.0, random=14.0),
            ]
        )
    )


def test_a_page_has_one_baseline_of_each(measured_twice: list[Outcome], tmp_path: Path) -> None:
    document = build(measured_twice, tmp_path)
    (teacher,) = document["teachers"]
    assert (teacher["return"]["mean"], teacher["return"]["n"], teacher["measurements"]) == (62.0, 8, 2)
    assert teacher["random"]["mean"] == 12.0
    scale = document["scales"]["Breakout-v5"]
    assert (scale["zero"], scale["one"]) == (12.0, 62.0)
    for cell in document["cells"]:
        assert cell["score"] == cell["teacher_normalized"] == (50 - 12) / 50
    looks = pictures.looks_of([outcome.method for outcome in measured_twice])
    for figure in (
        pictures.learning_figure("Breakout-v5", measured_twice, looks, Baselines.of(measured_twice)),
        pictures.time_figure("Breakout-v5", measured_twice, looks, Baselines.of(measured_twice)),
    ):
        labels = {text.get_text() for text in figure.legends[0].get_texts()}
        assert {f"teacher {REF}: 62.0", "random play: 12.0"} <= labels


def test_the_page_says_how_often_the_teachers_were_measured(
    measured_twice: list[Outcome], tmp_path: Path
) -> None:
    once, pooled = "Each was measured once and is the same", "The games of all measurements"
    page = pages.page(build(measured_twice, tmp_path), {})
    assert pooled in page
    assert once not in page
    page = pages.page(build(measured_twice[:1], tmp_path), {})
    assert once in page
    assert pooled not in page


# ---------------------------------------------------------------- words and files


def test_two_seeds_in_each_of_two_environments_decide_nothing(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{ref}{env}{seed}", final, ref=ref, env=f"{env}-v5", seed=seed)
        for ref, final in (("good", 50.0), ("bad", 20.0))
        for env in ("Breakout", "Pong")
        for seed in (1, 2)
    ]
    (pair,) = build(of_runs(runs), tmp_path)["pairs"]
    assert (pair["probability_of_improvement"], pair["ci95"]) == (1.0, [1.0, 1.0])
    assert pair["more_seeds_needed"] == 1


def test_finished_runs_without_an_evaluation_are_said_to_have_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50.0)
    result = json.loads((run / "result.json").read_text())
    result["student"] |= {"offline_return": None, "final_return": None}
    (run / "result.json").write_text(json.dumps(result))
    assert build(of_runs([run]), tmp_path)["verdict"] == ["No finished cell has evaluated its student."]
    begun = Outcome(Method(REF, "qdagger-dqn"), "Breakout-v5", 1, tmp_path / "x", None)
    assert build([begun], tmp_path)["verdict"][0] == "No cell is finished yet."


def test_a_name_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    ref = os.fsdecode(b"caf\xe9.pt")  # as a path of another encoding is read
    found = report_runs([make_run(tmp_path / "run", 50.0, ref=ref)], tmp_path / "out")
    assert "caf\\udce9.pt" in (tmp_path / "out" / "compare.csv").read_text()
    assert "caf\\udce9.pt" in (tmp_path / "out" / "compare.html").read_text()
    assert (tmp_path / "out" / "compare.html") in found.files
