"""Live progress on a terminal, plain lines anywhere else; on standard error, so that ``--json`` stays clean.

A terminal shows one line with a bar per open phase, and one with the numbers that matter. Anything else (a
file, a pipe, a CI log, TERM=dumb) gets a line when a phase starts, one every few seconds in which it got
on, and one when it ends: no ANSI, no control characters.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, TextIO, cast

from reincarnate.wording import clock_text, number_text, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

#: Rates are over the last so many seconds of work.
WINDOW_SECONDS = 30.0
#: Plain lines say that a phase is still going on, though it does not get on, so often.
STILL_SECONDS = 60.0
#: A terminal is redrawn at most this often.
REDRAW_SECONDS = 0.2
_BAR_WIDTHS = (36, 24, 16, 10)
_FIRST = ("return", "training_return", "evaluation", "G_T", "G_random", "m")


class Progress:
    """Shows what a run is doing.

    ``stream``: standard error unless given. ``every_seconds``: between two plain lines of one phase.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        shown = sys.stderr if stream is None else stream
        target = cast(TextIO, _Lasting(shown or _Nowhere()))
        self._display: _Display = (
            _Terminal(target, clock) if _is_terminal(target) else _Lines(target, every_seconds)
        )
        self._open: list[Phase] = []

    @contextmanager
    def phase(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Phase]:
        """A piece of work of ``total`` units (None: unknown), of which ``done`` were done before a resume.

        Phases may be nested; the time of an inner one does not count towards the outer one's rate.
        """
        if self._open:
            self._open[-1].pause()
        phase = Phase(name, total, unit, done, self._clock, self._display.update)
        self._open.append(phase)
        self._display.start(phase)
        ended = False
        try:
            yield phase
            ended = True
        finally:
            phase.pause()
            self._open.remove(phase)
            self._display.end(phase, ended)
            if self._open:
                self._open[-1].go_on()

    def say(self, line: str) -> None:
        """Print a line, above the live display if there is one; control characters are left out."""
        self._display.say(printable(line))


