"""``compare.json``: the numbers of a comparison, and what they say.

Cells are compared on one scale per environment: 0 is random play, 1 is the strongest teacher of the
comparison there (without teachers: the published human score, or else the raw return). A run's own
``teacher_normalized`` is on the scale of its own teacher and does not tell which teacher to choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reincarnate import stats
from reincarnate.atari_scores import human_normalized
from reincarnate.comparison.baselines import Baselines, Pooled, Scale
from reincarnate.comparison.cells import (
    SHARES,
    K,
    Method,
    Moment,
    Outcome,
    described_teacher,
    distinct_names,
    first_reaching,
    grouped,
    moments,
    relative,
)
from reincarnate.comparison.references import Reference
from reincarnate.comparison.variants import other_rules

FORMAT = 1


def build(outcomes: Sequence[Outcome], folder: Path, references: Sequence[Reference] = ()) -> dict[str, Any]:
    """The whole document; paths are relative to ``folder``."""
    baselines = Baselines.of(outcomes)
    scales = baselines.scales
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
        "cells": [_cell(outcome, baselines, folder) for outcome in outcomes],
        "teachers": _teachers(outcomes, baselines),
        "summary": summary,
        "pairs": pairs,
        "students": students,
        "references": [_reference(each, outcomes) for each in references],
        "verdict": verdict(outcomes, summary, pairs, scales),
    }


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


# ---------------------------------------------------------------- parts


def _cell(outcome: Outcome, baselines: Baselines, folder: Path) -> dict[str, Any]:
    offline, final, last = outcome.returns("offline"), outcome.returns("final"), outcome.last
    scale, own = baselines.scales.get(outcome.env), baselines.own_scale(outcome)
    reached = _reached(outcome, scale if outcome.method.teacher is None else own)
    return {
        "teacher": outcome.method.teacher,
        "student": outcome.method.student,
        "variant": outcome.method.variant,
        "env": outcome.env,
        "seed": outcome.seed,
        "status": outcome.status,
        "run": relative(outcome.run, folder),
        "offline": offline and offline.mean,
        "final": final and final.mean,
        "teacher_normalized": own.score(last.mean) if own and last else None,
        "human_normalized": human_normalized(outcome.env, last.mean) if last else None,
        "score": scale.score(last.mean) if scale and last else None,
        "agent_steps_to": {str(share): point and point.agent_steps for share, point in reached.items()},
        "seconds_to": {str(share): point and point.seconds for share, point in reached.items()},
        "seconds": outcome.seconds,
        "error": outcome.error,
    }


def _reached(outcome: Outcome, scale: Scale | None) -> dict[float, Moment | None]:
    """Share -> first evaluation there: of the cell's own teacher; from scratch, of the strongest one."""
    points = moments(outcome)
    return {
        share: first_reaching(points, scale.raw(share)) if scale and scale.of_teacher else None
        for share in SHARES
    }


def _teachers(outcomes: Sequence[Outcome], baselines: Baselines) -> list[dict[str, Any]]:
    known = grouped([each for each in outcomes if each.data], lambda each: (each.method.teacher, each.env))
    return [
        _teacher(known[ref, env], pooled, baselines.random.get(env))
        for (ref, env), pooled in baselines.teachers.items()
    ]


def _teacher(cells: Sequence[Outcome], pooled: Pooled, random: Pooled | None) -> dict[str, Any]:
    buffers = {cell.data.result["buffers"]["teacher"]["agent_steps"] for cell in cells if cell.data}
    collect = [cell.data.result["phases"]["collect"]["seconds"] or 0.0 for cell in cells if cell.data]
    returns = pooled.returns
    return described_teacher(cells) | {
        "ref": cells[0].method.teacher,
        "env": cells[0].env,
        "return": returns.to_dict(),
        "measurements": pooled.measurements,
        "random": random and random.returns.to_dict(),
        "human_normalized": human_normalized(cells[0].env, returns.mean),
        "collected_agent_steps": max(buffers),
        "collected_agent_steps_of_runs": sorted(buffers - {0}),
        "collect_seconds": sum(collect),
        "better_than_random": bool(random and returns.mean > random.returns.mean),
    }


