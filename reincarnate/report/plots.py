"""Pictures of a run. One x-axis in two parts: offline (updates), then online (agent steps).

Line styles differ as well as colours, so that the picture survives a black-and-white print.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reincarnate import files
from reincarnate.curves import PHASES, Evaluation, Point, moving_mean
from reincarnate.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASE_TITLES,
    SKY,
    WIDTH_INCHES,
    draw_boundary,
    drawable,
    label_counts,
    legend_entries,
    style,
    write_legend,
)
from reincarnate.report.rundir import RunData
from reincarnate.types import Returns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_TITLE_LONGEST = 84
_GAMES_DRAWN_SINGLY = 300
_EVALUATED, _GAMES = "student, evaluated", "student, training games"
LOSS_LABELS = {"td_loss": "TD loss", "distill_loss": "distillation loss", "cmpo_loss": "CMPO loss"}
_PART_LABELS = {"offline": "updates (offline)", "online": "agent steps (online)"}


@dataclass(frozen=True)
class Part:
    """One part of the x-axis."""

    phase: str  # "offline" or "online"
    end: int  # updates or agent steps


def parts_of(run: RunData) -> list[Part]:
    """The parts that the run got to; empty before any training."""
    phases, curves = run.result["phases"], run.curves
    offline = [phases["offline"]["updates"] or 0]
    offline += [point.step for point in curves.losses["offline"].points]
    offline += [evaluation.updates for evaluation in curves.evaluations if evaluation.phase == "offline"]
    online = [phases["online"]["agent_steps"] or 0]
    online += [point.step for series in (curves.games, curves.coefficient) for point in series.points]
    online += [evaluation.agent_steps for evaluation in curves.evaluations if evaluation.phase == "online"]
    ends = {"offline": max(offline), "online": max(online)}
    return [Part(phase, ends[phase]) for phase in PHASES if ends[phase] > 0]


def curves_figure(run: RunData) -> Figure:
    """Returns over the whole run; below it m, where the student distils."""
    parts = parts_of(run)
    with_m = bool(run.curves.coefficient.points) or _distilled_offline(run)
    figure, rows = _grid(run, parts, [3.2, 1.0] if with_m else [1.0], 5.4 if with_m else 4.2, 1.0)
    for part, axes in zip(parts, rows[0], strict=False):
        _draw_returns(axes, run, part)
    if not parts:
        rows[0][0].text(0.5, 0.5, "no training yet", ha="center", color=GREY, transform=rows[0][0].transAxes)
        rows[0][0].set_xticks([])
    for axes in rows[0]:
        _draw_levels(axes, run)
    rows[0][0].set_ylabel("return per game (raw score)")
    if with_m:
        _draw_m_row(run, parts, rows[1])
    _legend(figure, rows[0])
    return figure


def losses_figure(run: RunData) -> Figure | None:
    """Every term of the loss that was measured, a row each; None where nothing was learnt."""
    names = _losses_of(run)
    parts = [part for part in parts_of(run) if run.curves.losses[part.phase].points]
    if not names or not parts:
        return None
    figure, rows = _grid(run, parts, [1.0] * len(names), 1.2 + 1.7 * len(names), 0.6)
    for name, row in zip(names, rows, strict=True):
        row[0].set_ylabel(LOSS_LABELS.get(name) or name.replace("_", " "))
        values: list[float] = []
        for part, axes in zip(parts, row, strict=True):
            series = run.curves.losses[part.phase]
            losses = [_number(series.value(point, name)) for point in series.points]
            axes.plot([point.step for point in series.points], losses, color=BLUE, lw=1.0)
            values += losses
        _scale(row[0], values)
    return figure


def _losses_of(run: RunData) -> list[str]:
    """Names of the losses that are anywhere not 0, in the order in which they were met."""
    every = [series for series in run.curves.losses.values() if series.points]
    found = dict.fromkeys(name for series in every for name in series.names)
    return [name for name in found if any(each.value(point, name) for each in every for point in each.points)]


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where losses span more than a factor of 20."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    positive = [value for value in values if value > 0]
    if not positive or max(positive) < 20 * min(positive):
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """``STEM.png`` and ``STEM.svg``, atomically."""
    paths = []
    for kind, options in (("png", {"dpi": _DPI}), ("svg", {"metadata": {"Date": None}})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, **options)
        path = stem.with_suffix(f".{kind}")
        files.write_bytes(path, buffer.getvalue())
        paths.append(path)
    return paths


# ---------------------------------------------------------------- layout


def _grid(
    run: RunData, parts: Sequence[Part], heights: Sequence[float], inches: float, head_inches: float
) -> tuple[Figure, list[list[Axes]]]:
    """Rows of panels, one column per part, with a line between the parts where the offline phase ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, inches), facecolor="white")
    columns = max(1, len(parts))
    grid = figure.subplots(
        len(heights),
        columns,
        sharey="row",
        squeeze=False,
        gridspec_kw={
            "height_ratios": heights,
            "width_ratios": [0.38, 0.62] if columns == 2 else [1.0],
            "wspace": 0.0,
            "hspace": 0.12,
        },
    )
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.55 / inches, top=1 - head_inches / inches)
    _write_title(figure, _title(run))
    rows = [list(row) for row in grid]
    for row in rows:
        for column, axes in enumerate(row):
            _style(axes, left=column == 0)
    for column, part in enumerate(parts):
        _label_column([row[column] for row in rows], part, last=column == columns - 1)
    return figure, rows


