"""The few lines of a ``.gin`` file beside a Dopamine checkpoint that say what the checkpoint does not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from reincarnate.teachers.formats._checkpoint import Hints

Agent = Literal["dqn", "rainbow", "quantile", "implicit"]
_MAX_BYTES = 65_536
_BINDING = re.compile(r"\s*(?:[\w/]+\.)*(?P<owner>\w+)\.(?P<name>\w+)\s*=\s*(?P<value>[^#\n]*)")
_AGENTS: dict[str, Agent] = {
    "JaxDQNAgent": "dqn",
    "JaxRainbowAgent": "rainbow",
    "JaxFullRainbowAgent": "rainbow",
    "JaxQuantileAgent": "quantile",
    "JaxImplicitQuantileAgent": "implicit",
}
_MAX_ATOMS = 10_000


@dataclass(frozen=True)
class Gin:
    """What the settings say; None where they do not."""

    agent: Agent | None = None
    atoms: int | None = None
    v_min: float | None = None
    v_max: float | None = None
    game: str | None = None
    sticky: bool | None = None
    source: str | None = None  # name of the file


def gin_beside(hints: Hints) -> Gin:
    """The settings in the nearest folder, at or above the checkpoint's, that has just one ``.gin`` file."""
    if hints.companions is None or hints.file is None:
        return Gin()
    for folder in PurePosixPath(hints.file).parents:
        names = [
            name
            for name in hints.companions.names
            if name.endswith(".gin") and PurePosixPath(name).parent == folder
        ]
        if len(names) == 1:
            with hints.companions.path_of(names[0]).open("rb") as file:
                return parse_gin(file.read(_MAX_BYTES).decode("utf-8", errors="replace"), names[0])
    return Gin()


def parse_gin(text: str, source: str) -> Gin:
    """Read as text, line by line; nothing is imported or evaluated."""
    found: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        if match := _BINDING.match(line):
            found[match["owner"], match["name"]] = match["value"].strip().strip("'\"")
    agents = {_AGENTS[owner]: owner for owner, _ in found if owner in _AGENTS}
    distributional = {agent: owner for agent, owner in agents.items() if agent != "dqn"}
    agent, owner = next(iter((distributional or agents).items()), (None, ""))
    atoms = _number(found.get((owner, "num_atoms")))
    sticky = found.get(("create_atari_environment", "sticky_actions"))
    return Gin(
        agent,
        int(atoms) if atoms is not None and 1 <= atoms <= _MAX_ATOMS else None,
        _number(found.get((owner, "vmin"))),
        _number(found.get((owner, "vmax"))),
        found.get(("create_atari_environment", "game_name"))
        or found.get(("create_gym_environment", "environment_name")),
        {"True": True, "False": False}.get(sticky or ""),
        source,
    )


def _number(text: str | None) -> float | None:
    try:
        value = None if text is None else float(text)
    except ValueError:
        return None
    return value if value is not None and abs(value) < float("inf") else None
