"""Pictures of a comparison: learning curves on agent steps and on time, performance profiles, a matrix.

Line styles and markers differ as well as colours, for prints in black and white.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reincarnate import stats
from reincarnate.comparison.baselines import Baselines, Scale
from reincarnate.comparison.cells import Method, Moment, Outcome, drawn_names, grouped, moments, numbered
from reincarnate.comparison.document import by_method, interval, scores_of
from reincarnate.comparison.references import Reference
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
from reincarnate.report.rundir import short_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", SKY, "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ((0, (6, 2)), (0, (3, 1.5, 1, 1.5)), (0, (8, 2, 2, 2)), (0, (4, 4)))
_REFERENCE_COLOUR = "#4B2E83"
_REFERENCE_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1, 1, 1)))
_RESAMPLES = 500  # of each point of a curve
_PROFILE_LEVELS = 200
_PANEL_INCHES = 3.7  # height of a row of panels with what stands below it
_COLUMN_LETTERS = 44  # what half of the width has room for


@dataclass(frozen=True)
class Look:
    """How one method is drawn."""

    label: str
    colour: str
    marker: str


@dataclass(frozen=True)
class Curve:
    """A method's evaluations over its seeds, by their order: mean place, interquartile mean, interval."""

    x: list[float]
    value: list[float]
    low: list[float]
    high: list[float]


def figures(
    document: Mapping[str, Any], outcomes: Sequence[Outcome], references: Sequence[Reference] = ()
) -> list[tuple[str, Figure]]:
    """File stem and figure of every picture that the finished cells allow."""
    done = [outcome for outcome in outcomes if outcome.done and outcome.last is not None]
    if not done:
        return []
    looks = looks_of([Method.of(row) for row in document["summary"]])
    baselines = Baselines.of(outcomes)
    drawn: list[tuple[str, Figure]] = []
    environments = grouped(done, lambda outcome: outcome.env)
    for env, cells in environments.items():
        end = "" if len(environments) == 1 else "-" + re.sub(r"[^A-Za-z0-9.]+", "-", env)
        beside = [reference for reference in references if reference.env == env]
        drawn.append((f"learning{end}", learning_figure(env, cells, looks, baselines, beside)))
        drawn.append((f"learning-time{end}", time_figure(env, cells, looks, baselines)))
    drawn.append(("profiles", profiles_figure(done, baselines.scales, looks)))
    return [*drawn, ("matrix", matrix_figure(document["summary"]))]


def looks_of(methods: Sequence[Method]) -> dict[Method, Look]:
    """Colours and markers in the order of the methods; both start again after seven."""
    styles = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    names = drawn_names(method.teacher for method in methods)
    told = [f"{each.learner} from {names[each.teacher]}" for each in methods]
    labels = numbered([_plain(label, 2 * _COLUMN_LETTERS) for label in told])
    return {
        method: Look(label, *style) for method, label, style in zip(methods, labels, styles, strict=False)
    }


def curve_of(runs: Sequence[Sequence[Moment]], place: Callable[[Moment], float]) -> Curve:
    """The k-th evaluations of all runs make the k-th point; a run that has fewer is left out there."""
    curve = Curve([], [], [], [])
    for points in itertools.zip_longest(*runs):
        here = [point for point in points if point is not None]
        estimate = stats.aggregate({"": [point.mean for point in here]}, _RESAMPLES)
        low, high = estimate.ci95 or (estimate.value, estimate.value)
        curve.x.append(float(np.mean([place(point) for point in here])))
        curve.value.append(estimate.value)
        curve.low.append(low)
        curve.high.append(high)
    return curve


# ---------------------------------------------------------------- learning curves


def learning_figure(
    env: str,
    outcomes: Sequence[Outcome],
    looks: Mapping[Method, Look],
    baselines: Baselines,
    references: Sequence[Reference] = (),
) -> Figure:
    """Returns over offline updates, then over online agent steps, side by side.

    ``references`` are drawn in the online phase, as far as the runs themselves go.
    """
    phases = [name for name in ("offline", "online") if any(_split(each)[name] for each in outcomes)]
    widths = [0.36, 0.64] if len(phases) == 2 else [1.0]
    figure, row = _panels(widths)
    for axes, phase in zip(row, phases, strict=False):
        for method, cells in by_method(outcomes).items():
            runs = [_part(cell, phase) for cell in cells]
            if any(runs):
                _draw(axes, curve_of(runs, _STEPS[phase]), looks[method], _joined(cells, phase))
        if phase == "online":
            _draw_references(axes, references, longest(outcomes))
        _levels(axes, env, outcomes, baselines)
        _label(axes, phase)
    if len(phases) == 2:
        row[0].set_xlim(0, max(p.updates for each in outcomes for p in _split(each)["offline"]))
        draw_boundary(row[1])
    row[-1].set_xlim(left=0)
    _lay_out(figure, row, _title(env, outcomes))
    return figure