def _write_title(figure: Figure, title: str) -> None:
    """Left above everything, in a size at which it fits; the middle of a very long one is left out."""
    title = drawable(title)
    if len(title) > _TITLE_LONGEST:
        title = f"{title[: _TITLE_LONGEST // 2]}…{title[-_TITLE_LONGEST // 2 :]}"
    size = min(11.5, 11.5 * 60 / len(title))
    top = 1 - 0.12 / figure.get_figheight()
    figure.text(0.1, top, title, size=size, weight="bold", va="top", parse_math=False)


def _style(axes: Axes, left: bool) -> None:
    axes.patch.set_visible(False)
    axes.set_zorder(2 if left else 1)  # the last offline point lies on the boundary, above its line
    style(axes)
    if not left:
        draw_boundary(axes)


def _label_column(column: list[Axes], part: Part, last: bool) -> None:
    column[0].set_title(PHASE_TITLES[part.phase], size=9, color=GREY, pad=5)
    for axes in column:
        axes.set_xlim(0, part.end * (1.015 if last else 1.0))
        label_counts(axes, last)
        if axes is not column[-1]:
            axes.tick_params(labelbottom=False)
    column[-1].set_xlabel(_PART_LABELS[part.phase])


def _legend(figure: Figure, row: Iterable[Axes]) -> None:
    found = legend_entries(row)
    order = ("teacher", "random policy", _EVALUATED, _GAMES)
    entries = {label: found[label] for start in order for label in found if label.startswith(start)}
    if entries:
        write_legend(figure, entries, 0.34, handlelength=2.4, columnspacing=2.0)


# ---------------------------------------------------------------- returns


def _draw_levels(axes: Axes, run: RunData) -> None:
    teacher, random = run.returns("teacher"), run.returns("random")
    if teacher is not None:
        axes.axhspan(*teacher.ci95, color=ORANGE, alpha=0.13, lw=0, zorder=0.5)
        axes.axhline(teacher.mean, color=ORANGE, lw=1.6, ls=(0, (6, 2)), label=f"teacher  {level(teacher)}")
    if random is not None:
        axes.axhline(
            random.mean, color=GREY, lw=1.3, ls=(0, (1, 1.6)), label=f"random policy  {level(random)}"
        )


