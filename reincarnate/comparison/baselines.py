"""What the returns of a comparison are held against: one G_random per environment, one G_T per teacher.

Runs that were made one by one may have measured them several times. A page has one number for each: every
measurement counts once, their games are pooled, and everything on the page is told on that scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reincarnate.atari_scores import human_normalized
from reincarnate.comparison.cells import Outcome, grouped
from reincarnate.types import Returns

K = TypeVar("K")


@dataclass(frozen=True)
class Scale:
    """Raw returns of one environment to scores."""

    zero: float
    one: float
    one_is: str  # a teacher's reference, or words
    of_teacher: bool = False
    raw_returns: bool = False  # there is neither a teacher nor a human score

    def score(self, raw: float) -> float:
        """0 at ``zero``, 1 at ``one``."""
        return (raw - self.zero) / (self.one - self.zero)

    def raw(self, score: float) -> float:
        """Inverse of :meth:`score`."""
        return self.zero + score * (self.one - self.zero)


@dataclass(frozen=True)
class Pooled:
    """The games of all distinct measurements of one return."""

    returns: Returns
    measurements: int


@dataclass(frozen=True)
class Baselines:
    """Every baseline of a comparison, and the scales that follow from them."""

    random: Mapping[str, Pooled]  # environment -> G_random
    teachers: Mapping[tuple[str, str], Pooled]  # (reference, environment) -> G_T

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Baselines:
        """Of all cells, whether they are finished or not: what they measured is sound."""
        taught = [outcome for outcome in outcomes if outcome.method.teacher]
        return cls(
            _pooled(grouped(outcomes, lambda outcome: outcome.env), "random"),
            _pooled(grouped(taught, lambda outcome: (str(outcome.method.teacher), outcome.env)), "teacher"),
        )

    def own_scale(self, outcome: Outcome) -> Scale | None:
        """1 is the cell's own teacher; None without one, or where it is no better than random play."""
        teacher = self.teachers.get((str(outcome.method.teacher), outcome.env))
        random = self.random.get(outcome.env)
        if outcome.method.teacher is None or teacher is None or random is None:
            return None
        one, zero = teacher.returns.mean, random.returns.mean
        return Scale(zero, one, outcome.method.teacher, of_teacher=True) if one > zero else None

    @property
    def scales(self) -> dict[str, Scale]:
        """One per environment in which anything was measured: 1 is its strongest teacher.

        Raw returns are a scale where there is one environment alone: with others' scores they have no mean.
        """
        found = {env: self._scale(env, random.returns.mean) for env, random in self.random.items()}
        return {env: scale for env, scale in found.items() if len(found) == 1 or not scale.raw_returns}

    def _scale(self, env: str, random: float) -> Scale:
        means = {ref: each.returns.mean for (ref, where), each in self.teachers.items() if where == env}
        best = max(means, key=means.__getitem__, default=None)
        if best is not None and means[best] > random:
            return Scale(random, means[best], best, of_teacher=True)
        zero, one = human_normalized(env, 0.0), human_normalized(env, 1.0)
        if zero is not None and one is not None:
            unit = 1 / (one - zero)
            return Scale(-zero * unit, (1 - zero) * unit, "a human tester")
        return Scale(0.0, 1.0, "a return of 1", raw_returns=True)


def _pooled(groups: Mapping[K, Sequence[Outcome]], name: str) -> dict[K, Pooled]:
    found: dict[K, Pooled] = {}
    for key, outcomes in groups.items():
        measured = {_measurement(each, r): r for each in outcomes if (r := each.returns(name)) is not None}
        games = [game for returns in measured.values() for game in returns.returns]
        if games:
            found[key] = Pooled(Returns.from_games(games), len(measured))
    return found


def _measurement(outcome: Outcome, returns: Returns) -> tuple[object, ...]:
    """Which one it is: runs of one ``teacher_seed`` share theirs, others may come to the same returns."""
    config = outcome.data.config if outcome.data else {}
    shared = config.get("teacher_seed")
    return returns.returns, shared is not None, outcome.seed if shared is None else shared
