"""``curves.json``: the data behind a run's pictures, bounded in size however long the run is.

Evaluations are kept whole. What grows with the length of a run (training games, m, losses) is thinned:
every point is the mean of equally many neighbours, and once there are too many points they are merged in
pairs. A training game's point also keeps the lowest and highest return it stands for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.types import Returns

FORMAT = 1
#: Points that one thinned series may hold.
MAX_POINTS = 2_000
PHASES = ("offline", "online")


@dataclass(frozen=True)
class Point:
    """Neighbours of a series, merged: ``step`` is the last one's, ``count`` how many they were."""

    step: int
    values: tuple[float | None, ...]  # None where nothing was measured
    count: int = 1


def _mean(a: float, count_a: int, b: float, count_b: int) -> float:
    return (a * count_a + b * count_b) / (count_a + count_b)


def _lowest(a: float, count_a: int, b: float, count_b: int) -> float:
    return min(a, b)


def _highest(a: float, count_a: int, b: float, count_b: int) -> float:
    return max(a, b)


Merge = Callable[[float, int, float, int], float]


class Series:
    """Points in order of their step; ``merges`` names the values and how two of them become one.

    All points but the newest stand for equally many additions (a power of two), so the resolution is the
    same from the first to the last step and does not depend on when the series was saved and loaded.
    """

    def __init__(self, step_name: str, merges: Mapping[str, Merge], max_points: int = MAX_POINTS) -> None:
        if max_points < 2:
            raise ValueError(f"a series needs room for two points, got max_points={max_points}")
        self.points: list[Point] = []
        self._step_name, self._merges, self._max_points = step_name, dict(merges), max_points

    def add(self, step: int, *values: float | None) -> None:
        """One measurement; ``values`` in the order of ``merges``; what is not finite counts as missing."""
        point = Point(int(step), tuple(_finite(value) for value in values))
        if self.points and self.points[-1].count < self.points[0].count:
            self.points[-1] = self._merged(self.points[-1], point)
            return
        self.points.append(point)
        if len(self.points) > self._max_points:
            self._halve()

    @property
    def names(self) -> list[str]:
        """Of the values, in their order."""
        return list(self._merges)

    def widen(self, name: str, merge: Merge) -> None:
        """One value more in every point, missing so far."""
        self._merges[name] = merge
        self.points = [dataclasses.replace(point, values=(*point.values, None)) for point in self.points]

    def value(self, point: Point, name: str) -> float | None:
        """Of a point of this series; None where nothing was measured under that name."""
        return point.values[self.names.index(name)] if name in self._merges else None

    def to_list(self) -> list[dict[str, Any]]:
        """JSON objects: the step, each value under its name, ``count``."""
        return [
            {self._step_name: point.step, **dict(zip(self._merges, point.values, strict=True))}
            | {"count": point.count}
            for point in self.points
        ]

    def extend(self, rows: list[dict[str, Any]]) -> None:
        """Read back what :meth:`to_list` wrote."""
        for row in rows:
            values = tuple(row[name] for name in self._merges)
            self.points.append(Point(row[self._step_name], values, row["count"]))

    def _halve(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=False)
        odd = self.points[-1:] if len(self.points) % 2 else []
        self.points = [self._merged(first, second) for first, second in pairs] + odd

    def _merged(self, a: Point, b: Point) -> Point:
        values = [
            y if x is None else x if y is None else merge(x, a.count, y, b.count)
            for merge, x, y in zip(self._merges.values(), a.values, b.values, strict=True)
        ]
        return Point(b.step, tuple(values), a.count + b.count)


