"""Finished runs in an experiment tracker: one small protocol, and nothing of it unless it is asked for.

A tracker of another package is an entry point of the group ``reincarnate.trackers``: something that is
called without arguments and gives a :class:`Tracker`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from reincarnate import files
from reincarnate.comparison.cells import Outcome
from reincarnate.errors import UserError
from reincarnate.report.page import flat

GROUP = "reincarnate.trackers"
#: Which runs a folder has given to which tracker, so that none is given twice.
TRACKED_FILE = "tracked.json"
_OURS = {"wandb": "reincarnate.comparison.track_wandb:Wandb"}
#: The step that names which begin so are drawn over.
STEPS = {"offline/": "offline/updates", "online/": "online/agent_steps"}


@dataclass(frozen=True)
class TrackedRun:
    """A finished run as a tracker is told of it."""

    key: str  # 16 hex digits: the same for the same run of the same comparison
    name: str
    group: str  # the comparison
    config: dict[str, Any]  # dotted settings
    #: In order, each with the step of its phase: ``{"online/agent_steps": 500, "online/return": 31.5}``
    points: tuple[Mapping[str, float], ...]
    summary: dict[str, float]  # of ``compare.json``


class Tracker(Protocol):
    """Where runs are told of."""

    def track(self, run: TrackedRun, folder: Path) -> str:
        """Tell of one run; ``folder`` is there for files of its own. Returns where it can be seen.

        Raises:
            UserError: it cannot be reached, or does not know the user.
        """


def load(name: str) -> Tracker:
    """The tracker called ``name``.

    Raises:
        UserError: no such tracker, or its package is not installed or broken.
    """
    points = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)} | _OURS
    if name not in points:
        close = difflib.get_close_matches(name, points, n=1, cutoff=0.4)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"no tracker {name!r}{hint}; known: {', '.join(sorted(points))}")
    module, _, attribute = points[name].partition(":")
    try:
        tracker: Tracker = getattr(importlib.import_module(module), attribute)()
    except UserError:
        raise
    except Exception as error:  # somebody else's code may raise any
        raise UserError(f"tracker {name!r} cannot be used: {type(error).__name__}: {error}") from None
    return tracker


def track(
    name: str,
    folder: Path,
    document: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    announce: Callable[[str], None],
) -> None:
    """Tell the tracker ``name`` of every finished run that ``folder`` has not told it of.

    Raises:
        UserError: as :func:`load` and :meth:`Tracker.track`; what was told until then is remembered.
    """
    tracker = load(name)
    path = folder / TRACKED_FILE
    told: dict[str, list[str]] = files.read_json(path) if path.is_file() else {}
    known = told.setdefault(name, [])
    for cell, outcome in zip(document["cells"], outcomes, strict=True):
        if not outcome.done:
            continue
        run = tracked_run(folder, cell, outcome)
        if run.key not in known:
            announce(f"{name}: {run.name}: {tracker.track(run, folder)}")
            known.append(run.key)
            files.write_json(path, told)


def tracked_run(folder: Path, cell: Mapping[str, Any], outcome: Outcome) -> TrackedRun:
    """One cell, from its run directory."""
    if outcome.data is None:
        raise ValueError("a run without a result")
    group, name = folder.resolve().name, outcome.run.resolve().name
    method = replace(outcome.method, variant=None)  # a run keeps its key, whatever it is reported beside
    identity = f"{group}/{outcome.run.resolve()}/{method.name}/{outcome.env}/{outcome.seed}"
    summary = {key: value for key, value in flat(cell) if isinstance(value, int | float) and key != "seed"}
    who = {"teacher": cell["teacher"], "student": cell["student"], "env": cell["env"], "seed": cell["seed"]}
    return TrackedRun(
        hashlib.sha256(identity.encode()).hexdigest()[:16],
        name,
        group,
        dict(flat(outcome.data.config)) | who,
        tuple(_points(outcome)),
        summary,
    )


def _points(outcome: Outcome) -> list[dict[str, float]]:
    """Evaluations, losses, training games and m; offline first, each phase by its steps."""
    if outcome.data is None:
        return []
    curves = outcome.data.curves
    found: list[dict[str, float]] = []
    for each in curves.evaluations:
        step = each.agent_steps if each.phase == "online" else each.updates
        found.append(_point(each.phase, step, {"return": each.returns.mean}))
    for phase, losses in curves.losses.items():
        found += [_point(phase, row.pop("step"), row) for row in losses.to_list()]
    for row in curves.games.to_list():
        found.append(_point("online", row["agent_step"], {"training_return": row["return"]}))
    for row in curves.coefficient.to_list():
        found.append(_point("online", row.pop("agent_step"), row))
    order = list(STEPS.values())

    def place(point: Mapping[str, float]) -> tuple[int, float]:
        step = next(name for name in order if name in point)
        return order.index(step), point[step]

    return sorted((point for point in found if len(point) > 1), key=place)


def _point(phase: str, step: float, values: Mapping[str, float | None]) -> dict[str, float]:
    there = {f"{phase}/{name}": v for name, v in values.items() if v is not None and name != "count"}
    return {STEPS[f"{phase}/"]: step} | there
