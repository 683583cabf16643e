"""The grid under TensorBoard's HParams: ``tensorboard --logdir DIR/tensorboard``, a session per cell.

The event files of the runs themselves know nothing of the comparison: its common score, the steps to the
teacher's level. They are in ``cells/`` and can be opened beside these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reincarnate.comparison.cells import Outcome
from reincarnate.report.page import flat
from reincarnate.wording import encodable

FOLDER = "tensorboard"
_METRICS = ("score", "final", "offline", "teacher_normalized", "human_normalized", "seconds")
_NESTED = ("agent_steps_to", "seconds_to")
#: What a cell's own columns say already.
_LEFT_OUT = ("seed", "teacher", "student", "versions.")


def write(folder: Path, document: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[Path]:
    """Write a folder of events for every finished cell, in place of what an earlier report wrote there."""
    differing = _differing(outcomes)
    written: list[Path] = []
    for cell, outcome, settings in zip(document["cells"], outcomes, differing, strict=True):
        if outcome.done:
            home = _free(folder / FOLDER / Path(cell["run"]).name, written)
            _write_session(home, _columns(cell) | settings, _metrics(cell))
            written.append(home)
    return written


def _differing(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Of each run, the settings that are not the same in all finished ones."""
    configs = [outcome.data.config if outcome.data and outcome.done else {} for outcome in outcomes]
    all_settings = [{name: str(value) for name, value in flat(config)} for config in configs]
    there = [settings for settings in all_settings if settings]
    names = {name for settings in there for name in settings if not name.startswith(_LEFT_OUT)}
    varied = {name for name in names if len({settings.get(name) for settings in there}) > 1}
    return [{name: settings.get(name, "none") for name in sorted(varied)} for settings in all_settings]


def _columns(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "teacher": encodable(cell["teacher"] or "none"),
        "student": cell["student"],
        "env": cell["env"],
        "seed": cell["seed"],
    }


def _metrics(cell: Mapping[str, Any]) -> dict[str, float | None]:
    nested = {f"{name}_{share}": value for name in _NESTED for share, value in cell[name].items()}
    return {f"cell/{name}": value for name, value in ({n: cell[n] for n in _METRICS} | nested).items()}


def _free(home: Path, taken: Sequence[Path]) -> Path:
    """Runs of several places can have one name."""
    number, free = 1, home
    while free in taken:
        number += 1
        free = home.with_name(f"{home.name}-{number}")
    return free


def _write_session(home: Path, columns: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
    from torch.utils.tensorboard import SummaryWriter  # imports tensorboard: slow
    from torch.utils.tensorboard.summary import hparams

    for old in home.glob("events.out.tfevents.*"):
        old.unlink()
    # TensorBoard takes its columns from the first session it finds: all name all metrics.
    parts = hparams(dict(columns), dict.fromkeys(metrics, 0.0))  # type: ignore[no-untyped-call]
    with SummaryWriter(str(home)) as writer:
        files = writer._get_file_writer()
        for part in parts[:2]:
            files.add_summary(part)
        for name, value in metrics.items():
            if value is not None:
                writer.add_scalar(name, value, 0)
        files.add_summary(parts[2])
