"""Statistics of few runs: interquartile means, stratified bootstrap, profiles, probability of improvement.

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv
2108.13264). Scores are given by task (an environment, say): one number per run (seed). Runs are resampled
within their task, so that every task keeps its weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats

#: Task -> normalised score of each run.
Scores = Mapping[str, Sequence[float]]
Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2_000
#: Of the sample sizes that :func:`more_seeds_needed` computes.
POWER = 0.8
_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A statistic with its interval; the interval is None where one run tells nothing of the spread."""

    value: float
    ci95: tuple[float, float] | None
    n: int  # runs behind it


@dataclass(frozen=True)
class Profile:
    """A performance profile (section 4.2): share of runs above each score, with pointwise intervals."""

    scores: Floats  # [T]
    share: Floats  # [T] in 0..1
    low: Floats  # [T]
    high: Floats  # [T]


def interquartile_mean(values: npt.ArrayLike, axis: int | None = None) -> Any:
    """Mean of the middle half (section 4.3): a quarter of the values, rounded down, is cut at each end."""
    return scipy.stats.trim_mean(np.asarray(values, dtype=np.float64), 0.25, axis=axis)


def aggregate(scores: Scores, resamples: int = RESAMPLES) -> Estimate:
    """Interquartile mean over all runs of all tasks, with a stratified bootstrap interval (percentile).

    Raises:
        ValueError: no scores, or one that is not finite.
    """
    samples = _samples(scores)
    n = sum(map(len, samples))
    value = float(interquartile_mean(np.concatenate(samples)))
    if min(map(len, samples)) < 2:
        return Estimate(value, None, n)
    drawn = _resampled(samples, resamples)
    return Estimate(value, _interval(interquartile_mean(drawn, axis=1)), n)


def profile(scores: Scores, levels: Sequence[float], resamples: int = RESAMPLES) -> Profile:
    """Share of the runs that score more than each level, tasks weighing the same (eq. 4).

    Raises:
        ValueError: no scores, or one that is not finite.
    """
    samples, at = _samples(scores), np.asarray(levels, dtype=np.float64)
    share = np.mean([_above(sample[None], at)[0] for sample in samples], axis=0)
    drawn = np.mean([_above(_draw(sample, resamples, i), at) for i, sample in enumerate(samples)], axis=0)
    low, high = np.quantile(drawn, _tails(), axis=0)
    return Profile(at, share, low, high)


def probability_of_improvement(ours: Scores, theirs: Scores, resamples: int = RESAMPLES) -> Estimate:
    """How likely a run of ours beats one of theirs on a random task, ties counting half (eq. 5).

    Tasks that only one side has are left out.

    Raises:
        ValueError: no task in common.
    """
    tasks = [task for task in ours if task in theirs]
    if not tasks:
        raise ValueError("no task in common")
    a, b = (_samples({task: side[task] for task in tasks}) for side in (ours, theirs))
    value = float(np.mean([_wins(x[None], y[None])[0] for x, y in zip(a, b, strict=True)]))
    n = sum(map(len, a)) + sum(map(len, b))
    if min(map(len, (*a, *b))) < 2:
        return Estimate(value, None, n)
    drawn = [
        _wins(_draw(x, resamples, 2 * i), _draw(y, resamples, 2 * i + 1))
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    return Estimate(value, _interval(np.mean(drawn, axis=0)), n)


def more_seeds_needed(improvement: Estimate, runs: Sequence[tuple[int, int]]) -> int | None:
    """How many more runs of each side in each task would decide which is better; None where no number would.

    Noether's sample size for the Wilcoxon-Mann-Whitney test (1987) at level 5 % and power 80 %, if the
    probability stays what it is: 0 where the interval already excludes one half. Never fewer than
    :func:`lacking_runs` says.

    Args:
        improvement: of :func:`probability_of_improvement`.
        runs: of every common task, how many runs ours and theirs are.
    """
    lacking = lacking_runs(runs)
    if improvement.ci95 is not None and not improvement.ci95[0] <= 0.5 <= improvement.ci95[1]:
        return lacking
    distance = abs(improvement.value - 0.5)
    if distance < 1e-9:
        return None
    normal = scipy.stats.norm.ppf
    needed: int = math.ceil((normal(0.5 + CONFIDENCE / 2) + normal(POWER)) ** 2 / (6 * distance**2))
    fewer: int = min(sum(side) for side in zip(*runs, strict=True))
    more: int = math.ceil((needed - fewer) / len(runs))
    return max(1, lacking, more)


def lacking_runs(runs: Sequence[tuple[int, int]]) -> int:
    """How many more runs of each side in each task it takes until any exact rank test can reach 5 %.

    Two sides of three in one task that do not overlap have p = 2 / C(6, 3) = 0.1, and the bootstrap of runs
    that all won has no width whatever their number. Tasks are permuted apart: their chances multiply.
    """
    more = 0
    while 2 / math.prod(math.comb(a + b + 2 * more, a + more) for a, b in runs) > 1 - CONFIDENCE:
        more += 1
    return more


def _samples(scores: Scores) -> list[Floats]:
    samples = [np.asarray(values, dtype=np.float64) for values in scores.values()]
    if not samples or min(map(len, samples)) == 0:
        raise ValueError("no scores")
    if not all(np.isfinite(sample).all() for sample in samples):
        raise ValueError("a score that is not finite")
    return samples


def _draw(sample: Floats, resamples: int, stream: int) -> Floats:
    """[resamples, n] with replacement; streams are independent."""
    rng = np.random.default_rng((_SEED, stream))
    return rng.choice(sample, size=(resamples, len(sample)))


def _resampled(samples: Sequence[Floats], resamples: int) -> Floats:
    """[resamples, all runs], each task resampled on its own."""
    return np.concatenate([_draw(sample, resamples, i) for i, sample in enumerate(samples)], axis=1)


def _above(drawn: Floats, levels: Floats) -> Floats:
    """Share [R, T] of the values [R, n] above each level [T]."""
    below = np.stack([np.searchsorted(np.sort(row), levels, side="right") for row in drawn])
    above: Floats = 1.0 - below / drawn.shape[1]
    return above


def _wins(ours: Floats, theirs: Floats) -> Floats:
    """Share [R] of pairs that ours [R, n] wins against theirs [R, m]; a tie is half a win."""
    difference = ours[:, :, None] - theirs[:, None, :]
    wins: Floats = (np.sign(difference) + 1.0).mean(axis=(1, 2)) / 2.0
    return wins


def _tails() -> tuple[float, float]:
    return (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2


def _interval(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, _tails())
    return float(low), float(high)
