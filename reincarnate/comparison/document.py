"""``compare.json``: the numbers of a comparison, and what they say.

Cells are compared on one scale per environment: 0 is random play, 1 is the strongest teacher of the
comparison there (without teachers: the published human score, or else the raw return). A run's own
``teacher_normalized`` is on the scale of its own teacher and does not tell which teacher to choose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reincarnate import stats
from reincarnate.atari_scores import human_normalized
from reincarnate.comparison.cells import (
    SHARES,
    Method,
    Outcome,
    described_teacher,
    distinct_names,
    first_reaching,
    moments,
    relative,
)
from reincarnate.comparison.references import Reference
from reincarnate.types import Returns

FORMAT = 1
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Scale:
    """Raw returns of one environment to scores."""

    zero: float
    one: float
    one_is: str  # a teacher's reference, or words
    of_teacher: bool = False

    def score(self, raw: float) -> float:
        """0 at ``zero``, 1 at ``one``."""
        return (raw - self.zero) / (self.one - self.zero)

    def raw(self, score: float) -> float:
        """Inverse of :meth:`score`."""
        return self.zero + score * (self.one - self.zero)


def build(outcomes: Sequence[Outcome], folder: Path, references: Sequence[Reference] = ()) -> dict[str, Any]:
    """The whole document; paths are relative to ``folder``."""
    scales = scales_of(outcomes)
    methods = by_method(outcomes)
    names = distinct_names(methods)
    summary = [_summary(method, names[method], cells, scales) for method, cells in methods.items()]
    pairs = _pairs(methods, scales, lambda method: names[method])
    students = _students(outcomes, scales)
    return {
        "format": FORMAT,
        "scales": {
            env: {"zero": scale.zero, "one": scale.one, "one_is": scale.one_is}
            for env, scale in scales.items()
        },
        "cells": [_cell(outcome, scales.get(outcome.env), folder) for outcome in outcomes],
        "teachers": _teachers(outcomes),
        "summary": summary,
        "pairs": pairs,
        "students": students,
        "references": [_reference(each, outcomes) for each in references],
        "verdict": verdict(outcomes, summary, pairs),
    }


def grouped(outcomes: Sequence[Outcome], key: Callable[[Outcome], K]) -> dict[K, list[Outcome]]:
    """Outcomes by a key, in the order in which the keys appear."""
    groups: dict[K, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return groups


def by_method(outcomes: Sequence[Outcome]) -> dict[Method, list[Outcome]]:
    """Outcomes of each teacher and student."""
    return grouped(outcomes, lambda outcome: outcome.method)


def scores_of(outcomes: Sequence[Outcome], scales: dict[str, Scale]) -> dict[str, list[float]]:
    """Environment -> scores of the finished cells; environments without any are left out."""
    scores: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.done and outcome.last is not None and outcome.env in scales:
            scores.setdefault(outcome.env, []).append(scales[outcome.env].score(outcome.last.mean))
    return scores


def pooled(outcomes: Sequence[Outcome], name: str) -> Returns | None:
    """A return of several cells, every measurement once (cells of one comparison share the teacher's)."""
    distinct = dict.fromkeys(r.returns for r in (each.returns(name) for each in outcomes) if r is not None)
    games = [game for measurement in distinct for game in measurement]
    return Returns.from_games(games) if games else None


# ---------------------------------------------------------------- scales


def scales_of(outcomes: Sequence[Outcome]) -> dict[str, Scale]:
    """One per environment in which anything was measured."""
    found = {env: _scale(env, cells) for env, cells in grouped(outcomes, lambda outcome: outcome.env).items()}
    return {env: scale for env, scale in found.items() if scale is not None}


def _scale(env: str, outcomes: Sequence[Outcome]) -> Scale | None:
    random = pooled(outcomes, "random")
    if random is None:
        return None
    best, name = None, ""
    for method, cells in by_method([outcome for outcome in outcomes if outcome.method.teacher]).items():
        teacher = pooled(cells, "teacher")
        if teacher is not None and teacher.mean > (random.mean if best is None else best):
            best, name = teacher.mean, str(method.teacher)
    if best is not None:
        return Scale(random.mean, best, name, of_teacher=True)
    zero, one = human_normalized(env, 0.0), human_normalized(env, 1.0)
    if zero is not None and one is not None:
        unit = 1 / (one - zero)
        return Scale(-zero * unit, (1 - zero) * unit, "a human tester")
    return Scale(0.0, 1.0, "a return of 1")


# ---------------------------------------------------------------- parts


def _cell(outcome: Outcome, scale: Scale | None, folder: Path) -> dict[str, Any]:
    offline, final, last = outcome.returns("offline"), outcome.returns("final"), outcome.last
    reached = _reached(outcome, scale)
    return {
        "teacher": outcome.method.teacher,
        "student": outcome.method.student,
        "env": outcome.env,
        "seed": outcome.seed,
        "status": outcome.status,
        "run": relative(outcome.run, folder),
        "offline": offline and offline.mean,
        "final": final and final.mean,
        "teacher_normalized": _own_normalized(outcome),
        "human_normalized": human_normalized(outcome.env, last.mean) if last else None,
        "score": scale.score(last.mean) if scale and last else None,
        "agent_steps_to": {str(share): point and point.agent_steps for share, point in reached.items()},
        "seconds_to": {str(share): point and point.seconds for share, point in reached.items()},
        "seconds": outcome.seconds,
        "error": outcome.error,
    }


def _own_normalized(outcome: Outcome) -> float | None:
    """On the scale of the cell's own teacher; None without one, or one no better than random play."""
    if outcome.data is None or outcome.method.teacher is None:
        return None
    normalized: dict[str, float | None] = outcome.data.result["student"]["teacher_normalized"]
    return normalized["final"] if outcome.returns("final") else normalized["offline"]


def _reached(outcome: Outcome, scale: Scale | None) -> dict[float, Any]:
    """Share -> first evaluation there: of the cell's own teacher; from scratch, of the strongest one."""
    teacher, random = outcome.returns("teacher"), outcome.returns("random")
    points = moments(outcome)
    if outcome.method.teacher and teacher and random:
        own = Scale(random.mean, teacher.mean, "") if teacher.mean > random.mean else None
    else:
        own = scale if scale and scale.of_teacher else None
    return {share: first_reaching(points, own.raw(share)) if own else None for share in SHARES}


def _teachers(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    known = [outcome for outcome in outcomes if outcome.method.teacher and outcome.data]
    return [
        _teacher(cells)
        for cells in grouped(known, lambda outcome: (outcome.method.teacher, outcome.env)).values()
        if pooled(cells, "teacher")
    ]


def _teacher(cells: Sequence[Outcome]) -> dict[str, Any]:
    returns, random = pooled(cells, "teacher"), pooled(cells, "random")
    buffers = [cell.data.result["buffers"]["teacher"]["agent_steps"] for cell in cells if cell.data]
    collect = [cell.data.result["phases"]["collect"]["seconds"] or 0.0 for cell in cells if cell.data]
    return described_teacher(cells) | {
        "ref": cells[0].method.teacher,
        "env": cells[0].env,
        "return": returns and returns.to_dict(),
        "random": random and random.to_dict(),
        "human_normalized": human_normalized(cells[0].env, returns.mean) if returns else None,
        "collected_agent_steps": max(buffers),
        "collect_seconds": sum(collect),
        "better_than_random": bool(returns and random and returns.mean > random.mean),
    }


def _reference(reference: Reference, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    runs = [outcome for outcome in outcomes if outcome.env == reference.env]
    return reference.to_dict(max((point.agent_steps for run in runs for point in moments(run)), default=0))


def _summary(method: Method, name: str, cells: Sequence[Outcome], scales: dict[str, Scale]) -> dict[str, Any]:
    return {
        "name": name,
        "teacher": method.teacher,
        "student": method.student,
        "envs": sorted({cell.env for cell in cells}),
    } | _aggregate(cells, scales)


def _aggregate(cells: Sequence[Outcome], scales: dict[str, Scale]) -> dict[str, Any]:
    scores = scores_of(cells, scales)
    if not scores:
        return {"iqm": None, "ci95": None, "n": 0}
    estimate = stats.aggregate(scores)
    return {"iqm": estimate.value, "ci95": estimate.ci95 and list(estimate.ci95), "n": estimate.n}


def _students(outcomes: Sequence[Outcome], scales: dict[str, Scale]) -> dict[str, Any]:
    """Each student over all its teachers and environments, where that says more than the summary."""
    groups = grouped(outcomes, lambda outcome: outcome.method.student)
    return {
        "summary": [{"student": name} | _aggregate(cells, scales) for name, cells in groups.items()],
        "pairs": _pairs(groups, scales, lambda name: name),
    }


def _pairs(
    groups: dict[K, list[Outcome]], scales: dict[str, Scale], name_of: Callable[[K], str]
) -> list[dict[str, Any]]:
    """Every two that have finished cells in a common environment."""
    scores = {key: scores_of(cells, scales) for key, cells in groups.items()}
    found = []
    for a, b in itertools.combinations(scores, 2):
        common = [env for env in scores[a] if env in scores[b]]
        if common:
            found.append({"a": name_of(a), "b": name_of(b)} | _compared(scores[a], scores[b], common))
    return found


def _compared(
    ours: dict[str, list[float]], theirs: dict[str, list[float]], common: Sequence[str]
) -> dict[str, Any]:
    improvement = stats.probability_of_improvement(ours, theirs)
    runs = min(sum(len(side[env]) for env in common) for side in (ours, theirs))
    more = stats.more_runs_needed(improvement, runs)
    return {
        "probability_of_improvement": improvement.value,
        "ci95": improvement.ci95 and list(improvement.ci95),
        "more_seeds_needed": None if more is None else math.ceil(more / len(common)),
    }


# ---------------------------------------------------------------- words


def verdict(
    outcomes: Sequence[Outcome], summary: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]]
) -> list[str]:
    """Sentences: which is best, and which differences are within the noise."""
    measured = sorted((row for row in summary if row["n"]), key=lambda row: -row["iqm"])
    missing = [outcome for outcome in outcomes if not outcome.done]
    said = []
    if not measured:
        said.append("No cell is finished yet.")
    elif len(measured) > 1:
        best = measured[0]
        mean = interval(best["iqm"], best["ci95"])
        said.append(f"Highest: {best['name']}, {mean} over {_runs(best['n'])}.")
        said += [sentence(best["name"], row["name"], pairs) for row in measured[1:]]
    if missing:
        said.append(f"{len(missing)} of {len(outcomes)} cells are not finished and are not counted.")
    return [line for line in said if line]


def sentence(best: str, other: str, pairs: Sequence[dict[str, Any]]) -> str:
    """Whether the best is told apart from another; empty where they share no environment."""
    pair = next((pair for pair in pairs if {pair["a"], pair["b"]} == {best, other}), None)
    if pair is None:
        return ""
    value, ci95 = pair["probability_of_improvement"], pair["ci95"]
    if pair["a"] != best:
        value, ci95 = 1 - value, ci95 and [1 - ci95[1], 1 - ci95[0]]
    wins, more = interval(value, ci95), pair["more_seeds_needed"]
    if more == 0:
        verb = f"It beats {other}" if value > 0.5 else f"Yet {other} beats it run by run"
        return f"{verb}: a run of it wins with probability {wins}."
    if more is None:
        hope = "no number of seeds would decide it if they stay equal"
    else:
        hope = f"if it stays so, about {more} more {'seed' if more == 1 else 'seeds'} of each would decide it"
    if ci95 and ci95[0] > 0.5:
        said = f"Its lead over {other} is clear in these runs, but they are too few to decide it"
    else:
        said = f"Its difference from {other} is within the noise"
    return f"{said}: a run of it wins with probability {wins}; {hope}."


def interval(value: float, ci95: Sequence[float] | None) -> str:
    """E.g. ``0.93 [0.81, 1.02]``."""
    return f"{value:.2f}" + (f" [{ci95[0]:.2f}, {ci95[1]:.2f}]" if ci95 else "")


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