def _reference(reference: Reference, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    runs = [outcome for outcome in outcomes if outcome.env == reference.env]
    return reference.to_dict(max((point.agent_steps for run in runs for point in moments(run)), default=0))


def _summary(method: Method, name: str, cells: Sequence[Outcome], scales: dict[str, Scale]) -> dict[str, Any]:
    return {
        "name": name,
        "teacher": method.teacher,
        "student": method.student,
        "variant": method.variant,
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
    groups = grouped(outcomes, lambda outcome: replace(outcome.method, teacher=None))
    return {
        "summary": [
            {"student": each.student, "variant": each.variant} | _aggregate(cells, scales)
            for each, cells in groups.items()
        ],
        "pairs": _pairs(groups, scales, lambda each: each.learner),
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
    runs = [(len(ours[env]), len(theirs[env])) for env in common]
    return {
        "probability_of_improvement": improvement.value,
        "ci95": improvement.ci95 and list(improvement.ci95),
        "more_seeds_needed": stats.more_seeds_needed(improvement, runs),
    }


# ---------------------------------------------------------------- words


def verdict(
    outcomes: Sequence[Outcome],
    summary: Sequence[dict[str, Any]],
    pairs: Sequence[dict[str, Any]],
    scales: dict[str, Scale],
) -> list[str]:
    """Sentences: which is best, and which differences are within the noise."""
    measured = sorted((row for row in summary if row["n"]), key=lambda row: -row["iqm"])
    missing = [outcome for outcome in outcomes if not outcome.done]
    said = []
    if not any(outcome.done and outcome.last for outcome in outcomes):
        none = len(missing) == len(outcomes)
        said.append("No cell is finished yet." if none else "No finished cell has evaluated its student.")
    elif len({tuple(row["envs"]) for row in measured}) > 1:
        said += _highest_by_environment(outcomes, summary, scales)
    elif len(measured) > 1:
        best = measured[0]
        mean = interval(best["iqm"], best["ci95"])
        said.append(f"Highest: {best['name']}, {mean} over {_runs(best['n'])}.")
        said += [sentence(best["name"], row["name"], pairs) for row in measured[1:]]
    said += _without_scale(outcomes, scales) + other_rules(outcomes) + _repeated_seeds(outcomes)
    if missing:
        said.append(f"{len(missing)} of {len(outcomes)} cells are not finished and are not counted.")
    return [line for line in said if line]


def _highest_by_environment(
    outcomes: Sequence[Outcome], summary: Sequence[dict[str, Any]], scales: dict[str, Scale]
) -> list[str]:
    """Methods that were not run in the same environments have no common ranking."""
    names = {Method.of(row): row["name"] for row in summary}
    said = []
    for env in scales:
        here = [outcome for outcome in outcomes if outcome.env == env]
        rows = {method: _aggregate(cells, scales) for method, cells in by_method(here).items()}
        best = max((m for m in rows if rows[m]["n"]), key=lambda m: rows[m]["iqm"], default=None)
        if best is not None:
            mean = interval(rows[best]["iqm"], rows[best]["ci95"])
            said.append(f"Highest in {env}: {names[best]}, {mean} over {_runs(rows[best]['n'])}.")
    return [*said, "Not all were run in the same environments: the pairs compare those that they share."]


def _without_scale(outcomes: Sequence[Outcome], scales: dict[str, Scale]) -> list[str]:
    """Environments whose returns are in no score."""
    missing = dict.fromkeys(each.env for each in outcomes if each.last and each.env not in scales)
    return [
        f"{env} has no teacher and no published human score: its returns are told, but are in no score."
        for env in missing
    ]


def _repeated_seeds(outcomes: Sequence[Outcome]) -> list[str]:
    """Runs of one seed share their random numbers: they say less than as many seeds would."""
    said = []
    for (method, env), cells in grouped(outcomes, lambda each: (each.method, each.env)).items():
        seeds = [cell.seed for cell in cells if cell.done]
        repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        if repeated:
            told = ", ".join(map(str, repeated))
            said.append(
                f"{method.name} has more than one run of seed {told} in {env}: such runs share their random "
                "numbers, and intervals take them for different seeds."
            )
    return said


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
    return f"{_undecided(other, ci95)}: a run of it wins with probability {wins}; {hope}."


def _undecided(other: str, ci95: Sequence[float] | None) -> str:
    """How the best stands to another where it takes more seeds to tell."""
    few = "is clear in these runs, but they are too few to decide it"
    if ci95 is None:
        return f"Its difference from {other} cannot be told from noise, with so few runs"
    if ci95[0] > 0.5:
        return f"Its lead over {other} {few}"
    if ci95[1] < 0.5:
        return f"Yet run by run the lead of {other} over it {few}"
    return f"Its difference from {other} is within the noise"


def interval(value: float, ci95: Sequence[float] | None) -> str:
    """E.g. ``0.93 [0.81, 1.02]``."""
    return f"{value:.2f}" + (f" [{ci95[0]:.2f}, {ci95[1]:.2f}]" if ci95 else "")


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
