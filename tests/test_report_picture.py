"""What the picture of a run shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reincarnate.curves import Curves
from reincarnate.report import drawing, plot_run, plots, read_run

from reported_runs import KINDS, make_run


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def full_figure(full_run: Path) -> Any:
    return plot_run(full_run)


def line(axes: Any, color: str, index: int = 0) -> list[tuple[float, float]]:
    lines = [artist for artist in axes.lines if artist.get_color() == color and artist.get_linestyle() == "-"]
    return [tuple(map(float, point)) for point in lines[index].get_xydata()]


def test_the_picture_shows_evaluations_over_updates_then_agent_steps(full_figure: Any) -> None:
    offline, online, m_offline, m_online = full_figure.axes
    assert line(offline, plots.BLUE) == [(1250.0, 32.0), (2500.0, 42.0)]
    assert line(online, plots.BLUE) == [(0.0, 42.0), (5000.0, 52.0), (10_000.0, 62.0)]  # goes on where it was
    assert offline.get_xlim() == (0, 2500)
    assert online.get_xlim()[0] == 0
    assert m_offline.get_xlabel() == "updates (offline)"
    assert m_online.get_xlabel() == "agent steps (online)"
    assert offline.get_ylabel() == "return per game (raw score)"
    boundary = online.spines["left"]
    assert boundary.get_visible()
    assert boundary.get_linestyle() not in ("-", "solid")
    assert offline.get_position().x1 == pytest.approx(online.get_position().x0)


def test_the_picture_shows_m(full_figure: Any) -> None:
    _, _, m_offline, m_online = full_figure.axes
    assert line(m_offline, plots.GREEN) == [(0, 1), (2500, 1)]
    steps, values = zip(*line(m_online, plots.GREEN), strict=True)
    assert (steps[0], values[0]) == (0, 1.0)  # recorded from step 200 on; distill.online_first says the rest
    assert values[-1] == 0.0
    assert values[steps.index(2400)] == pytest.approx(1 - 2 * 0.24)


def test_levels_carry_their_numbers(full_figure: Any) -> None:
    (legend,) = full_figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[0].startswith("teacher  70.0 [")
    assert texts[1].startswith("random policy  2.0 [")
    assert texts[2:] == [
        "student, evaluated (95 % interval)",
        "student, training games (dots; line: mean of the last 13 to 20)",  # 49 games: from a quarter on
    ]


def test_intervals_are_those_of_the_evaluations(full_run: Path, full_figure: Any) -> None:
    run = read_run(full_run)
    _, online, *_ = full_figure.axes
    (bars,) = [container for container in online.containers if container.has_yerr]
    ends = [(float(low[1]), float(high[1])) for low, high in bars[2][0].get_segments()]
    expected = [e.returns.ci95 for e in run.curves.evaluations if e.phase == "online"]
    assert ends == [pytest.approx(interval) for interval in expected]


def test_a_scratch_run_has_one_part_and_no_m(tmp_path: Path) -> None:
    figure = plot_run(make_run(tmp_path, **KINDS["scratch"]))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "agent steps (online)"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert not any(text.startswith("teacher") for text in texts)


def test_a_run_without_online_phase_has_one_part_with_m(tmp_path: Path) -> None:
    returns, m = plot_run(make_run(tmp_path, **KINDS["stopped before online"])).axes
    assert m.get_xlabel() == "updates (offline)"
    assert line(m, plots.GREEN) == [(0, 1), (2500, 1)]
    assert len(line(returns, plots.BLUE)) == 2


def test_training_games_are_a_mean_over_the_window(full_figure: Any) -> None:
    _, online, *_ = full_figure.axes
    points = line(online, plots.SKY)
    # games at 200, 400, ... with return 32 + step / 1000; the last 20 end at 9800 and begin at 6000
    assert points[-1] == (9800.0, pytest.approx(32 + 7.9))
    assert points[0][0] == 200 * 13  # the first few games to finish are the short ones: not drawn


def test_thinned_games_are_drawn_as_a_line_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    curves = Curves.load(folder / "curves.json")
    for step in range(10_000, 14_000, 2):
        curves.add_game(step, 50.0)
    curves.save(folder / "curves.json")
    figure = plot_run(folder)
    assert figure.legends[0].get_texts()[3].get_text() == "student, training games (mean of 20)"


@pytest.mark.parametrize(("games", "told"), [(1, "1"), (8, "the last 2 to 8"), (100, "20")])
def test_the_legend_says_of_how_many_games_the_line_is_a_mean(games: int, told: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    curves = Curves.load(folder / "curves.json")
    curves.games = Curves().games
    for step in range(games):
        curves.add_game(100 * step, 50.0)
    curves.save(folder / "curves.json")
    shown = plot_run(folder).legends[0].get_texts()[3].get_text()
    assert shown == f"student, training games (dots; line: mean of {told})"


def test_names_from_elsewhere_are_not_read_as_formulas(tmp_path: Path) -> None:
    (title,) = plot_run(make_run(tmp_path, ref="$x_1$")).texts
    assert title.get_text() == "Breakout-v5: $x_1$ → qdagger-dqn"
    assert not title.get_parse_math()


def test_short_counts() -> None:
    values = (0, 250, 2_500, 40_000, 2_500_000)
    assert [drawing.short_count(value) for value in values] == ["0", "250", "2.5k", "40k", "2.5M"]


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    program = (
        "import sys, reincarnate.report as report\n"
        "assert 'matplotlib' not in sys.modules and 'huggingface_hub' not in sys.modules\n"
        "import matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "report.write_report(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