class Phase:
    """One piece of work that is going on; :meth:`Progress.phase` makes it."""

    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        done: int,
        clock: Callable[[], float],
        changed: Callable[[Phase, float], None],
    ) -> None:
        self.name, self.total, self.unit = " ".join(printable(name).split()), total, unit
        self.first, self.done = done, done
        self.numbers: dict[str, SupportsFloat | None] = {}
        self._clock, self._changed = clock, changed
        self._started = clock()
        self._left_out = 0.0
        self._paused: float | None = None
        self._samples: deque[tuple[float, int]] = deque([(0.0, done)])
        self._next = 0.0

    def found(self, done: int) -> None:
        """So many units turned out to be there already: rates count from here."""
        self.first, self.done = done, done
        self._started, self._left_out = self._clock(), 0.0
        self._samples = deque([(0.0, done)])

    def update(self, done: int, **numbers: SupportsFloat | None) -> None:
        """Work is at ``done`` units; ``numbers`` are shown until replaced (None takes one away).

        Cheap enough for every vector step: a number is only turned into a float when it is drawn.
        """
        self.done = done
        self.numbers.update(numbers)
        now = self._clock()
        if now >= self._next:
            self._next = now + REDRAW_SECONDS
            self._sample()
            self._changed(self, now)

    @property
    def seconds(self) -> float:
        """Seconds of work so far, inner phases left out."""
        now = self._clock() if self._paused is None else self._paused
        return max(0.0, now - self._started - self._left_out)

    @property
    def rate(self) -> float | None:
        """Units per second over the last :data:`WINDOW_SECONDS`; None before there is anything to measure."""
        then, done = self._samples[0]
        elapsed = self.seconds - then
        return (self.done - done) / elapsed if elapsed > 0 and self.done > done else None

    @property
    def mean_rate(self) -> float | None:
        """Units per second since the phase was opened here; None for no work or no time."""
        work = self.done - self.first
        return work / self.seconds if work > 0 and self.seconds > 0 else None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until ``total`` at the present rate; None if that cannot be said."""
        rate = self.rate
        return None if self.total is None or not rate else max(0, self.total - self.done) / rate

    def pause(self) -> None:
        """The clock stands: an inner phase begins, or this one ends."""
        self._paused = self._clock()

    def go_on(self) -> None:
        """The clock runs again."""
        if self._paused is not None:
            self._left_out += self._clock() - self._paused
            self._paused = None

    def _sample(self) -> None:
        now = self.seconds
        self._samples.append((now, self.done))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()


class _Display(Protocol):
    def start(self, phase: Phase) -> None: ...
    def update(self, phase: Phase, now: float) -> None: ...
    def end(self, phase: Phase, ended: bool) -> None: ...
    def say(self, line: str) -> None: ...


# ---------------------------------------------------------------- plain lines


class _Lines:
    """For files, pipes and logs."""

    def __init__(self, stream: TextIO, every_seconds: float) -> None:
        self._stream, self._every = stream, every_seconds
        self._due: dict[Phase, float] = {}
        self._said: dict[Phase, tuple[float, int]] = {}  # at its last line: seconds of work, and units done

    def start(self, phase: Phase) -> None:
        resumed = f" (from {phase.first:,})" if phase.first else ""
        amount = "" if phase.total is None else f"{phase.total:,} "
        self.say(f"{phase.name}: {amount}{phase.unit}{resumed}")

    def update(self, phase: Phase, now: float) -> None:
        due = self._due.setdefault(phase, now + self._every)
        if now < due:
            return
        self._due[phase] = now + self._every
        seconds, (seconds_then, done_then) = phase.seconds, self._said.get(phase, (0.0, phase.first))
        stands = phase.done == done_then
        if stands and seconds - seconds_then < STILL_SECONDS:
            return  # the same line again would say nothing
        self._said[phase] = seconds, phase.done
        still = (f"still after {clock_text(math.ceil(seconds))}",) if stands else ()
        self.say(", ".join((f"{phase.name}: {counts(phase)}", *still, *speed(phase), *numbers(phase))))

    def end(self, phase: Phase, ended: bool) -> None:
        self._due.pop(phase, None)
        self._said.pop(phase, None)
        self.say(", ".join((*summary(phase, ended), *numbers(phase))))

    def say(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


# ---------------------------------------------------------------- terminal


class _Terminal:
    """For people: rich redraws the open phases in place; what is finished stays above as one line."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        from rich.console import Console

        self._console: Console = Console(file=stream, force_terminal=True, highlight=False, soft_wrap=False)
        self._live: Live | None = None
        self._open: list[Phase] = []

    def start(self, phase: Phase) -> None:
        from rich.live import Live

        self._open.append(phase)
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,  # no thread: update() redraws
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=True,  # warnings stay above the display
                get_renderable=self._draw,
            )
            self._live.start()
        self._live.refresh()

    def update(self, phase: Phase, now: float) -> None:
        if self._live is not None:
            self._live.refresh()

    def end(self, phase: Phase, ended: bool) -> None:
        self._open.remove(phase)
        if not self._open and self._live is not None:
            self._live.stop()
            self._live = None
        for line in finished_text(phase, ended, self._console.width):
            self._console.print(line)
        if self._live is not None:
            self._live.refresh()

    def say(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line))

    def _draw(self) -> Text:
        from rich.text import Text

        width, ascii_only = self._console.width, self._console.options.ascii_only
        lines = [line for phase in self._open for line in phase_text(phase, width, ascii_only)]
        return Text("\n").join(lines)


def phase_text(phase: Phase, width: int, ascii_only: bool = False) -> list[Text]:
    """An open phase as lines of at most ``width`` columns: what does not fit beside the bar goes below."""
    from rich.text import Text

    head = [(part, "default") for part in _aligned_counts(phase)]
    head += [(part, "dim") for part in speed(phase)]
    used = len(phase.name) + 2 + sum(len(part) + 2 for part, _ in head) - 2
    first = Text(phase.name, style="bold cyan")
    room = width - 1 - used
    bar = next((size for size in _BAR_WIDTHS if size + 2 <= room), 0) if phase.total else 0
    if bar:
        first.append("  ").append_text(_bar(phase, bar, ascii_only))
    lines = _flow(first, head, width - 1)
    details = _flow(Text(" "), [(number, "default") for number in numbers(phase)], width - 1)
    return lines + [line for line in details if line.plain.strip()]