@dataclass(frozen=True)
class Evaluation:
    """The student's return at one moment."""

    phase: str  # "offline" or "online"
    updates: int  # of that phase
    agent_steps: int  # of the online phase; 0 offline
    act: str  # acting rule, e.g. "epsilon=0.01"
    returns: Returns
    seconds: float | None = None  # of training in that phase, without evaluations; None in older files

    def to_dict(self) -> dict[str, Any]:
        """The object of ``curves.json``."""
        head = {"phase": self.phase, "updates": self.updates, "agent_steps": self.agent_steps}
        return head | {"seconds": self.seconds, "act": self.act, "return": self.returns.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        """Inverse of :meth:`to_dict`."""
        returns = Returns.from_dict(values["return"])
        return cls(
            values["phase"],
            values["updates"],
            values["agent_steps"],
            values["act"],
            returns,
            values.get("seconds"),
        )


def _losses() -> dict[str, Series]:
    merges = {"td_loss": _mean, "distill_loss": _mean}
    return {phase: Series("step", merges) for phase in PHASES}


def _widen(series: Series, names: Iterable[str]) -> None:
    """By the losses that a learner has beyond those that all have."""
    for name in names:
        if name.endswith("_loss") and name not in series.names:
            series.widen(name, _mean)


@dataclass
class Curves:
    """Everything that is drawn; grows while the run goes on."""

    teacher: Returns | None = None
    random: Returns | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    #: agent_step -> raw return of a training game
    games: Series = field(
        default_factory=lambda: Series("agent_step", {"return": _mean, "low": _lowest, "high": _highest})
    )
    #: agent_step -> m and G_student (None until it is known)
    coefficient: Series = field(
        default_factory=lambda: Series("agent_step", {"m": _mean, "g_student": _mean})
    )
    #: by phase: step (offline: updates; online: agent steps) -> losses
    losses: dict[str, Series] = field(default_factory=_losses)

    def add_evaluation(
        self,
        phase: str,
        updates: int,
        agent_steps: int,
        act: str,
        returns: Returns,
        seconds: float | None = None,
    ) -> None:
        """The student was evaluated, ``seconds`` of training into the phase; ``agent_steps`` is 0 offline."""
        self.evaluations.append(Evaluation(phase, updates, agent_steps, act, returns, seconds))

    def add_game(self, agent_step: int, raw_return: float) -> None:
        """A training game of the online phase ended."""
        self.games.add(agent_step, raw_return, raw_return, raw_return)

    def add_coefficient(self, agent_step: int, m: float, g_student: float | None) -> None:
        """The distillation coefficient and the window mean it came from."""
        self.coefficient.add(agent_step, m, g_student)

    def add_losses(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Every ``..._loss`` of a learner; ``step`` in updates offline, agent steps online."""
        series = self.losses[phase]
        _widen(series, metrics)
        series.add(step, *(metrics.get(name) for name in series.names))

    def last_return(self, phase: str) -> Returns | None:
        """The last evaluation of a phase; None if there was none."""
        found = [evaluation.returns for evaluation in self.evaluations if evaluation.phase == phase]
        return found[-1] if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        losses = [{"phase": phase, **row} for phase in PHASES for row in self.losses[phase].to_list()]
        return {
            "format": FORMAT,
            "teacher": self.teacher.to_dict() if self.teacher else None,
            "random": self.random.to_dict() if self.random else None,
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "games": self.games.to_list(),
            "coefficient": self.coefficient.to_list(),
            "losses": losses,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Curves:
        """Inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: not what :meth:`to_dict` wrote.
        """
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, known is {FORMAT}")
        curves = cls(
            teacher=Returns.from_dict(values["teacher"]) if values["teacher"] else None,
            random=Returns.from_dict(values["random"]) if values["random"] else None,
            evaluations=[Evaluation.from_dict(row) for row in values["evaluations"]],
        )
        curves.games.extend(values["games"])
        curves.coefficient.extend(values["coefficient"])
        for phase, series in curves.losses.items():
            rows = [row for row in values["losses"] if row["phase"] == phase]
            _widen(series, rows[0] if rows else ())
            series.extend(rows)
        return curves

    def save(self, path: Path) -> None:
        """Write ``curves.json``, atomically."""
        files.write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> Curves:
        """Read ``curves.json``.

        Raises:
            UserError: missing, damaged, or of another version.
        """
        values = files.read_json(path)
        try:
            return cls.from_dict(values)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} does not hold the curves of a run ({error})") from None


def moving_mean(points: Sequence[Point], window: int) -> list[float | None]:
    """At each point the mean of the first value over the newest points that hold ``window`` additions.

    Where there are fewer than ``window`` so far, over all there are; None where nothing was measured.
    """
    means: list[float | None] = []
    first, total, count, held = 0, 0.0, 0, 0  # count: with a value; held: all additions in the window
    for point in points:
        held += point.count
        if point.values[0] is not None:
            total, count = total + point.values[0] * point.count, count + point.count
        while held - points[first].count >= window:
            oldest = points[first]
            held, first = held - oldest.count, first + 1
            if oldest.values[0] is not None:
                total, count = total - oldest.values[0] * oldest.count, count - oldest.count
        means.append(total / count if count else None)
    return means


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