def time_figure(
    env: str, outcomes: Sequence[Outcome], looks: Mapping[Method, Look], baselines: Baselines
) -> Figure:
    """Returns over the time that training took; what the offline phase took is dashed, with hollow marks."""
    figure, row = _panels([1.0])
    axes = row[0]
    longest = max((p.seconds for each in outcomes for p in moments(each)), default=1.0)
    units = (("hours", 3600), ("minutes", 60))
    unit, seconds = next((each for each in units if longest > 2 * each[1]), ("seconds", 1))
    for method, cells in by_method(outcomes).items():
        for phase in ("offline", "online"):
            runs = [_part(cell, phase) for cell in cells]
            if any(runs):
                curve = curve_of(runs, lambda point: point.seconds / seconds)
                _draw(axes, curve, looks[method], _joined(cells, phase), phase == "offline")
    _levels(axes, env, outcomes, baselines)
    axes.set_xlabel(f"{unit} of training (dashed with hollow marks: the offline phase)")
    axes.set_xlim(left=0)
    _lay_out(figure, row, _title(env, outcomes))
    return figure


_STEPS: dict[str, Callable[[Moment], float]] = {
    "offline": lambda point: point.updates,
    "online": lambda point: point.agent_steps,
}


def _split(outcome: Outcome) -> dict[str, list[Moment]]:
    found = moments(outcome)
    return {phase: [point for point in found if point.phase == phase] for phase in ("offline", "online")}


def _part(outcome: Outcome, phase: str) -> list[Moment]:
    """A phase's evaluations; the online part goes on from the last offline one."""
    parts = _split(outcome)
    if phase == "online" and parts["online"] and parts["offline"]:
        return [parts["offline"][-1], *parts["online"]]
    return parts[phase]


def _joined(outcomes: Sequence[Outcome], phase: str) -> bool:
    return phase == "online" and any(_split(each)["offline"] for each in outcomes)


def _draw(axes: Axes, curve: Curve, look: Look, joined: bool, hollow: bool = False) -> None:
    goes_on = joined and len(curve.x) > 1  # its first point is the offline phase's last
    axes.fill_between(curve.x, curve.low, curve.high, color=look.colour, alpha=0.16, lw=0, zorder=1.5)
    axes.vlines(curve.x, curve.low, curve.high, color=look.colour, lw=1.0, zorder=2, clip_on=False)
    axes.plot(
        curve.x,
        curve.value,
        color=look.colour,
        marker=look.marker,
        markevery=slice(int(goes_on), None),
        ms=5,
        mfc="white" if hollow else look.colour,
        ls=(0, (4, 2)) if hollow else "-",
        lw=1.8,
        label="_" if hollow else look.label,
        zorder=3,
        clip_on=False,
    )


def longest(outcomes: Sequence[Outcome]) -> int:
    """Agent steps of the last evaluation of any run."""
    return max((point.agent_steps for each in outcomes for point in moments(each)), default=0)


def _draw_references(axes: Axes, references: Sequence[Reference], limit: int) -> None:
    """Thin lines without marks: they are training returns, where all else is an evaluation."""
    for reference, dashes in zip(references, itertools.cycle(_REFERENCE_DASHES), strict=False):
        x, value, low, high = reference.curve(limit)
        axes.fill_between(x, low, high, color=_REFERENCE_COLOUR, alpha=0.12, lw=0, zorder=1.2)
        label = _plain(reference.label)
        axes.plot(x, value, color=_REFERENCE_COLOUR, lw=1.2, ls=dashes, label=label, zorder=1.8)


def _levels(axes: Axes, env: str, outcomes: Sequence[Outcome], baselines: Baselines) -> None:
    """Teachers and random play as lines."""
    teachers = dict.fromkeys(each.method.teacher for each in outcomes if each.method.teacher)
    names = drawn_names(teachers)
    for ref, dashes in zip(teachers, itertools.cycle(_DASHES), strict=False):
        pooled = baselines.teachers.get((str(ref), env))
        if pooled is not None:
            label = _plain(f"teacher {names[ref]}: {pooled.returns.mean:.1f}")
            axes.axhline(pooled.returns.mean, color="black", lw=1.3, ls=dashes, label=label, zorder=1)
    random = baselines.random.get(env)
    if random is not None:
        label = f"random play: {random.returns.mean:.1f}"
        axes.axhline(random.returns.mean, color=GREY, lw=1.3, ls=(0, (1, 1.6)), label=label, zorder=1)


def _label(axes: Axes, phase: str) -> None:
    online = phase == "online"
    axes.set_title(PHASE_TITLES[phase], size=9, color=GREY, pad=5)
    axes.set_xlabel("agent steps of the student" if online else "updates (offline)")
    label_counts(axes, last=online)


def _panels(widths: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Panels in a row with one y-axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, _PANEL_INCHES), facecolor="white")
    options = {"width_ratios": list(widths), "wspace": 0.0}
    row = list(figure.subplots(1, len(widths), sharey=True, squeeze=False, gridspec_kw=options)[0])
    for axes in row:
        style(axes)
    row[0].set_ylabel("return per game (raw score)")
    return figure, row


