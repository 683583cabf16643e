"""Data of the pictures: bounded, exact where it can be, and the same after a save and a load."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.curves import MAX_POINTS, Curves, Point, Series, _highest, _lowest, _mean, moving_mean
from reincarnate.errors import UserError
from reincarnate.types import Returns


def small_series(max_points: int = 4) -> Series:
    return Series("step", {"mean": _mean, "low": _lowest, "high": _highest}, max_points)


def full_curves() -> Curves:
    curves = Curves(teacher=Returns.from_games([70.0, 68.0]), random=Returns.from_games([1.0, 2.0]))
    curves.add_evaluation("offline", 2500, 0, "epsilon=0.01", Returns.from_games([40.0, 41.0]))
    curves.add_evaluation("online", 2500, 10_000, "epsilon=0.01", Returns.from_games([50.0]))
    curves.add_game(120, 3.0)
    curves.add_coefficient(8, 1.0, None)
    curves.add_coefficient(16, 0.5, 36.0)
    curves.add_losses("offline", 100, {"td_loss": 0.25, "distill_loss": 1.5, "q_mean": 3.0})
    curves.add_losses("online", 400, {"td_loss": 0.5})
    return curves


def test_every_loss_of_a_learner_is_kept_whenever_it_first_appears() -> None:
    curves = Curves()
    curves.add_losses("online", 8, {"value_loss": 2.0, "loss": 9.0, "sigma": 1.0})
    curves.add_losses("online", 16, {"value_loss": 1.0, "reward_loss": 0.5, "distill_loss": 0.25})
    again = Curves.from_dict(json.loads(json.dumps(curves.to_dict())))
    assert again.to_dict() == curves.to_dict()
    rows = curves.to_dict()["losses"]
    assert rows[0] == {
        "phase": "online",
        "step": 8,
        "td_loss": None,
        "distill_loss": None,
        "value_loss": 2.0,
        "reward_loss": None,
        "count": 1,
    }
    again.add_losses("online", 24, {"reward_loss": 0.75, "value_loss": 3.0})
    series = again.losses["online"]
    assert [series.value(point, "reward_loss") for point in series.points] == [None, 0.5, 0.75]
    assert series.value(series.points[0], "cmpo_loss") is None


def test_short_series_are_kept_as_they_are() -> None:
    series = small_series()
    for step in range(4):
        series.add(step, step, step, step)
    assert [(point.step, point.values[0], point.count) for point in series.points] == [
        (0, 0.0, 1),
        (1, 1.0, 1),
        (2, 2.0, 1),
        (3, 3.0, 1),
    ]


def test_the_fifth_point_merges_pairs_by_hand() -> None:
    series = small_series()
    for step, value in enumerate([1.0, 3.0, 10.0, 20.0, 7.0, 9.0]):
        series.add(step, value, value, value)
    # five points became (1,3) (10,20) 7; then 9 joins 7 because earlier points stand for two
    assert [(point.step, *point.values, point.count) for point in series.points] == [
        (1, 2.0, 1.0, 3.0, 2),
        (3, 15.0, 10.0, 20.0, 2),
        (5, 8.0, 7.0, 9.0, 2),
    ]


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(2, 16))
def test_thinning_keeps_mean_extremes_and_resolution(values: list[float], max_points: int) -> None:
    series = small_series(max_points)
    for step, value in enumerate(values):
        series.add(step, value, value, value)
    points = series.points
    assert len(points) <= max_points
    assert sum(point.count for point in points) == len(values)
    total = sum(point.values[0] * point.count for point in points)
    assert total == pytest.approx(sum(values), abs=1e-6)
    assert min(point.values[1] for point in points) == min(values)
    assert max(point.values[2] for point in points) == max(values)
    assert points[-1].step == len(values) - 1
    assert {point.count for point in points[:-1]} <= {points[0].count}  # equal resolution
    assert points[-1].count <= points[0].count


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=100), st.data())
def test_saving_and_loading_midway_changes_nothing(values: list[float], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(values)))
    straight, resumed = small_series(), small_series()
    for step, value in enumerate(values[:cut]):
        resumed.add(step, value, value, value)
    reread = small_series()
    reread.extend(json.loads(json.dumps(resumed.to_list())))
    for step, value in enumerate(values):
        straight.add(step, value, value, value)
    for step, value in enumerate(values[cut:], start=cut):
        reread.add(step, value, value, value)
    assert reread.points == straight.points


def test_missing_and_infinite_values_are_null_and_do_not_spoil_a_mean() -> None:
    series = Series("step", {"m": _mean}, 2)
    for step, value in enumerate([math.nan, 2.0, math.inf, None]):
        series.add(step, value)
    assert [point.values for point in series.points] == [(2.0,), (None,)]


def test_a_series_needs_room() -> None:
    with pytest.raises(ValueError, match="room for two points, got max_points=1"):
        small_series(1)


def test_curves_round_trip_through_a_file(tmp_path) -> None:
    curves = full_curves()
    path = tmp_path / "curves.json"
    curves.save(path)
    assert Curves.load(path).to_dict() == curves.to_dict()
    document = json.loads(path.read_text())
    assert document["format"] == 1
    assert document["evaluations"][1]["agent_steps"] == 10_000
    assert document["evaluations"][1]["return"]["mean"] == 50.0
    assert document["games"] == [{"agent_step": 120, "return": 3.0, "low": 3.0, "high": 3.0, "count": 1}]
    assert document["coefficient"][0] == {"agent_step": 8, "m": 1.0, "g_student": None, "count": 1}
    assert document["losses"] == [
        {"phase": "offline", "step": 100, "td_loss": 0.25, "distill_loss": 1.5, "count": 1},
        {"phase": "online", "step": 400, "td_loss": 0.5, "distill_loss": None, "count": 1},
    ]


def test_empty_curves_round_trip() -> None:
    assert Curves.from_dict(Curves().to_dict()).to_dict() == Curves().to_dict()


def test_a_hundred_thousand_games_stay_small(tmp_path) -> None:
    curves = Curves()
    for game in range(100_000):
        curves.add_game(game * 100, game % 7)
    curves.save(tmp_path / "curves.json")
    assert MAX_POINTS / 2 < len(curves.games.points) <= MAX_POINTS
    assert (tmp_path / "curves.json").stat().st_size < 500_000


def test_last_return_is_of_the_newest_evaluation_of_its_phase() -> None:
    curves = full_curves()
    curves.add_evaluation("offline", 3000, 0, "greedy", Returns.from_games([45.0]))
    assert curves.last_return("offline").mean == 45.0
    assert curves.last_return("online").mean == 50.0
    assert Curves().last_return("online") is None


def test_moving_mean_by_hand() -> None:
    points = [Point(1, (2.0,)), Point(2, (4.0,)), Point(3, (9.0,)), Point(4, (1.0,), 4)]
    assert moving_mean(points, 2) == [2.0, 3.0, 6.5, 1.0]
    assert moving_mean(points, 100) == [2.0, 3.0, 5.0, 19 / 7]
    assert moving_mean([Point(1, (None,)), Point(2, (4.0,))], 2) == [None, 4.0]
    assert moving_mean([], 2) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "does not hold the curves of a run"),
        ('{"format": 9}', "format 9, known is 1"),
        ('{"format": 1}', "does not hold the curves of a run"),
    ],
)
def test_damaged_curves_are_one_clear_line(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "curves.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        Curves.load(path)
    assert "\n" not in str(caught.value)


def test_missing_curves_say_so(tmp_path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Curves.load(tmp_path / "curves.json")
