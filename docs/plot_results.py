"""Draws docs/images/qdagger-and-scratch.png from the runs of `REINCARNATE_CAMPAIGN=DIR make test-slow`.

python docs/plot_results.py DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
COLOURS = {"qdagger-dqn": "#0072B2", "dqn": "#D55E00"}  # Okabe-Ito
LABELS = {"qdagger-dqn": "QDagger, offline phase before step 0", "dqn": "DQN from scratch"}


def read(folder: Path, name: str) -> Any:
    """A JSON file of a run."""
    return json.loads((folder / name).read_text())


def draw(axes: Axes, title: str, runs: dict[str, list[Path]]) -> None:
    """Training games (running mean of 10) and evaluations over online agent steps, a line per seed."""
    for student, folders in runs.items():
        for number, folder in enumerate(folders):
            curves = read(folder, "curves.json")
            games = curves["games"]
            recent = [
                sum(g["return"] for g in games[max(0, i - 9) : i + 1]) / len(games[max(0, i - 9) : i + 1])
                for i in range(len(games))
            ]
            colour = COLOURS[student]
            axes.plot([g["agent_step"] for g in games], recent, color=colour, alpha=0.45, lw=1)
            points = [(e["agent_steps"], e["return"]["mean"]) for e in curves["evaluations"]]
            label = LABELS[student] if number == 0 else None
            axes.plot(*zip(*points, strict=True), "o", color=colour, ms=5, label=label)
    result = read(runs["qdagger-dqn"][0], "result.json")
    axes.axhline(result["teacher"]["return"]["mean"], color="black", ls="--", lw=1, label="teacher (seed 1)")
    axes.axhline(result["random"]["mean"], color="gray", ls=":", lw=1.2, label="random play")
    axes.set(title=title, xlabel="online agent steps", ylabel="return per game (raw score)")
    axes.spines[["top", "right"]].set_visible(False)


def main(campaign: Path) -> None:
    """One panel for each environment that ``campaign`` has runs of."""
    breakout = {
        "qdagger-dqn": sorted(campaign.glob("breakout-[0-9]")),
        "dqn": sorted(campaign.glob("breakout-dqn-*")),
    }
    cartpole = {student: sorted(campaign.glob(f"cartpole-{student}-*")) for student in COLOURS}
    panels = [
        (title, runs)
        for title, runs in (("Breakout, quick preset", breakout), ("CartPole, quick preset", cartpole))
        if runs["qdagger-dqn"]
    ]
    figure = Figure(figsize=(2 + 4.5 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, runs) in zip(grid, panels, strict=True):
        draw(axes, title, runs)
    handles, labels = grid[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(IMAGES / "qdagger-and-scratch.png", dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
