"""Numbers, words, pages and pictures of comparisons, from fabricated run directories."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from reincarnate.atari_scores import human_normalized, known_games
from reincarnate.cli import main
from reincarnate.cli.teachers import table as cli_table
from reincarnate.comparison import pages, pictures, report_runs
from reincarnate.comparison.baselines import Baselines
from reincarnate.comparison.cells import Method, Outcome, drawn_names, moments, of_runs
from reincarnate.comparison.document import build, sentence
from reincarnate.errors import UserError

from compared_runs import make_run

STRONG, WEAK = "bundled/Breakout-dqn", "weak.cleanrl_model"
EVIL = "<script>$x_1$</script>&.pt"
CELL = {
    "teacher", "student", "env", "seed", "status", "run", "offline", "final", "teacher_normalized",
    "human_normalized", "agent_steps_to", "seconds",
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A strong teacher (60), a weak one (35), from scratch; random play is 10; three seeds each."""
    made = []
    for seed in (1, 2, 3):
        made += [
            make_run(tmp_path / f"strong{seed}", 50.0 + seed, seed=seed, online=(35.0, 56.0)),
            make_run(tmp_path / f"weak{seed}", 34.0 + seed, seed=seed, teacher=35.0, ref=WEAK),
            make_run(
                tmp_path / f"scratch{seed}", 20.0 * seed, seed=seed, teacher=None, student="dqn", offline=None
            ),
        ]
    return made


