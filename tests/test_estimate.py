"""How long a run will take, and what is left of one that goes on."""

import dataclasses
from pathlib import Path

import pytest

from reincarnate import estimate as module
from reincarnate.estimate import Done, Estimate, duration, estimate
from reincarnate.prepare import prepare
from reincarnate.runner import Run

from small_runs import quiet, small_config


def test_durations_read_as_people_say_them() -> None:
    assert [duration(s) for s in (0.2, 40, 720, 12_600, 181_440)] == [
        "1 s",
        "40 s",
        "12 min",
        "3.5 h",
        "2.1 days",
    ]


def test_only_a_long_run_is_told_of_the_quick_preset() -> None:
    assert "quick" not in Estimate(1, 2, 3).text("default")
    assert Estimate(10, 40_000, 3_000).text("default").endswith("--preset quick takes minutes")
    assert (
        Estimate(10, 40_000, 0)
        .text("default")
        .startswith("about 11.1 h on this machine (collect 10 s, offline")
    )


def test_what_is_left_is_said_to_be_so_and_without_a_hint() -> None:
    left = Estimate(0, 40_000, 3_000).text(left=True)
    assert (
        left == "about 11.9 h left on this machine (offline 11.1 h, online 50 min; evaluations come on top)"
    )
    assert Estimate(0, 0, 0).text("default") == "about 1 s on this machine (evaluations come on top)"


def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a vector step, an action of each network and an update take a second."""
    monkeypatch.setattr(module, "_seconds", lambda work, parts, rounds=20: 1.0)


def test_only_what_is_left_is_estimated(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)
    config = (
        small_config()
    )  # 4 environments; 600 steps of D_T, 120 updates, 600 online steps, the teacher to 360
    parts = prepare(config, quiet().say)
    assert estimate(config, parts) == Estimate(150 * 2, 120, 150 * 2 + 90 + 125)
    done = Done(["evaluate", "collect"], updates=100)
    assert estimate(config, parts, done=done).offline_seconds == 20
    done = Done(["evaluate", "collect", "offline"], updates=120, agent_steps=400)
    assert estimate(config, parts, done=done) == Estimate(0, 0, 50 * 2 + 50)
    Run.start(small_config(online__agent_steps=0, offline__updates=0), tmp_path / "run", quiet()).execute()
    assert estimate(config, parts).collect_seconds == 0  # D_T is in the cache now
    given = dataclasses.replace(parts, teacher_data=tmp_path)
    assert estimate(small_config(collect__agent_steps=10**6), given).collect_seconds == 0


def test_phases_that_a_run_lacks_take_no_time_and_twice_the_work_takes_twice_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path))
    scratch = small_config(None, "dqn", env__id="CartPole-v1")
    measured = estimate(scratch, prepare(scratch, quiet().say))
    assert (measured.collect_seconds, measured.offline_seconds) == (0.0, 0.0)
    assert measured.online_seconds > 0
    config = small_config(offline__updates=1_000_000, collect__agent_steps=100)
    measured = estimate(config, prepare(config, quiet().say))
    assert measured.offline_seconds > 100 * measured.collect_seconds > 0