def _draw_returns(axes: Axes, run: RunData, part: Part) -> None:
    if part.phase == "online":
        _draw_games(axes, run)
    points = [(_x(evaluation), evaluation.returns) for evaluation in run.curves.evaluations]
    here = [point for point, e in zip(points, run.curves.evaluations, strict=True) if e.phase == part.phase]
    before = run.curves.last_return("offline") if part.phase == "online" else None
    line = [(0, before), *here] if before is not None else here
    axes.plot([x for x, _ in line], [y.mean for _, y in line], color=BLUE, lw=1.8, zorder=3)
    if not here:
        return
    below = [y.mean - y.ci95[0] for _, y in here]
    above = [y.ci95[1] - y.mean for _, y in here]
    bars = axes.errorbar(
        [x for x, _ in here],
        [y.mean for _, y in here],
        yerr=[below, above],
        fmt="o",
        ms=5,
        color=BLUE,
        capsize=3,
        lw=1.3,
        zorder=4,
        clip_on=False,
        label=f"{_EVALUATED} (95 % interval)",
    )
    for artist in (*bars[1], *bars[2]):
        artist.set_clip_on(False)


def _draw_games(axes: Axes, run: RunData) -> None:
    points = run.curves.games.points
    if not points:
        return
    steps = [point.step for point in points]
    singly = len(points) <= _GAMES_DRAWN_SINGLY
    if singly:
        axes.plot(steps, [_number(point.values[0]) for point in points], ".", ms=4, color=SKY, alpha=0.7)
    window = run.config.get("distill", {}).get("window_games", 20)
    means = [_number(mean) for mean in moving_mean(points, window)]
    first = _first_full(points, window)
    label = f"{_GAMES} ({'dots; line: ' if singly else ''}{_mean_of(points, first, window)})"
    axes.plot(steps[first:], means[first:], color=SKY, lw=1.1, zorder=2, label=label)


def _first_full(points: Sequence[Point], window: int) -> int:
    """Where the mean starts: the first games to finish are the short ones, so a few are not enough."""
    enough = min(window, math.ceil(sum(point.count for point in points) / 4))
    played = 0
    for index, point in enumerate(points):
        played += point.count
        if played >= enough:
            return index
    return 0


def _mean_of(points: Sequence[Point], first: int, window: int) -> str:
    """What the line that starts at point ``first`` is, e.g. ``mean of the last 2 to 8``."""
    games = [min(window, sum(point.count for point in part)) for part in (points[: first + 1], points)]
    return f"mean of {games[1]}" if games[0] == games[1] else f"mean of the last {games[0]} to {games[1]}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _x(evaluation: Evaluation) -> int:
    return evaluation.updates if evaluation.phase == "offline" else evaluation.agent_steps


# ---------------------------------------------------------------- m


def _draw_m_row(run: RunData, parts: Sequence[Part], row: Sequence[Axes]) -> None:
    row[0].set_ylabel("weight m")
    row[0].set_ylim(-0.04, 1.08)
    row[0].set_yticks([0, 0.5, 1])
    for part, axes in zip(parts, row, strict=False):
        if part.phase == "offline":  # by definition
            axes.plot([0, part.end], [1, 1], color=GREEN, lw=1.8)
            continue
        steps = [point.step for point in run.curves.coefficient.points]
        values = [_number(point.values[0]) for point in run.curves.coefficient.points]
        first = run.result["distill"].get("online_first")
        if first is not None:  # before the first update nothing is recorded
            steps, values = [0, *steps], [first, *values]
        axes.plot(steps, values, color=GREEN, lw=1.8)


def _distilled_offline(run: RunData) -> bool:
    series = run.curves.losses["offline"]
    return any(series.value(point, "distill_loss") is not None for point in series.points)


# ---------------------------------------------------------------- words


def level(returns: Returns) -> str:
    """E.g. ``69.8 [61.2, 78.5]``."""
    low, high = returns.ci95
    return f"{returns.mean:.1f} [{low:.1f}, {high:.1f}]"


def _title(run: RunData) -> str:
    status = run.result["status"]
    return run.title + ("" if status == "done" else f" ({status})")
