"""The live display on a terminal; time is a clock that the test turns."""

from __future__ import annotations

import io
import re

import pytest

from reincarnate.progress import Progress, phase_text

from turned_clock import Clock, open_phase, work


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def screen(terminal: Terminal) -> list[str]:
    """What stands on the screen: a small emulation of the control sequences that rich uses."""
    rows, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", terminal.getvalue()):
        if token == "\n":
            row += 1
            rows += [""] if row == len(rows) else []
        elif re.fullmatch(r"\x1b\[\d+A", token):  # up
            row -= int(token[2:-1])
        elif token == "\x1b[2K":  # erase the line; rich does before it writes one again
            rows[row] = ""
        elif token != "\r" and not token.startswith("\x1b"):
            rows[row] += token
    return [line for line in rows if line]


def test_the_screen_shows_bar_rate_eta_and_numbers(clock: Clock, terminal: Terminal) -> None:
    progress = Progress(terminal, clock=clock)
    with progress.phase("offline", total=2000, unit="updates") as phase:
        for _ in range(10):
            clock.now += 1.0
            phase.update(phase.done + 100, **{"G_T": 69.8, "m": 1.0, "return": 42.0})
        progress.say("snapshot written")
        first, second, third = screen(terminal)
        assert first == "snapshot written"
        assert re.fullmatch(
            r"offline  ━{18}─{18}  1,000/2,000 updates   50%  100\.0 updates/s  ETA 10 s", second
        )
        assert third == "  return 42.0  G_T 69.8  m 1.00"
    assert screen(terminal) == [
        "snapshot written",
        "offline: 1,000 updates in 10 s  100.0 updates/s  return 42.0  G_T 69.8  m 1.00",
    ]


def test_nested_phases_stand_below_each_other(clock: Clock, terminal: Terminal) -> None:
    progress = Progress(terminal, clock=clock)
    with progress.phase("offline", total=2000, unit="updates") as outer:
        work(outer, clock, units=1000, seconds=10.0)
        with progress.phase("evaluate student", total=16, unit="games") as inner:
            clock.now += 1.0
            inner.update(4, **{"return": 40.0})
            lines = screen(terminal)
            assert [line.split("  ")[0] for line in lines] == ["offline", "evaluate student", ""]
        assert screen(terminal)[0].startswith("evaluate student: 4 games in 1.0 s")
        assert screen(terminal)[1].startswith("offline  ")
    assert len(screen(terminal)) == 2


def test_a_terminal_is_not_redrawn_at_every_update(clock: Clock, terminal: Terminal) -> None:
    progress = Progress(terminal, clock=clock)
    with progress.phase("offline", total=100_000, unit="updates") as phase:
        clock.now += 1.0
        phase.update(1)
        written = len(terminal.getvalue())
        for step in range(1000):
            phase.update(step)
        assert len(terminal.getvalue()) == written


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_lines_fit_the_terminal_and_keep_every_number(clock: Clock, width: int) -> None:
    phase = open_phase(clock, total=10_000_000, unit="agent steps")
    phase.update(0, **{"return": 42.0, "G_T": 69.8, "G_random": 1.3, "m": 1.0, "td_loss": 0.01})
    work(phase, clock, units=100_000, seconds=10.0)
    lines = [line.plain for line in phase_text(phase, width)]
    text = " ".join(lines)
    for part in (
        "offline",
        "100,000/10,000,000 agent steps",
        "ETA",
        "return 42.0",
        "G_T 69.8",
        "td loss 0.01",
    ):
        assert part in text
    if width >= 40:
        assert max(len(line) for line in lines) < width
    assert ("━" in text or "─" in text) == (width >= 100)


def test_ascii_terminals_get_an_ascii_bar(clock: Clock) -> None:
    phase = open_phase(clock)
    phase.update(1250)
    text = "\n".join(line.plain for line in phase_text(phase, 100, ascii_only=True))
    assert "#" * 12 + "-" * 12 in text
    assert text.isascii()


def test_no_color_writes_no_colours(clock: Clock, terminal: Terminal, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with Progress(terminal, clock=clock).phase("offline", total=10, unit="updates") as phase:
        work(phase, clock, units=10, seconds=10.0)
    colours = re.findall(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m", terminal.getvalue())
    assert colours == []


def test_a_dumb_terminal_gets_plain_lines(clock: Clock, terminal: Terminal, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress(terminal, clock=clock).phase("offline", total=10, unit="updates") as phase:
        work(phase, clock, units=10, seconds=10.0)
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().splitlines()[0] == "offline: 10 updates"


def test_markup_in_a_name_is_shown_as_it_is(clock: Clock, terminal: Terminal) -> None:
    progress = Progress(terminal, clock=clock)
    progress.say("[red]teacher[/red]")
    with progress.phase("[bold]x[/bold]", total=10, unit="games"):
        pass
    assert screen(terminal)[0] == "[red]teacher[/red]"
    assert screen(terminal)[1].startswith("[bold]x[/bold]: 0 games")