def test_the_document_keeps_the_contract(runs: list[Path], tmp_path: Path) -> None:
    found = report_runs(runs, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document == found.document
    assert document["format"] == 1
    assert all(set(cell) >= CELL for cell in document["cells"])
    assert all(set(row) >= {"teacher", "student", "iqm", "ci95", "n"} for row in document["summary"])
    pair_names = {"a", "b", "probability_of_improvement", "ci95", "more_seeds_needed"}
    assert all(set(pair) == pair_names for pair in document["pairs"])
    assert (tmp_path / "out" / document["cells"][0]["run"] / "result.json").is_file()
    rows = list(csv.DictReader((tmp_path / "out" / "compare.csv").read_text().splitlines()))
    assert len(rows) == len(document["cells"]) == 9
    assert set(rows[0]) >= (CELL - {"agent_steps_to"}) | {"agent_steps_to_0.5", "agent_steps_to_1.0"}
    assert float(rows[0]["final"]) == document["cells"][0]["final"] == 51.0


def test_a_cell_by_hand(runs: list[Path], tmp_path: Path) -> None:
    strong, weak, scratch = build(of_runs(runs), tmp_path)["cells"][:3]
    assert (strong["offline"], strong["final"], strong["seed"]) == (20.0, 51.0, 1)
    assert strong["teacher_normalized"] == strong["score"] == (51 - 10) / (60 - 10)
    assert strong["human_normalized"] == pytest.approx((51 - 1.7) / (30.5 - 1.7))
    # 50 % of the teacher is 35, 90 % is 55: evaluations are 20 offline, 35 after 333 steps, 56 after 667, 51.
    assert strong["agent_steps_to"] == {"0.5": 333, "0.9": 667, "1.0": None}
    assert strong["seconds_to"]["0.5"] == pytest.approx(50 + 200 / 3)
    assert strong["seconds"] == 5 + 4 + 50 + 200
    # The weak teacher's student equals its teacher; on the common scale that is not much.
    assert weak["teacher_normalized"] == 1.0
    assert weak["score"] == (35 - 10) / (60 - 10)
    assert weak["agent_steps_to"] == {"0.5": 1000, "0.9": 1000, "1.0": 1000}
    # From scratch: no teacher of its own, measured by the strongest.
    assert (scratch["teacher"], scratch["teacher_normalized"]) == (None, None)
    assert scratch["score"] == (20 - 10) / (60 - 10)
    assert scratch["agent_steps_to"] == {"0.5": None, "0.9": None, "1.0": None}


def test_what_the_offline_phase_reaches_costs_no_agent_steps(tmp_path: Path) -> None:
    cell = build(of_runs([make_run(tmp_path / "run", 60.0, offline=36.0)]), tmp_path)["cells"][0]
    assert cell["agent_steps_to"] == {"0.5": 0, "0.9": 1000, "1.0": 1000}
    assert cell["seconds_to"]["0.5"] == 50.0


def test_older_runs_without_recorded_times_are_told_in_proportion(tmp_path: Path) -> None:
    old = of_runs([make_run(tmp_path / "old", 50.0, online=(30.0,), timed=False)])[0]
    assert [point.seconds for point in moments(old)] == [50.0, 150.0, 250.0]


def test_teachers_are_measured_once_and_different_measurements_are_pooled(tmp_path: Path) -> None:
    outcomes = of_runs([make_run(tmp_path / str(seed), 50.0, seed=seed) for seed in (1, 2)])
    (teacher,) = build(outcomes, tmp_path)["teachers"]
    assert (teacher["return"]["n"], teacher["return"]["mean"], teacher["ref"]) == (4, 60.0, STRONG)
    outcomes += of_runs([make_run(tmp_path / "other", 50.0, teacher=62.0)])
    (teacher,) = build(outcomes, tmp_path)["teachers"]
    assert (teacher["return"]["n"], teacher["return"]["mean"]) == (8, 61.0)
    assert teacher["human_normalized"] == pytest.approx((61 - 1.7) / (30.5 - 1.7))


def test_summary_pairs_and_verdict(runs: list[Path], tmp_path: Path) -> None:
    document = build(of_runs(runs), tmp_path)
    rows = {(row["teacher"], row["student"]): row for row in document["summary"]}
    assert rows[STRONG, "qdagger-dqn"]["iqm"] == pytest.approx((52 - 10) / 50)  # of three none is cut
    assert {row["n"] for row in rows.values()} == {3}
    pairs = {(pair["a"], pair["b"]): pair for pair in document["pairs"]}
    strong, weak = f"qdagger-dqn from {STRONG}", f"qdagger-dqn from {WEAK}"
    assert pairs[strong, weak]["probability_of_improvement"] == 1.0
    assert pairs[strong, weak]["more_seeds_needed"] == 1  # three against three decide nothing
    # 51, 52, 53 against 20, 40, 60: six of nine
    assert pairs[strong, "dqn from scratch"]["probability_of_improvement"] == pytest.approx(2 / 3)
    assert pairs[strong, "dqn from scratch"]["more_seeds_needed"] == 48 - 3  # 7.849 / (6 / 36) = 47.1
    text = " ".join(document["verdict"])
    assert f"Highest: {strong}, 0.84 [0.82, 0.86] over 3 runs." in text
    assert "Its difference from dqn from scratch is within the noise" in text
    assert "about 45 more seeds of each would decide it" in text


def test_a_real_difference_is_said_to_be_one(tmp_path: Path) -> None:
    made = [make_run(tmp_path / f"a{n}", 50.0 + n, seed=n) for n in range(5)]
    made += [make_run(tmp_path / f"b{n}", 30.0 + n, seed=n, teacher=None, student="dqn") for n in range(5)]
    verdict = build(of_runs(made), tmp_path)["verdict"]
    assert verdict[1] == "It beats dqn from scratch: a run of it wins with probability 1.00 [1.00, 1.00]."


def test_a_clear_lead_of_few_runs_is_not_called_noise() -> None:
    pair = {"a": "x", "b": "y", "probability_of_improvement": 1.0, "ci95": [1.0, 1.0], "more_seeds_needed": 1}
    assert "clear in these runs, but they are too few to decide it" in sentence("x", "y", [pair])
    assert "within the noise" in sentence("x", "y", [pair | {"ci95": [0.3, 1.0]}])
    # The interquartile mean leaves out the ends: who has the highest may still lose most comparisons.
    pair |= {"probability_of_improvement": 0.1, "ci95": [0.0, 0.3], "more_seeds_needed": 0}
    assert sentence("x", "y", [pair]).startswith(
        "Yet y beats it run by run: a run of it wins with probability 0.10"
    )


def test_environments_are_strata_and_teachers_of_different_ones_are_no_pair(tmp_path: Path) -> None:
    made = [make_run(tmp_path / f"b{n}", 40.0 + n, seed=n) for n in (1, 2)]
    made += [make_run(tmp_path / f"p{n}", 60.0, seed=n, env="Pong-v5", ref="pong") for n in (1, 2)]
    document = build(of_runs(made), tmp_path)
    assert document["pairs"] == []
    (student,) = document["students"]["summary"]
    assert student["n"] == 4
    assert student["iqm"] == pytest.approx((0.64 + 1.0) / 2)  # 0.62, 0.64, 1, 1 without the ends
    assert set(document["scales"]) == {"Breakout-v5", "Pong-v5"}


def test_unfinished_cells_are_told_and_not_counted(runs: list[Path], tmp_path: Path) -> None:
    outcomes = of_runs(runs[:6])
    outcomes += of_runs([make_run(tmp_path / "late", 900.0, seed=4, status="stopped")])
    outcomes.append(Outcome(Method(STRONG, "qdagger-dqn"), "Breakout-v5", 5, tmp_path / "x", None, "no room"))
    document = build(outcomes, tmp_path)
    assert [cell["status"] for cell in document["cells"][-2:]] == ["stopped", "failed"]
    assert document["cells"][-1]["error"] == "no room"
    assert sum(row["n"] for row in document["summary"]) == 6
    assert document["verdict"][-1] == "2 of 8 cells are not finished and are not counted."


def test_without_a_teacher_humans_are_the_scale_else_raw_returns(tmp_path: Path) -> None:
    atari = make_run(tmp_path / "a", 30.5, teacher=None, student="dqn", offline=None)
    other = make_run(tmp_path / "c", 70.0, teacher=None, student="dqn", env="CartPole-v1", offline=None)
    (first,), (second,) = (build(of_runs([run]), tmp_path)["cells"] for run in (atari, other))
    assert first["score"] == pytest.approx(1.0)
    assert first["agent_steps_to"]["0.5"] is None  # of which teacher?
    assert (second["score"], second["human_normalized"]) == (70.0, None)


def test_raw_returns_have_no_mean_with_scores_of_other_environments(tmp_path: Path) -> None:
    """Acrobot's -400 beside a share of CartPole's teacher made a mean of -200."""
    runs = [
        make_run(tmp_path / "a", -400.0, teacher=None, student="dqn", env="Acrobot-v1", offline=None),
        make_run(tmp_path / "b", 20.0, teacher=None, student="dqn", env="CartPole-v1", offline=None),
        make_run(tmp_path / "c", 300.0, teacher=410.0, env="CartPole-v1", ref="cartpole"),
    ]
    document = build(of_runs(runs), tmp_path)
    assert set(document["scales"]) == {"CartPole-v1"}
    assert [cell["score"] for cell in document["cells"]] == [None, 10 / 400, 290 / 400]
    assert [row["iqm"] for row in document["summary"]] == [10 / 400, 290 / 400]
    assert document["verdict"][:2] == [
        "Highest in CartPole-v1: qdagger-dqn from cartpole, 0.72 over 1 run.",
        "Not all were run in the same environments: the pairs compare those that they share.",
    ]
    assert "Acrobot-v1 has no teacher and no published human score" in document["verdict"][2]


def test_a_sentence_for_every_way_in_which_two_can_stand() -> None:
    def said(value: float, ci95: list[float] | None, more: int | None) -> str:
        pair = {
            "a": "A",
            "b": "B",
            "probability_of_improvement": value,
            "ci95": ci95,
            "more_seeds_needed": more,
        }
        return sentence("A", "B", [pair])

    assert said(0.9, [0.7, 1.0], 0).startswith(
        "It beats B: a run of it wins with probability 0.90 [0.70, 1.00]"
    )
    assert said(0.1, [0.0, 0.3], 0).startswith("Yet B beats it run by run")
    assert said(1.0, [1.0, 1.0], 2).startswith("Its lead over B is clear in these runs, but they are too few")
    assert said(0.0, [0.0, 0.0], 2).startswith("Yet run by run the lead of B over it is clear in these runs")
    assert said(0.6, [0.3, 0.9], 9).startswith("Its difference from B is within the noise")
    assert said(1.0, None, 3).startswith("Its difference from B cannot be told from noise, with so few runs")
    assert "no number of seeds" in said(0.5, [0.2, 0.8], None)


# ---------------------------------------------------------------- files


def test_curves_show_mean_and_interval_of_each_evaluation(runs: list[Path]) -> None:
    strong = of_runs(runs)[::3]
    curve = pictures.curve_of([moments(each) for each in strong], lambda point: point.agent_steps)
    assert curve.x == [0, 333, 667, 1000]
    assert curve.value == pytest.approx([20, 35, 56, 52])
    assert 51 <= curve.low[-1] < 52 < curve.high[-1] <= 53
    assert curve.low[0] == curve.high[0] == 20.0


def test_pictures_and_page_are_written_for_every_kind(runs: list[Path], tmp_path: Path) -> None:
    evil = make_run(tmp_path / "evil", 44.0, ref=EVIL)
    found = report_runs([*runs, evil], tmp_path / "out")
    names = {path.name for path in found.files}
    stems = ("learning", "learning-time", "profiles", "matrix")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")} | {
        "compare.json", "compare.csv", "compare.html",
    }  # fmt: skip
    assert all(path.stat().st_size > 0 for path in found.files)
    html = (tmp_path / "out" / "compare.html").read_text()
    assert "<script" not in html
    assert html.count("<img") == 4
    assert "within the noise" in html
    assert "&lt;script&gt;$x_1$&lt;/script&gt;&amp;.pt" in html
    assert "<td>Breakout-v5</td>" in html  # words on the left, numbers on the right
    assert '<td class="number">60.0</td>' in html


