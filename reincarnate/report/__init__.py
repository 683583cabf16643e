"""After a run: pictures, a page and a model card, made from the run directory alone.

from reincarnate.report import write_report
write_report("runs/breakout")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reincarnate import files
from reincarnate.report import card, page, plots
from reincarnate.report.rundir import RunData, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RunData", "model_card", "plot_run", "read_run", "write_report"]


def write_report(run_directory: Path | str) -> list[Path]:
    """Write ``curves.png``, ``curves.svg``, ``losses.png``, ``losses.svg`` and ``report.html`` into the run.

    Works for any run that has a ``result.json``: scratch, stopped, without an online phase. Without any
    training there is no losses picture. Returns the files.

    Raises:
        UserError: no run there, or a file of it is damaged.
    """
    run = read_run(run_directory)
    curves, losses = plots.curves_figure(run), plots.losses_figure(run)
    written = plots.save_figure(curves, run.directory / "curves")
    curves_png, losses_png = written[0].read_bytes(), None
    if losses is not None:
        drawn = plots.save_figure(losses, run.directory / "losses")
        written, losses_png = written + drawn, drawn[0].read_bytes()
    html = run.directory / "report.html"
    files.write_bytes(html, page.page(run, curves_png, losses_png).encode())
    return [*written, html]


def plot_run(run_directory: Path | str) -> Figure:
    """The picture of ``curves.png`` as a matplotlib figure, to change or to save elsewhere.

    Raises:
        UserError: no run there, or a file of it is damaged.
    """
    return plots.curves_figure(read_run(run_directory))


def model_card(run_directory: Path | str) -> str:
    """Text of the README.md beside ``student.safetensors``, with the Hub's metadata at its head.

    Raises:
        UserError: no run there, or a file of it is damaged.
    """
    return card.card(read_run(run_directory))