def _title(env: str, outcomes: Sequence[Outcome]) -> str:
    seeds = len({each.seed for each in outcomes})
    return f"{env}: interquartile mean of {seeds} {'seed' if seeds == 1 else 'seeds'}, 95 % intervals"


def _lay_out(figure: Figure, row: Sequence[Axes], title: str) -> None:
    """The title, the legend below it, and the panels below that: the figure is as high as they need."""
    entries = legend_entries(reversed(row))  # the online phase has them all
    columns = 2 if max(map(len, entries)) <= _COLUMN_LETTERS else 1
    head = 0.62 + 0.165 * math.ceil(len(entries) / columns)
    inches = _PANEL_INCHES + head
    figure.set_figheight(inches)
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.55 / inches, top=1 - head / inches)
    figure.text(0.1, 1 - 0.1 / inches, _plain(title), size=11, weight="bold", va="top")
    write_legend(figure, entries, 0.32, columns, handlelength=2.6)


# ---------------------------------------------------------------- profiles and matrix


def profiles_figure(
    outcomes: Sequence[Outcome], scales: dict[str, Scale], looks: Mapping[Method, Look]
) -> Figure:
    """Share of the runs above each score (Agarwal et al. 2021, section 4.2)."""
    from matplotlib.figure import Figure

    methods = {method: scores_of(cells, scales) for method, cells in by_method(outcomes).items()}
    values = [value for scores in methods.values() for runs in scores.values() for value in runs]
    low, high = min(0.0, *values), max(1.0, *values)
    margin = 0.05 * (high - low)  # every profile begins at 1 and ends at 0
    levels = np.linspace(low - margin, high + margin, _PROFILE_LEVELS)
    figure = Figure(figsize=(WIDTH_INCHES, _PANEL_INCHES), facecolor="white")
    axes = figure.subplots()
    for method, scores in methods.items():
        found, look = stats.profile(scores, list(levels)), looks[method]
        axes.fill_between(levels, found.low, found.high, color=look.colour, alpha=0.16, lw=0, step="post")
        axes.step(
            levels,
            found.share,
            where="post",
            color=look.colour,
            marker=look.marker,
            markevery=_PROFILE_LEVELS // 8,
            ms=5,
            lw=1.8,
            label=look.label,
        )
    axes.set_xlabel(_plain(_score(scales), 2 * _COLUMN_LETTERS))
    axes.set_ylabel("share of runs with a higher score")
    axes.set_ylim(-0.03, 1.03)
    style(axes)
    _lay_out(figure, [axes], "Performance profiles with pointwise 95 % intervals")
    return figure


def matrix_figure(summary: Sequence[Mapping[str, Any]]) -> Figure:
    """Interquartile mean scores: a row per teacher (and one from scratch), a column per student."""
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys(row["teacher"] for row in summary))
    columns = list(dict.fromkeys(Method.of(row).learner for row in summary))
    table = np.full((len(rows), len(columns)), np.nan)
    for row in summary:
        if row["iqm"] is not None:
            table[rows.index(row["teacher"]), columns.index(Method.of(row).learner)] = row["iqm"]
    inches = 1.5 + 0.75 * len(rows)
    titles = [_plain(name).replace(" (", "\n(").replace(", ", ",\n") for name in columns]
    letters = max(len(line) for title in titles for line in title.split("\n"))
    width = max(6.0, 3.6 + max(1.7, 0.085 * letters) * len(columns))
    figure = Figure(figsize=(width, inches), facecolor="white", layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(table, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), titles)
    names = drawn_names(rows)
    axes.set_yticks(range(len(rows)), [_plain(names[ref]) if ref else "from scratch" for ref in rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row in summary:
        _write_cell(axes, rows.index(row["teacher"]), columns.index(Method.of(row).learner), row)
    title = "Interquartile mean score, 95 % interval, runs"
    figure.suptitle(title, size=11, weight="bold", x=0.02, horizontalalignment="left")
    axes.set(xlabel="student", ylabel="teacher")
    figure.colorbar(image, ax=axes, label="score", extend="both")
    return figure


def _write_cell(axes: Axes, row: int, column: int, summary: Mapping[str, Any]) -> None:
    value, ci95 = summary["iqm"], summary["ci95"]
    if value is None:
        return
    lines = interval(value, ci95).replace(" [", "\n[") + f"\nn = {summary['n']}"
    colour = "black" if value > 0.55 else "white"
    axes.text(column, row, lines, ha="center", va="center", color=colour, size=9.5)


# ---------------------------------------------------------------- words


def _score(scales: Mapping[str, Scale]) -> str:
    if any(scale.raw_returns for scale in scales.values()):
        return "score (the raw return)"
    names = {short_path(scale.one_is) for scale in scales.values()}
    one = names.pop() if len(names) == 1 else "the strongest teacher (or a human) of each environment"
    return f"score (0: random play, 1: {one})"


def _plain(text: str, letters: int = 60) -> str:
    """As it stands: no mathematics, and at most so many letters."""
    kept, half = drawable(text), letters // 2
    return (kept if len(kept) <= letters else f"{kept[:half]}…{kept[1 - half :]}").replace("$", r"\$")