def test_teacher_levels_and_phases_are_in_the_pictures(runs: list[Path]) -> None:
    outcomes = of_runs(runs)
    looks = pictures.looks_of([outcome.method for outcome in outcomes[:3]])
    figure = pictures.learning_figure("Breakout-v5", outcomes, looks, Baselines.of(outcomes))
    assert len(figure.axes) == 2  # offline, online
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {f"teacher {STRONG}: 60.0", f"teacher {WEAK}: 35.0", "random play: 10.0"} <= set(labels)
    assert {look.label for look in looks.values()} <= set(labels)
    time = pictures.time_figure("Breakout-v5", outcomes, looks, Baselines.of(outcomes))
    dashed = [line for line in time.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert len(dashed) == 2  # the two that learn offline
    assert "minutes" in time.axes[0].get_xlabel()


def test_profiles_begin_at_1_and_end_at_0(tmp_path: Path) -> None:
    """Also where a student plays worse than random play (10 here), as one from scratch may."""
    runs = [make_run(tmp_path / f"s{seed}", 5.0 - seed, seed=seed, teacher=None, student="dqn", offline=None)
            for seed in (1, 2, 3)]  # fmt: skip
    outcomes = of_runs([*runs, make_run(tmp_path / "q", 61.0)])
    looks = pictures.looks_of([outcome.method for outcome in outcomes[2:]])
    figure = pictures.profiles_figure(outcomes, Baselines.of(outcomes).scales, looks)
    lines = [line.get_ydata() for line in figure.axes[0].lines]
    assert [(shares[0], shares[-1]) for shares in lines] == [(1.0, 0.0), (1.0, 0.0)]


def test_tables_fit_a_terminal_and_say_only_what_is_known(runs: list[Path], tmp_path: Path) -> None:
    titles = {title: (head, rows) for title, head, rows in pages.tables(build(of_runs(runs), tmp_path))}
    head, rows = titles["On the way to the teacher"]
    assert all(len(row) == len(head) for row in rows)
    strong, scratch, weak = rows  # the best first
    assert strong == ["qdagger-dqn", STRONG, "333", "667", "never", "1.9 min", "3.1 min", "never", "4.3 min"]
    assert scratch[:5] == ["dqn", "from scratch", "1,000 (2 of 3)", "1,000 (1 of 3)", "1,000 (1 of 3)"]
    assert weak[1:3] == [WEAK, "1,000"]
    assert "human-norm." in titles["Students"][0]
    for title, (head, rows) in titles.items():
        assert len(cli_table(head, rows)) == len(rows) + 1, title  # no cell is folded
    # No human has played CartPole: no column of dashes.
    made = make_run(tmp_path / "c", 300.0, teacher=400.0, env="CartPole-v1", ref="cartpole")
    titles = {title: head for title, head, _ in pages.tables(build(of_runs([made]), tmp_path))}
    assert "human-norm." not in titles["Students"]
    assert "human-normalised" not in titles["Teachers"]


# ---------------------------------------------------------------- the command and the library


def test_report_of_run_directories(runs: list[Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", *map(str, runs), "--out", str(tmp_path / "o"), "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["cells"]) == 9
    table = CliRunner().invoke(main, ["report", *map(str, runs), "--out", str(tmp_path / "o")]).stdout
    assert "Highest: qdagger-dqn from bundled/Breakout-dqn" in " ".join(table.split())


def test_report_of_one_run_is_its_own_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50.0)
    result = CliRunner().invoke(main, ["report", str(run)])
    assert result.exit_code == 0, result.output
    assert (run / "report.html").is_file()


def test_report_of_no_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    result = CliRunner().invoke(main, ["report", str(tmp_path), str(tmp_path / "other")])
    assert result.exit_code == 2
    assert "holds no run with a result yet" in result.stderr


def test_data_frames_need_pandas_and_say_so(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report_runs(runs, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        found.summary()


def test_data_frames_hold_the_same_numbers(runs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    found = report_runs(runs, tmp_path / "out")
    assert list(found.cells()["final"]) == [cell["final"] for cell in found.document["cells"]]
    assert len(found.summary()) == len(found.pairs()) == 3


# ---------------------------------------------------------------- human scores


def test_human_scores_are_0_at_random_play_and_1_at_the_tester() -> None:
    assert len(known_games()) == 57
    assert human_normalized("Breakout-v5", 1.7) == 0.0
    assert human_normalized("Breakout-v5", 30.5) == 1.0
    assert human_normalized("Pong-v5", 14.6) == pytest.approx(1.0)
    assert human_normalized("MontezumaRevenge-v5", 4753.3) == pytest.approx(1.0)
    assert human_normalized("CartPole-v1", 500.0) is None
    values = [human_normalized(f"{game}-v5", 0.0) for game in known_games()]
    assert all(value is not None and math.isfinite(value) for value in values)


def test_every_game_with_human_scores_is_one_that_can_be_played() -> None:
    envpool = pytest.importorskip("envpool")
    assert {f"{game}-v5" for game in known_games()} <= set(envpool.list_all_envs())


def test_pictures_name_a_file_by_its_folder_where_that_is_one_teachers() -> None:
    one, two, same = "../zoo/own/weak/dqn.pt", "../zoo/own/mid/dqn.pt", "../zoo/own/mid/ppo.pt"
    bundled = "bundled/CartPole-dqn"
    names = drawn_names([one, None, two, one, bundled])
    assert names == {None: "scratch", one: "weak", two: "mid", bundled: bundled}
    assert drawn_names([two, same]) == {None: "scratch", two: "…/mid/dqn.pt", same: "…/mid/ppo.pt"}


def test_a_file_near_by_is_named_by_its_folder_too_and_the_hub_by_its_own_name() -> None:
    near = [f"Breakout-ppo-{name}/ppo_atari_envpool.cleanrl_model" for name in ("weak", "mid")]
    hub, alone = "cleanrl/Breakout-v5-dqn_atari_jax-seed1", "dqn.cleanrl_model"
    assert list(drawn_names([*near, hub, alone]).values()) == [
        "scratch",
        "Breakout-ppo-weak",
        "Breakout-ppo-mid",
        f"{hub[:18]}…{hub[-17:]}",
        alone,
    ]


def test_long_names_that_begin_and_end_alike_stay_different() -> None:
    refs = [f"owner/Breakout-v5-with-a-long-name-{letter}-and-a-long-end-seed1" for letter in "ab"]
    first, second = list(drawn_names(refs).values())[1:]
    assert first.endswith(" (1)")
    assert second.endswith(" (2)")
    assert max(len(first), len(second)) <= 40
    looks = pictures.looks_of([Method(ref, "qdagger-muesli") for ref in refs])
    assert len({look.label for look in looks.values()}) == 2


@pytest.mark.parametrize("length", [6, 36])
def test_the_legend_has_every_line_and_stays_inside_the_picture(length: int) -> None:
    figure, row = pictures._panels([0.36, 0.64])
    labels = [f"qdagger-muesli from {letter * length}" for letter in "MWmw"]
    for label in labels:
        row[1].plot([0, 1], [0, 1], label=label)
    pictures._lay_out(figure, row, "a title")
    figure.draw_without_rendering()
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == labels
    box, page = legend.get_window_extent(), figure.bbox
    assert box.x1 <= page.x1
    assert box.y0 >= row[0].get_window_extent().y1


def test_long_names_leave_the_matrix_its_room() -> None:
    folder = "/data/" + "checkpoints/" * 8
    rows = [
        {
            "teacher": f"{folder}{name}/model.pt",
            "student": student,
            "variant": None,
            "iqm": 0.5,
            "ci95": [0.4, 0.6],
            "n": 3,
        }
        for name in ("weak", "mid")
        for student in ("qdagger-dqn", "qdagger-muesli")
    ]
    figure = pictures.matrix_figure(rows)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["weak", "mid"]
    assert axes.get_window_extent().width > 0.5 * figure.bbox.width