def finished_text(phase: Phase, ended: bool, width: int) -> list[Text]:
    """What stays on the screen of a phase, as lines of at most ``width`` columns."""
    from rich.text import Text

    head, *rate = summary(phase, ended)
    first = Text(head, style="green" if ended else "yellow")
    parts = [(part, "dim") for part in rate] + [(number, "default") for number in numbers(phase)]
    return _flow(first, parts, width - 1)


def _bar(phase: Phase, size: int, ascii_only: bool) -> Text:
    from rich.text import Text

    fraction = min(1.0, phase.done / phase.total) if phase.total else 0.0
    full = round(fraction * size)
    mark, rest = ("#", "-") if ascii_only else ("━", "─")
    return Text(mark * full, style="cyan").append(rest * (size - full), style="dim")


def _flow(first: Text, parts: list[tuple[str, str]], width: int) -> list[Text]:
    """Append parts two columns apart; a part that would pass ``width`` opens an indented line."""
    from rich.text import Text

    lines = [first]
    for part, style in parts:
        if lines[-1].cell_len + 2 + len(part) > width and lines[-1].plain.strip():
            lines.append(Text(" "))
        gap = "  " if lines[-1].plain.strip() else " "
        lines[-1].append(gap).append(part, style=style)
    return lines


# ---------------------------------------------------------------- words


def counts(phase: Phase) -> str:
    """E.g. ``1,250/2,500 updates (50%)``."""
    if phase.total is None:
        return f"{phase.done:,} {phase.unit}"
    return f"{phase.done:,}/{phase.total:,} {phase.unit} ({_percent(phase)}%)"


def _aligned_counts(phase: Phase) -> tuple[str, ...]:
    """The same in two parts that keep their width from the first to the last unit."""
    if phase.total is None:
        return (counts(phase),)
    total = f"{phase.total:,}"
    return f"{phase.done:,}".rjust(len(total)) + f"/{total} {phase.unit}", f"{_percent(phase):3d}%"


def _percent(phase: Phase) -> int:
    return 100 * phase.done // phase.total if phase.total else 100


def speed(phase: Phase) -> tuple[str, ...]:
    """E.g. ``20.4 updates/s`` and ``ETA 1:01``."""
    rate, eta = phase.rate, phase.eta_seconds
    if rate is None:
        return ()
    shown = f"{number_text(rate)} {phase.unit}/s"
    return (shown,) if eta is None else (shown, f"ETA {clock_text(math.ceil(eta))}")


def summary(phase: Phase, ended: bool) -> list[str]:
    """E.g. ``offline: 2,500 updates in 2:03``, ``20.3 updates/s``; work before a resume is not counted."""
    work, rate = phase.done - phase.first, phase.mean_rate
    if ended and phase.first and not work:
        return [f"{phase.name}: {phase.first:,} {phase.unit} found, nothing left to do"]
    stopped = "" if ended else f"stopped at {counts(phase)}, "
    head = f"{phase.name}: {stopped}{work:,} {phase.unit} in {clock_text(phase.seconds)}"
    return [head] if rate is None else [head, f"{number_text(rate)} {phase.unit}/s"]


def numbers(phase: Phase) -> list[str]:
    """E.g. ``return 42.1``, ``G_T 69.8``, ``td loss 0.012``; what matters most comes first."""
    shown = {name: value for name, value in phase.numbers.items() if value is not None}
    order = [name for name in _FIRST if name in shown] + [name for name in shown if name not in _FIRST]
    return [f"{_label(name)} {number_text(float(shown[name]))}" for name in order]


def _label(name: str) -> str:
    return "KL" if name == "kl" else name if name.startswith("G_") else name.replace("_", " ")


class _Lasting:
    """A stream whose reader may go away (a closed pipe or terminal, a full disk): the run goes on."""

    def __init__(self, stream: TextIO | io.TextIOBase) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Nowhere(io.TextIOBase):
    """Where there is no standard error at all (``2>&-``)."""

    def write(self, text: str) -> int:
        return len(text)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except ValueError:  # a closed stream
        return False
