"""A clock that the test turns, and a phase of work by it."""

from __future__ import annotations

from reincarnate.progress import Phase


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_phase(clock: Clock, done: int = 0, total: int | None = 2500, unit: str = "updates") -> Phase:
    return Phase("offline", total, unit, done, clock, lambda phase, now: None)


def work(phase: Phase, clock: Clock, units: int, seconds: float, steps: int = 10) -> None:
    """``units`` more, evenly over ``seconds``."""
    for _ in range(steps):
        clock.now += seconds / steps
        phase.update(phase.done + units // steps)
