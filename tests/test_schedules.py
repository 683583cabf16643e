"""Schedules: closed forms, hand-played games, and properties of m over any sequence of games."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reincarnate.schedules import DistillCoefficient, learning_rate, linear

finite = st.floats(-1e4, 1e4, allow_nan=False)


def coefficient(**changes) -> DistillCoefficient:
    arguments = {
        "teacher_return": 100.0,
        "random_return": 0.0,
        "num_envs": 1,
        "window_games": 2,
        "stop_agent_step": 1000,
    }
    return DistillCoefficient(**(arguments | changes))


def play(m: DistillCoefficient, *returns: float, env_id: int = 0) -> DistillCoefficient:
    for value in returns:
        m.observe_game(env_id, value)
    return m


# ------------------------------------------------------------ linear, learning rate


def test_linear_by_hand() -> None:
    assert [linear(1.0, 0.1, 10, step) for step in (-3, 0, 5, 10, 99)] == [1.0, 1.0, 0.55, 0.1, 0.1]
    with pytest.raises(ValueError, match="duration must be greater than 0"):
        linear(1.0, 0.0, 0, 5)


@given(finite, finite, st.integers(1, 10**9), st.integers(-10, 10**9))
def test_linear_stays_between_its_ends(start: float, end: float, duration: int, step: int) -> None:
    slack = 1e-9 * (1 + abs(start) + abs(end))
    assert min(start, end) - slack <= linear(start, end, duration, step) <= max(start, end) + slack


@given(st.floats(0, 1), st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_learning_rate_mixes(m: float, high: float, low: float) -> None:
    assert learning_rate(m, high, low) == pytest.approx(low + m * (high - low))
    assert learning_rate(1.0, high, low) == high
    assert learning_rate(0.0, high, low) == low


# ------------------------------------------------------------ m by hand


def test_m_is_the_share_of_the_teachers_lead_that_is_left() -> None:
    m = play(coefficient(random_return=20.0), 20.0, 40.0)
    assert m.student_return == 30.0
    assert m.value(10) == pytest.approx(1 - (30 - 20) / (100 - 20))
    play(m, 60.0)  # the window slides: 40, 60
    assert m.value(20) == pytest.approx(1 - (50 - 20) / (100 - 20))


def test_m_is_1_until_the_window_is_full_and_every_environment_has_finished_a_game() -> None:
    m = coefficient(num_envs=2, window_games=2)
    assert m.student_return is None
    play(m, 50.0, env_id=0)
    assert m.student_return == 50.0
    assert m.value(1) == 1.0  # one game of two
    play(m, 50.0, 50.0, env_id=0)
    assert m.value(2) == 1.0  # environment 1 is still at its first, long game
    play(m, 50.0, env_id=1)
    assert m.value(3) == 0.5


@pytest.mark.parametrize(
    ("random_return", "teacher_return", "student_return", "expected"),
    [
        (-20.7, 20.0, -20.7, 1.0),  # Pong
        (-20.7, 20.0, -21.0, 1.0),  # below random play: capped, not 1.007
        (-20.7, 20.0, 0.0, 1 - 20.7 / 40.7),
        (-20.7, 20.0, 20.0, 0.0),
        (-20.7, 20.0, 21.0, 0.0),
        (-17_000.0, -9_000.0, -13_000.0, 0.5),  # Skiing: both negative
        (-500.0, -80.0, -500.0, 1.0),  # Acrobot
        (-500.0, -80.0, -70.0, 0.0),
        (-500.0, 0.0, -125.0, 0.25),  # a teacher at exactly 0: no division by it
    ],
)
def test_m_holds_for_negative_returns(random_return, teacher_return, student_return, expected) -> None:
    m = coefficient(random_return=random_return, teacher_return=teacher_return)
    assert play(m, student_return, student_return).value(1) == pytest.approx(expected)


def test_m_latches_after_two_windows_that_share_no_game() -> None:
    m = play(coefficient(window_games=3), 100.0, 100.0, 100.0)  # games 1-3
    assert m.value(10) == 0.0
    assert m.latched_at_agent_step is None
    play(m, 100.0, 100.0)  # windows 2-4 and 3-5 overlap 1-3
    assert m.value(20) == 0.0
    assert m.latched_at_agent_step is None
    play(m, 100.0)  # 4-6
    assert m.value(30) == 0.0
    assert m.latched_at_agent_step == 30
    assert play(m, 0.0, 0.0, 0.0, 0.0).value(40) == 0.0
    assert m.latched_at_agent_step == 30


def test_one_lucky_window_does_not_latch_but_a_later_one_completes_it() -> None:
    m = play(coefficient(), 100.0, 100.0)
    assert m.value(1) == 0.0
    play(m, 0.0, 0.0, 50.0, 50.0)
    assert m.value(2) == 0.5
    play(m, 150.0)  # window 50, 150 reaches it again, and shares no game with the first
    assert m.value(3) == 0.0
    assert m.latched_at_agent_step == 3


def test_windows_do_not_count_before_every_environment_has_finished_a_game() -> None:
    m = coefficient(num_envs=2)
    play(m, 100.0, 100.0, 100.0, 100.0, env_id=0)
    assert m.value(1) == 1.0
    play(m, 100.0, env_id=1)  # the first window that counts
    assert m.value(2) == 0.0
    assert m.latched_at_agent_step is None
    play(m, 100.0, 100.0, env_id=1)
    assert m.value(3) == 0.0
    assert m.latched_at_agent_step == 3


def test_m_is_0_from_t0_on() -> None:
    m = play(coefficient(stop_agent_step=500), 50.0, 50.0)
    assert m.value(499) == 0.5
    assert m.latched_at_agent_step is None
    assert m.value(504) == 0.0
    assert m.value(508) == 0.0
    assert m.latched_at_agent_step == 504
    assert coefficient(stop_agent_step=0).value(0) == 0.0


@pytest.mark.parametrize("teacher_return", [0.0, -5.0])
def test_a_teacher_no_better_than_random_play_is_left_linearly(teacher_return: float) -> None:
    m = coefficient(teacher_return=teacher_return, stop_agent_step=200)
    assert m.degenerate
    play(m, 500.0, 500.0, 500.0, 500.0)  # returns do not matter
    assert [m.value(step) for step in (0, 50, 100, 150)] == [1.0, 0.75, 0.5, 0.25]
    assert m.latched_at_agent_step is None
    assert m.value(200) == 0.0
    assert m.latched_at_agent_step == 200
    assert not coefficient().degenerate


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="returns must be finite"):
        coefficient(teacher_return=float("nan"))
    for wrong in ({"num_envs": 0}, {"window_games": 0}, {"stop_agent_step": -1}):
        with pytest.raises(ValueError, match="at least 1"):
            coefficient(**wrong)
    with pytest.raises(ValueError, match="environment 0 of 1 finished a game with inf"):
        coefficient().observe_game(0, float("inf"))
    with pytest.raises(ValueError, match="environment 1 of 1"):
        coefficient().observe_game(1, 5.0)


# ------------------------------------------------------------ properties

games = st.lists(st.tuples(st.integers(0, 2), st.floats(-200, 200)), max_size=40)


def reference_m(played: list[tuple[int, float]], teacher: float, random: float, K: int) -> float:
    """The definition, from the whole list of games."""
    if len(played) < K or {env for env, _ in played} != {0, 1, 2}:
        return 1.0
    mean = sum(value for _, value in played[-K:]) / K
    return min(max(1 - (mean - random) / (teacher - random), 0.0), 1.0)


@given(games, st.floats(-100, 100), st.floats(0.5, 100), st.integers(1, 6))
def test_m_is_its_definition_until_it_latches_and_0_ever_after(played, random, lead, K) -> None:
    teacher = random + lead
    m = DistillCoefficient(
        teacher_return=teacher, random_return=random, num_envs=3, window_games=K, stop_agent_step=10**6
    )
    zeros: list[int] = []
    for count, (env_id, value) in enumerate(played, start=1):
        m.observe_game(env_id, value)
        expected = reference_m(played[:count], teacher, random, K)
        if expected == 0.0:
            zeros.append(count)
        found = m.value(count * 10)
        assert 0.0 <= found <= 1.0
        disjoint = any(second - first >= K for first in zeros for second in zeros)
        assert (m.latched_at_agent_step is not None) == disjoint
        assert found == pytest.approx(0.0 if disjoint else expected)


@given(games, st.integers(0, 40), st.integers(1, 5))
def test_a_reloaded_coefficient_goes_on_as_if_nothing_had_happened(played, cut, K) -> None:
    def fresh() -> DistillCoefficient:
        return coefficient(num_envs=3, window_games=K, stop_agent_step=300)

    whole, first = fresh(), fresh()
    resumed = None
    for step, (env_id, value) in enumerate(played):
        if step == cut:
            resumed = fresh()
            resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for m in (whole, first if resumed is None else resumed):
            m.observe_game(env_id, value)
        last = first if resumed is None else resumed
        assert last.value(step * 10) == whole.value(step * 10)
        assert last.student_return == whole.student_return
        assert last.latched_at_agent_step == whole.latched_at_agent_step
        assert last.state_dict() == whole.state_dict()
