"""Statistics against hand-computed values, scipy, and coverage of the truth."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.stats import (
    Estimate,
    aggregate,
    interquartile_mean,
    lacking_runs,
    more_seeds_needed,
    probability_of_improvement,
    profile,
)

numbers = st.floats(-1e3, 1e3, allow_nan=False)


def test_the_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([0, 1, 2, 3, 4, 5, 6, 100]) == (2 + 3 + 4 + 5) / 4
    assert interquartile_mean([5.0]) == 5.0
    assert interquartile_mean([1, 2, 9]) == 4.0  # a quarter of three is none


def test_runs_are_resampled_within_their_task() -> None:
    # Without strata a resample could hold more of the hard task, and the interval would be wide.
    scores = {"easy": [1.0] * 10, "hard": [0.0] * 10}
    estimate = aggregate(scores)
    assert estimate == Estimate(0.5, (0.5, 0.5), 20)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        low, high = aggregate({"a": rng.normal(3.0, 1.0, 20), "b": rng.normal(3.0, 1.0, 20)}, 300).ci95
        covered += low <= 3.0 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_the_interval_agrees_with_scipys_bootstrap() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(0, 1, 15), rng.normal(5, 2, 15)
    ours = aggregate({"a": a, "b": b}, 9_999).ci95

    def statistic(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        return interquartile_mean(np.concatenate((x, y), axis=axis), axis=axis)

    theirs = scipy.stats.bootstrap((a, b), statistic, method="percentile", rng=0).confidence_interval
    np.testing.assert_allclose(ours, theirs, atol=0.06)


@given(st.lists(numbers, min_size=1, max_size=8), st.lists(numbers, min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_the_probability_of_improvement_is_mann_and_whitneys(ours: list[float], theirs: list[float]) -> None:
    value = probability_of_improvement({"task": ours}, {"task": theirs}, 10).value
    u = scipy.stats.mannwhitneyu(ours, theirs).statistic
    assert value == pytest.approx(u / (len(ours) * len(theirs)))


def test_tasks_weigh_the_same_whatever_their_number_of_runs() -> None:
    ours = {"many": [1.0] * 50, "few": [0.0, 0.0], "only ours": [9.0, 9.0]}
    theirs = {"many": [0.0] * 50, "few": [1.0, 1.0]}
    estimate = probability_of_improvement(ours, theirs)
    assert (estimate.value, estimate.ci95, estimate.n) == (0.5, (0.5, 0.5), 104)


def test_a_profile_is_the_share_of_runs_above_each_level() -> None:
    found = profile({"a": [0.1, 0.5, 0.9], "b": [0.5, 0.5, 2.0]}, [0.0, 0.5, 1.0, 2.0])
    np.testing.assert_allclose(found.share, [1.0, (1 / 3 + 1 / 3) / 2, (0 + 1 / 3) / 2, 0.0])
    assert (found.low <= found.share).all()
    assert (found.share <= found.high).all()


def test_one_run_has_no_interval() -> None:
    assert aggregate({"a": [0.3]}).ci95 is None
    assert probability_of_improvement({"a": [0.3]}, {"a": [0.2, 0.1]}).ci95 is None


@pytest.mark.parametrize("scores", [{}, {"a": []}, {"a": [1.0, float("nan")]}])
def test_what_is_no_score_is_refused(scores: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="score"):
        aggregate(scores)


def test_more_runs_are_asked_for_until_the_sides_are_told_apart() -> None:
    assert more_seeds_needed(Estimate(0.9, (0.7, 1.0), 20), [(10, 10)]) == 0
    assert more_seeds_needed(Estimate(0.5, (0.2, 0.8), 20), [(10, 10)]) is None
    # Noether: (1.96 + 0.84)^2 / (6 * 0.2^2) = 32.7 runs of each side
    assert more_seeds_needed(Estimate(0.7, (0.4, 0.9), 20), [(10, 10)]) == 33 - 10
    assert more_seeds_needed(Estimate(0.95, (0.5, 1.0), 4), [(40, 40)]) == 1
    # Over two environments they are shared out: 23 more runs are 12 seeds.
    assert more_seeds_needed(Estimate(0.7, (0.4, 0.9), 20), [(5, 5), (5, 6)]) == 12


def test_three_runs_that_all_won_decide_nothing() -> None:
    three = probability_of_improvement({"a": [3.0, 4.0, 5.0]}, {"a": [0.0, 1.0, 2.0]})
    assert (three.value, three.ci95) == (1.0, (1.0, 1.0))
    assert scipy.stats.mannwhitneyu([3, 4, 5], [0, 1, 2], method="exact").pvalue > 0.05
    assert more_seeds_needed(three, [(3, 3)]) == 1
    assert scipy.stats.mannwhitneyu([4, 5, 6, 7], [0, 1, 2, 3], method="exact").pvalue < 0.05
    assert more_seeds_needed(three, [(4, 4)]) == 0


@pytest.mark.parametrize(
    ("runs", "lacking"),
    [([(4, 4)], 0), ([(3, 3)], 1), ([(1, 1)], 3), ([(2, 2)] * 2, 1), ([(2, 2)] * 3, 0), ([(1, 1)] * 6, 0),
     ([(1, 40)], 0), ([(1, 38)], 1)],
)  # fmt: skip
def test_runs_are_too_few_where_no_permutation_of_them_reaches_the_level(
    runs: list[tuple[int, int]], lacking: int
) -> None:
    """Two environments with two seeds each: 2 / (6 x 6) = 0.056, although they are four runs of each."""
    assert lacking_runs(runs) == lacking


def test_that_many_runs_do_decide_it() -> None:
    # Normal scores so far apart that ours wins with 0.7: with 33 runs, 80 % of the tests decide.
    rng, shift, decided = np.random.default_rng(3), np.sqrt(2) * scipy.stats.norm.ppf(0.7), 0
    for _ in range(300):
        decided += scipy.stats.mannwhitneyu(rng.normal(shift, 1, 33), rng.normal(0, 1, 33)).pvalue < 0.05
    assert 0.72 <= decided / 300 <= 0.88
