"""Rates, and plain lines where there is no terminal; time is a clock that the test turns."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest

from reincarnate import progress as progress_module
from reincarnate.progress import Progress

from turned_clock import Clock, open_phase, work


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


# ---------------------------------------------------------------- rates


def test_rate_and_eta_by_hand(clock: Clock) -> None:
    phase = open_phase(clock)
    work(phase, clock, units=500, seconds=10.0)
    assert phase.rate == pytest.approx(50.0)
    assert phase.eta_seconds == pytest.approx(40.0)
    assert phase.seconds == pytest.approx(10.0)


def test_work_before_a_resume_is_not_counted(clock: Clock) -> None:
    phase = open_phase(clock, done=2000)
    work(phase, clock, units=100, seconds=10.0)
    assert phase.rate == pytest.approx(10.0)
    assert phase.mean_rate == pytest.approx(10.0)
    assert phase.eta_seconds == pytest.approx(40.0)


def test_work_that_turns_out_to_be_there_is_not_counted(clock: Clock) -> None:
    phase = open_phase(clock)
    clock.now += 5.0
    phase.found(400)
    work(phase, clock, units=100, seconds=10.0)
    assert (phase.first, phase.done) == (400, 500)
    assert phase.rate == pytest.approx(10.0)
    assert phase.mean_rate == pytest.approx(10.0)


def test_the_rate_forgets_what_is_older_than_the_window(clock: Clock) -> None:
    phase = open_phase(clock, total=100_000)
    work(phase, clock, units=1000, seconds=100.0, steps=100)
    work(phase, clock, units=2000, seconds=40.0, steps=40)
    assert phase.rate == pytest.approx(50.0)
    assert phase.mean_rate == pytest.approx(3000 / 140)


def test_nothing_done_has_no_rate(clock: Clock) -> None:
    phase = open_phase(clock)
    assert (phase.rate, phase.mean_rate, phase.eta_seconds) == (None, None, None)
    clock.now += 5
    phase.update(0)
    assert (phase.rate, phase.eta_seconds) == (None, None)


def test_unknown_totals_have_no_eta(clock: Clock) -> None:
    phase = open_phase(clock, total=None)
    work(phase, clock, units=10, seconds=1.0)
    assert phase.eta_seconds is None
    assert progress_module.counts(phase) == "10 updates"


def test_an_inner_phase_does_not_slow_the_outer_one(clock: Clock, log: io.StringIO) -> None:
    progress = Progress(log, clock=clock)
    with progress.phase("offline", total=1000, unit="updates") as outer:
        work(outer, clock, units=100, seconds=10.0)
        with progress.phase("evaluate", total=10, unit="games") as inner:
            clock.now += 30.0
            assert outer.rate == pytest.approx(10.0)  # also while the inner one is open
            with progress.phase("load", total=1, unit="files") as innermost:
                clock.now += 100.0
                innermost.update(1)
            inner.update(10)
        work(outer, clock, units=100, seconds=10.0)
        assert outer.rate == pytest.approx(10.0)
    assert outer.seconds == pytest.approx(20.0)
    assert inner.seconds == pytest.approx(30.0)


# ---------------------------------------------------------------- plain lines


def test_plain_lines_at_the_start_now_and_then_and_at_the_end(clock: Clock, log: io.StringIO) -> None:
    progress = Progress(log, every_seconds=5.0, clock=clock)
    with progress.phase("offline", total=2500, unit="updates", done=500) as phase:
        for _ in range(80):  # 20 seconds at 100 updates per second
            clock.now += 0.25
            phase.update(phase.done + 25, G_T=69.8, td_loss=0.0123, kl=1.5)
    lines = log.getvalue().splitlines()
    assert lines[0] == "offline: 2,500 updates (from 500)"
    middle = (
        "1,025/2,500 updates (41%), 100.0 updates/s, ETA 15 s, G_T 69.8, td loss 0.012, KL 1.50",
        "1,525/2,500 updates (61%), 100.0 updates/s, ETA 10 s, G_T 69.8, td loss 0.012, KL 1.50",
        "2,025/2,500 updates (81%), 100.0 updates/s, ETA 5 s, G_T 69.8, td loss 0.012, KL 1.50",
    )
    assert lines[1:-1] == [f"offline: {line}" for line in middle]
    assert lines[-1] == "offline: 2,000 updates in 20 s, 100.0 updates/s, G_T 69.8, td loss 0.012, KL 1.50"


def test_plain_lines_do_not_repeat_where_nothing_got_on(clock: Clock, log: io.StringIO) -> None:
    progress = Progress(log, every_seconds=5.0, clock=clock)
    with progress.phase("evaluate", total=8, unit="games") as phase:
        for second in range(1, 151):  # long games: the first ends after 130 s
            clock.now += 1.0
            phase.update(2 if second > 130 else 0)
    lines = log.getvalue().splitlines()
    assert lines[0] == "evaluate: 8 games"
    assert lines[1:3] == [f"evaluate: 0/8 games (0%), still after {time}" for time in ("1:01", "2:01")]
    assert [line.partition(",")[0] for line in lines[3:]] == [
        "evaluate: 2/8 games (25%)",
        "evaluate: 2 games in 2:30",
    ]


def test_plain_output_has_no_control_characters(clock: Clock, log: io.StringIO) -> None:
    progress = Progress(log, every_seconds=0.1, clock=clock)
    progress.say("teacher \x1b[31mred\x1b[0m \x07\u202e done\r")
    with progress.phase("collect \x1b]0;title\x07", total=10, unit="agent steps") as phase:
        for step in range(10):
            clock.now += 1.0
            phase.update(step + 1)
    text = log.getvalue()
    assert all(character == "\n" or character.isprintable() for character in text)
    assert text.startswith("teacher [31mred[0m  done\n")


def test_a_phase_that_is_broken_off_says_how_far_it_came(clock: Clock, log: io.StringIO) -> None:
    def interrupted() -> None:
        with Progress(log, clock=clock).phase("online", total=100, unit="agent steps") as phase:
            clock.now += 2.0
            phase.update(25)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    last = log.getvalue().splitlines()[-1]
    assert last == "online: stopped at 25/100 agent steps (25%), 25 agent steps in 2.0 s, 12.5 agent steps/s"


def test_say_keeps_lines_apart(log: io.StringIO) -> None:
    Progress(log).say("one\ntwo")
    assert log.getvalue() == "one\ntwo\n"


def test_a_number_that_became_none_disappears(clock: Clock) -> None:
    phase = open_phase(clock)
    phase.update(1, m=0.5, td_loss=2.0)
    phase.update(2, m=None)
    assert progress_module.numbers(phase) == ["td loss 2.00"]


def test_letters_that_the_stream_cannot_write_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Progress(stream).say("return 69.8 ± 25.7")
    assert raw.getvalue() == b"return 69.8 ? 25.7\n"


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().say("hello")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "hello\n")


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_outlives_the_reader_of_its_progress(clock: Clock, is_terminal: bool, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Gone()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    progress = Progress(stream, every_seconds=0.1, clock=clock)
    with progress.phase("offline", total=10, unit="updates") as phase:
        work(phase, clock, units=10, seconds=10.0)
    progress.say("still here")
    assert phase.done == 10


def test_a_program_without_standard_error_works_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it after 2>&-
    progress = Progress(clock=clock)
    progress.say("nobody hears this")
    with progress.phase("online", total=2, unit="agent steps") as phase:
        phase.update(2)
    assert phase.done == 2


# ---------------------------------------------------------------- cost


def test_update_is_cheap() -> None:
    progress = Progress(io.StringIO())
    with progress.phase("online", total=10_000_000, unit="agent steps") as phase:
        start = time.perf_counter()
        for step in range(20_000):
            phase.update(step, m=1.0, td_loss=0.5)
        assert (time.perf_counter() - start) / 20_000 < 50e-6  # seconds; about 1e-6 on a quiet machine


def test_numbers_are_read_only_when_they_are_drawn(clock: Clock) -> None:
    class OnTheDevice:
        def __float__(self) -> float:
            raise AssertionError("the host waited for the device")

    phase = open_phase(clock)
    for step in range(100):
        phase.update(step, td_loss=OnTheDevice())


def test_importing_progress_does_not_import_rich() -> None:
    code = "import sys, reincarnate.progress; sys.exit('rich' in sys.modules)"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
