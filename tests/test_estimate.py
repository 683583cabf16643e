from reincarnate.estimate import Estimate, duration, estimate
from reincarnate.prepare import prepare

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


def test_phases_that_a_run_lacks_take_no_time_and_twice_the_work_takes_twice_as_long() -> None:
    scratch = small_config(None, "dqn", env__id="CartPole-v1")
    measured = estimate(scratch, prepare(scratch, quiet().say))
    assert (measured.collect_seconds, measured.offline_seconds) == (0.0, 0.0)
    assert measured.online_seconds > 0
    config = small_config(offline__updates=1_000_000, collect__agent_steps=100)
    measured = estimate(config, prepare(config, quiet().say))
    assert measured.offline_seconds > 100 * measured.collect_seconds > 0
