"""A phase's speed and its bound's, measured in turns: a machine whose speed changes slows both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from reincarnate.device import synchronize

#: How often phase and bound take turns.
TURNS = 5
#: Interruptions of a phase that are not counted: caches fill, and CUDA captures the update.
WARM_UP_TICKS = 16


@dataclass(frozen=True)
class Rate:
    """Medians over the turns."""

    per_second: float
    bound: float
    fraction: float  # of the bound, turn by turn


class Meter:
    """Measures a phase from inside its loop, in turns with its bound.

    Args:
        seconds: of each turn of the phase.
        bound: measures the bound once.
        device: is waited for when a turn ends.
        clock: seconds.
    """

    def __init__(
        self,
        seconds: float,
        bound: Callable[[], float],
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds, self._bound, self._device, self._clock = seconds, bound, device, clock
        self._ticks = 0
        self._begin(0.0)
        self._turns: list[tuple[float, float]] = []

    def tick(self, done: float) -> bool:
        """Called by the phase with the work done so far; True when enough was measured."""
        self._ticks += 1
        if self._ticks <= WARM_UP_TICKS or self._paused:
            self._begin(done)
        elif self._clock() - self._began >= self._seconds:
            synchronize(self._device)
            rate = (done - self._done) / (self._clock() - self._began)
            self._turns.append((rate, self._bound()))
            self._begin(done)
        return len(self._turns) >= TURNS

    def go_on(self) -> None:
        """Leave out the time until the next tick."""
        self._paused = True

    @property
    def rate(self) -> Rate:
        """What was measured."""
        rates, bounds = zip(*self._turns, strict=True)
        fractions = [rate / bound for rate, bound in self._turns]
        return Rate(*(statistics.median(values) for values in (rates, bounds, fractions)))

    def _begin(self, done: float) -> None:
        self._done, self._began, self._paused = done, self._clock(), False


def per_second(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """How often ``work`` is done in a second, tried for so many; what runs on ``device`` is waited for."""
    work()
    synchronize(device)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        calls += 1
        if device.type == "cuda" and calls % 50 == 0:
            synchronize(device)  # or the host runs ahead and the clock sees only launches
    synchronize(device)
    return calls / (time.perf_counter() - began)
