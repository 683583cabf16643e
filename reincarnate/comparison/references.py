"""Reference curves: what CleanRL and Stable-Baselines3 logged to TensorBoard while they trained.

They are returns of training games, played with the exploration of that moment, and no evaluations; they
are drawn and tabled apart from the comparison, whose statistics leave them out.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reincarnate import stats
from reincarnate.envs.make import canonical_id
from reincarnate.errors import UserError

Floats = npt.NDArray[np.float64]

#: CleanRL: the return of one game. Stable-Baselines3: the mean of the last hundred. Both over agent steps.
TAGS = ("charts/episodic_return", "rollout/ep_rew_mean")
KIND = "training returns"
_EVENTS = "events.out.tfevents.*"
#: How CleanRL names its runs.
_CLEANRL = re.compile(r"(?P<env>.+?)__(?P<name>.+)__(?P<seed>\d+)__\d+")
_BINS = 60
_RESAMPLES = 500
_TAIL = 0.1  # of the steps, whose mean is a return "at" a step


@dataclass(frozen=True)
class Log:
    """One run of another program."""

    steps: Floats  # [n] agent steps, ascending
    returns: Floats  # [n]

    def mean_before(self, step: float) -> float | None:
        """Mean over the last tenth of the steps up to ``step``; None where it holds nothing there."""
        inside = (self.steps <= step) & (self.steps >= step * (1 - _TAIL))
        return float(self.returns[inside].mean()) if inside.any() else None


@dataclass(frozen=True)
class Reference:
    """Runs of another program that are seeds of one thing."""

    name: str
    env: str
    tag: str
    logs: tuple[Log, ...]

    @property
    def label(self) -> str:
        """What the pictures call it."""
        runs = f", {len(self.logs)} runs" if len(self.logs) > 1 else ""
        return f"{self.name} ({KIND}{runs})"

    @property
    def agent_steps(self) -> int:
        """Of the longest run."""
        return int(max(log.steps[-1] for log in self.logs))

    def curve(self, limit: float) -> tuple[Floats, Floats, Floats, Floats]:
        """Up to ``limit`` agent steps: places, interquartile means over runs, and their interval, [k] each.

        Each run counts with the mean of its returns in each sixtieth of the way.
        """
        edges = np.linspace(0.0, limit, _BINS + 1)
        rows = np.array([_binned(log, edges) for log in self.logs])
        there = ~np.isnan(rows).all(axis=0)
        columns = [column[~np.isnan(column)] for column in rows.T[there]]
        points = [stats.aggregate({"": column.tolist()}, _RESAMPLES) for column in columns]
        values = np.array([point.value for point in points])
        bounds = np.array([point.ci95 or (point.value, point.value) for point in points]).reshape(-1, 2)
        return ((edges[1:] + edges[:-1]) / 2)[there], values, bounds[:, 0], bounds[:, 1]

    def to_dict(self, limit: int) -> dict[str, Any]:
        """The object of ``compare.json``; ``limit``: agent steps of the comparison's own runs."""
        ends = [log.mean_before(log.steps[-1]) for log in self.logs]
        return {
            "name": self.name,
            "env": self.env,
            "kind": KIND,
            "tag": self.tag,
            "runs": len(self.logs),
            "agent_steps": self.agent_steps,
            "return_at": {"agent_steps": limit, "mean": _mean([log.mean_before(limit) for log in self.logs])},
            "last_return": _mean(ends),
        }


def is_log(path: Path) -> bool:
    """Whether ``path`` is an event file of another program, or holds some at any depth."""
    return bool(_homes(path))


def read_references(paths: Sequence[Path], envs: Collection[str]) -> list[Reference]:
    """The logs in ``paths`` as references of the environments ``envs`` of a comparison.

    Runs that CleanRL named are seeds of one reference where they differ in nothing else; a log without such
    a name stands for itself.

    Raises:
        UserError: none of :data:`TAGS` in a log, or its environment is not known or not among ``envs``.
    """
    found: dict[tuple[str, str, str], list[Log]] = {}
    for path in paths:
        for home in _homes(path):
            tag, log = _read(home)
            match = _CLEANRL.fullmatch(_title(home))
            name = match["name"] if match else _title(home)
            found.setdefault((name, _env_of(home, match and match["env"], envs), tag), []).append(log)
    return [Reference(name, env, tag, tuple(logs)) for (name, env, tag), logs in found.items()]


def _homes(path: Path) -> list[Path]:
    """Event files, or the folders right above some, that are no runs of ours."""
    if path.is_file():
        return [path] if path.match(_EVENTS) else []
    folders = sorted({file.parent for file in path.rglob(_EVENTS)})
    return [folder for folder in folders if not (folder / "result.json").exists()]


def _title(home: Path) -> str:
    return (home.parent if home.is_file() else home).resolve().name


def _read(home: Path) -> tuple[str, Log]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    read = EventAccumulator(str(home), size_guidance={SCALARS: 0}).Reload()
    there = read.Tags()[SCALARS]
    tag = next((tag for tag in TAGS if tag in there), None)
    if tag is None:
        told = f"it has {', '.join(sorted(there)[:5])}" if there else "it has no scalars"
        raise UserError(f"{home} holds neither {TAGS[0]} (CleanRL) nor {TAGS[1]} (Stable-Baselines3); {told}")
    events = read.Scalars(tag)
    steps = np.array([event.step for event in events], dtype=np.float64)
    returns = np.array([event.value for event in events], dtype=np.float64)
    kept = np.isfinite(returns)
    if not kept.any():
        raise UserError(f"{home}: no value of {tag} is a number")
    order = np.argsort(steps[kept], kind="stable")
    return tag, Log(steps[kept][order], returns[kept][order])


def _env_of(home: Path, named: str | None, envs: Collection[str]) -> str:
    known = ", ".join(sorted(envs)) or "none"
    if named is None:
        if len(envs) != 1:
            raise UserError(f"{home} does not say its environment, and that of the runs is {known}; give one")
        return next(iter(envs))
    if named in envs:
        return named
    with contextlib.suppress(UserError):  # a name that only the other program knows
        named = canonical_id(named)
    if named not in envs:
        raise UserError(f"{home} is of {named}, and the runs are of {known}; leave it out")
    return named


def _binned(log: Log, edges: Floats) -> Floats:
    """Means within the edges [k + 1], NaN where there is nothing."""
    place = np.digitize(log.steps, edges[1:-1], right=True)
    inside = log.steps <= edges[-1]
    count = np.bincount(place[inside], minlength=len(edges) - 1)
    total = np.bincount(place[inside], weights=log.returns[inside], minlength=len(edges) - 1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
