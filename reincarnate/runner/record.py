"""What a run has come to so far: checkpoints keep it, and result.json tells of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reincarnate.phases import OfflineState, OnlineState
from reincarnate.replay import Replay
from reincarnate.schedules import DistillCoefficient
from reincarnate.teachers.collect import Collected


def _nothing() -> None:
    """Outside :meth:`Record.timed` no time is counted."""


@dataclass
class Record:
    """Of one rank; the returns, the curves and the student itself are in the run's ``Stage``."""

    finished: list[str] = field(default_factory=list)  # names of phases, in their order
    seconds: dict[str, float] = field(default_factory=dict)  # of the phases without counters of their own
    collected: dict[str, Any] | None = None  # about D_T
    offline: OfflineState = field(default_factory=OfflineState)
    online: OnlineState = field(default_factory=OnlineState)
    coefficient: DistillCoefficient | None = None  # m; None before the online phase, and without a teacher
    student_data: Replay | None = None  # D_S; of several ranks, this one's share
    all_student_data: dict[str, int] | None = None  # agent steps and bytes of all shares of several
    _count: Callable[[], None] = _nothing

    def tell_collected(self, collected: Collected) -> None:
        """Remember what D_T is, without holding it."""
        self.collected = {
            "agent_steps": collected.agent_steps,
            "bytes": collected.replay.nbytes,
            "reused": collected.reused,
            "folder": str(collected.folder.resolve()),
        }

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add to a phase's seconds, also when it is stopped and goes on later."""
        started, before = time.perf_counter(), self.seconds.get(phase, 0.0)
        self._count = lambda: self.seconds.update({phase: before + time.perf_counter() - started})
        try:
            yield
        finally:
            self.tick()
            self._count = _nothing

    def tick(self) -> None:
        """Count the time of the phase that is going on until now."""
        self._count()
