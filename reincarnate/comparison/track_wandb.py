"""Weights & Biases: a run there for every finished run here, in a group per comparison.

Its own variables hold: WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY, and WANDB_MODE=offline, which writes
everything into the comparison's folder, for ``wandb sync`` later.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from reincarnate.comparison.trackers import STEPS, TrackedRun
from reincarnate.errors import UserError

PROJECT = "reincarnate"


class Wandb:
    """The adapter."""

    def __init__(self) -> None:
        """``UserError`` where wandb is not installed."""
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise UserError("--tracker wandb needs wandb: pip install 'reincarnate[wandb]'") from None

    def track(self, run: TrackedRun, folder: Path) -> str:
        """See :class:`~reincarnate.comparison.trackers.Tracker`; files go to ``folder/wandb``."""
        try:
            return self._track(run, folder)
        except self._wandb.Error as error:
            told = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(f"wandb: {told}; log in with `wandb login`, or set WANDB_MODE=offline") from None

    def _track(self, run: TrackedRun, folder: Path) -> str:
        # Of the machine and the code that write the report nothing is told: the runs were made elsewhere.
        settings = self._wandb.Settings(
            silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True
        )
        with self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=run.group,
            name=run.name,
            id=run.key,
            config=run.config,
            dir=folder,
            settings=settings,
        ) as there:
            for prefix, step in STEPS.items():
                there.define_metric(step)
                there.define_metric(f"{prefix}*", step_metric=step)
            for point in run.points:
                there.log(dict(point))
            there.summary.update(run.summary)
            return there.url or str(Path(there.dir).parent)
