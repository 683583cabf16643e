"""The run directory's small files: who owns it, its configuration, and which teacher it was made with."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from reincarnate import files
from reincarnate.config import RunConfig
from reincarnate.errors import UserError
from reincarnate.teachers.teacher import Teacher

#: What a run writes besides config.json, and teacher.json, which a kill at the start leaves alone behind.
_WRITTEN = (
    *("README.md", "result.json", "curves.json", "student.safetensors", "checkpoint", "report.html"),
    *("curves.png", "curves.svg", "losses.png", "losses.svg"),
)

#: Makes a folder a comparison.
GRID_FILE = "grid.json"


def lock(folder: Path, name: str = "run.lock") -> FileLock:
    """Own ``folder`` until the lock is released (or the process ends); ``name`` is the lock's file there.

    Raises:
        UserError: another process owns it.
    """
    held = FileLock(folder / name)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder} is in use by another reincarnate process; wait for it to end") from None
    return held


def refuse_used(folder: Path) -> None:
    """Refuse to write over anything.

    Raises:
        UserError: the folder holds a run or a file of a name that a run writes, or is not a folder.
    """
    if (folder / "config.json").exists():
        raise UserError(
            f"{folder} already holds a run; choose another --out, or continue it with --resume {folder}"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder; choose another --out")
    there = [name for name in _WRITTEN if (folder / name).exists()]
    there += [path.name for path in folder.glob("events.out.tfevents.*")]
    if there:
        raise UserError(f"{folder} already holds {there[0]}, which a run writes; choose another --out")


def free_folder(env_id: str, config: RunConfig) -> Path:
    """``runs/<env>-<student>-s<seed>-<time>``, a name not taken yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{env_id}-{config.student}-s{config.seed}-{stamp}")
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def write_start(
    folder: Path,
    config: RunConfig,
    teacher: dict[str, Any] | None,
    versions: dict[str, str],
    ranks: int = 1,
) -> None:
    """``teacher.json``, then ``config.json``, which makes the folder a run."""
    several = {"ranks": ranks} if ranks > 1 else {}
    if teacher is not None:
        files.write_json(folder / "teacher.json", teacher)
    files.write_json(folder / "config.json", config.to_dict() | {"versions": versions} | several)


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run in ``folder``.

    Raises:
        UserError: no run there, or its configuration is damaged or of another version.
    """
    if not (folder / "config.json").exists():
        raise UserError(_no_run(folder))
    values = files.read_json(folder / "config.json")
    if not isinstance(values, dict):
        raise UserError(f"{folder / 'config.json'} is not the configuration of a run; it is damaged")
    values.pop("versions", None)
    values.pop("ranks", None)
    return RunConfig.from_dict(values)


def _no_run(folder: Path) -> str:
    """What is there instead of a run to resume, and what to do."""
    if not folder.exists():
        return (
            f"there is no folder {str(folder)!r}{files.did_you_mean(folder)}; --resume takes a run's folder"
        )
    if not folder.is_dir():
        return f"{folder} is a file; --resume takes the folder of a run, with its config.json"
    if (folder / GRID_FILE).exists():
        return f"{folder} holds a comparison; go on with it by `reincarnate compare --resume {folder}`"
    runs = sorted(each.parent for each in folder.glob("*/config.json"))
    if runs:
        return f"{folder} is no run, it holds some: {', '.join(map(str, runs[:6]))}; --resume one of them"
    if any((folder / name).exists() for name in (*_WRITTEN, "teacher.json")):
        return f"{folder} has lost its config.json; put it back or start a new run elsewhere"
    return f"{folder} holds no run to resume (no config.json); start one with --out {folder}"


def check_same_ranks(folder: Path, ranks: int) -> None:
    """Refuse to go on with another number of processes: each has its part of D_S and its random numbers.

    Raises:
        UserError: the run was started with another number of ranks.
    """
    values = files.read_json(folder / "config.json")
    began = values.get("ranks", 1) if isinstance(values, dict) else 1
    if began != ranks:
        how = f"torchrun --nproc-per-node={began} -m reincarnate" if began != 1 else "reincarnate"
        raise UserError(
            f"{folder} was started with {began} rank{'s'[: began != 1]} and cannot go on with {ranks}; "
            f"resume it with `{how} run --resume {folder}`"
        )


def read_teacher(folder: Path) -> dict[str, Any] | None:
    """``teacher.json``, or None for a run without a teacher.

    Raises:
        UserError: it is damaged, or missing though the run has a teacher.
    """
    path = folder / "teacher.json"
    if not path.exists():
        if read_config(folder).teacher is not None:  # which file it was, only teacher.json says
            raise UserError(f"{path} is missing; put it back or start a new run")
        return None
    described = files.read_json(path)
    if not isinstance(described, dict) or not {"resolved", "file", "sha256", "revision", "ref"} <= set(
        described
    ):
        raise UserError(f"{path} does not describe a teacher; it is damaged")
    return described


def exact_reference(described: dict[str, Any]) -> str:
    """A reference to exactly the file that ``teacher.json`` describes, from any folder and at its commit."""
    resolved, file = described["resolved"], described["file"]
    if described["revision"] is not None:
        return f"{resolved}@{described['revision']}:{file}"
    return resolved if resolved.startswith("bundled/") else str(Path(resolved) / file)


def check_same_teacher(folder: Path, recorded: dict[str, Any], teacher: Teacher) -> None:
    """Refuse to go on with another policy.

    Raises:
        UserError: the teacher's file is not the recorded one, or the statistics beside it are others.
    """
    then, now = str(recorded["sha256"]), teacher.card.sha256
    if then != now:
        raise UserError(
            f"the teacher of {folder} has changed since the run began (sha256 {then[:12]}... then, "
            f"{now[:12]}... now); put the old file back or start a new run"
        )
    if recorded.get("policy_sha256", teacher.policy_sha256) != teacher.policy_sha256:
        raise UserError(
            f"the teacher of {folder} has changed since the run began: its file is the same, the "
            "statistics of observations beside it are not; put the old ones back or start a new run"
        )
