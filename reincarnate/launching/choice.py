"""Where the cells of a comparison run: on this machine, a Ray cluster, or Slurm."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell
from reincarnate.launching.local import LocalLauncher

Name = Literal["local", "ray", "slurm"]
NAMES: tuple[Name, ...] = ("local", "ray", "slurm")
#: Of the process that launches, which the cells' machines are given: where artefacts are cached, and where
#: downloads are. Tokens are not: each machine has its own.
_PASSED_ON = ("REINCARNATE_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT")


class Launcher(Protocol):
    """Runs cells somewhere."""

    def run(self, cells: tuple[Cell, ...]) -> dict[str, str]:
        """Run what is not finished; the failed cells by name, with the reason in a line."""


@dataclass(frozen=True)
class Launch:
    """How and where cells are run."""

    launcher: Name = "local"
    cpus_per_cell: int | None = None  # local: an equal share; ray: 1; slurm: its default
    gpus_per_cell: float | None = None  # local and ray: one where there are any; slurm: none
    ray_address: str | None = None  # of the cluster; RAY_ADDRESS or the one that runs here
    slurm: Mapping[str, str] = field(default_factory=dict)  # options of sbatch by their long names
    wait: bool = True  # slurm: for the jobs

    def __post_init__(self) -> None:
        if self.launcher not in NAMES:
            raise UserError(f"no launcher {self.launcher!r}; known are {', '.join(NAMES)}")
        if self.cpus_per_cell is not None and self.cpus_per_cell < 1:
            raise UserError(f"--cpus-per-cell {self.cpus_per_cell}: a cell takes at least one")
        if self.gpus_per_cell is not None and not 0 <= self.gpus_per_cell < math.inf:
            raise UserError(f"--gpus-per-cell {self.gpus_per_cell:g}: give a number, 0 or more")
        of_others: dict[str, tuple[object, Name]] = {
            "--ray-address": (self.ray_address, "ray"),
            "--slurm": (self.slurm, "slurm"),
            "--no-wait": (not self.wait, "slurm"),
        }
        for option, (given, owner) in of_others.items():
            if given and owner != self.launcher:
                raise UserError(f"{option} goes with --launcher {owner}; this is --launcher {self.launcher}")

    def make(self, folder: Path, jobs: int | None, announce: Callable[[str], None]) -> Launcher:
        """The launcher for the comparison in ``folder``; at most ``jobs`` cells at a time.

        Raises:
            UserError: a package or a program for it is missing; more GPUs than there are.
        """
        cpus, gpus = self.cpus_per_cell, self.gpus_per_cell
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        if self.launcher == "ray":
            from reincarnate.launching.on_ray import RayLauncher

            return RayLauncher(
                folder,
                announce,
                address=self.ray_address,
                jobs=jobs,
                cpus=cpus,
                gpus=gpus,
                environment=environment,
            )
        if self.launcher == "slurm":
            from reincarnate.launching.on_slurm import SlurmLauncher

            return SlurmLauncher(
                folder,
                announce,
                jobs=jobs,
                cpus=cpus,
                gpus=gpus,
                options=self.slurm,
                wait=self.wait,
                environment=environment,
            )
        return LocalLauncher(folder, jobs or 1, announce, cpus=cpus, gpus=gpus)
