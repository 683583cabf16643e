"""What all pictures share: colours, axes, a legend above the panels, letters that the font has.

Colours are Okabe and Ito's, which people with any colour vision tell apart. Only ``matplotlib.figure.Figure``
is used by those that draw: no pyplot, no backend, no global state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, SKY, ORANGE, GREEN, GREY = "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#595959"
WIDTH_INCHES = 8.0
#: Titles of the panels of a run's phases.
PHASE_TITLES = {"offline": "offline: on the teacher's data", "online": "online: playing itself"}


def style(axes: Axes) -> None:
    """Thin lines behind, no frame above and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, color=GREY)


def draw_boundary(axes: Axes) -> None:
    """On the left of a panel that goes on from the one before it: there the offline phase ends."""
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines["left"].set(linestyle=(0, (4, 3)), color="black", linewidth=1.1)


def label_counts(axes: Axes, last: bool) -> None:
    """Round numbers of steps below; one that is not the ``last`` leaves room for the next panel's 0."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    prune = None if last else "upper"
    axes.xaxis.set_major_locator(MaxNLocator(6 if last else 4, steps=[1, 2, 2.5, 5, 10], prune=prune))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def legend_entries(row: Iterable[Axes]) -> dict[str, Any]:
    """What is drawn in any of the panels, by its label; every label once."""
    found: dict[str, Any] = {}
    for axes in row:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def write_legend(
    figure: Figure, entries: Mapping[str, Any], below_top_inches: float, columns: int = 2, **spacing: float
) -> None:
    """Above the panels, where they hide nothing."""
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="upper left",
        bbox_to_anchor=(0.093, 1 - below_top_inches / figure.get_figheight()),
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.0,
        labelspacing=0.25,
        **spacing,
    )


def drawable(text: str) -> str:
    """Without letters that matplotlib's own font has not (East Asian ones), of each of which it warns."""
    return "".join(c if c.isprintable() and ord(c) < 0x2E80 else "?" for c in text)


def short_count(value: float) -> str:
    """``250``, ``2.5k``, ``10M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
