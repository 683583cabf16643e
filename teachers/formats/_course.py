"""What the Hugging Face course's PPO leaves beside its ``model.pt``: ``results.json``.

``{"env_id", "mean_reward", "std_reward", "n_evaluation_episodes", "eval_datetime"}``, of games in which the
actions were sampled (unit 8, ``package_to_hub``).
"""

from __future__ import annotations

import json
import math
from pathlib import PurePosixPath
from typing import Any

from reincarnate.errors import UserError
from reincarnate.teachers.formats._checkpoint import Hints
from reincarnate.teachers.formats._cleanrl import Beside
from reincarnate.teachers.teacher import Reported

RESULTS = "results.json"
_MAX_BYTES = 65_536
_MAX_GAMES = 1_000_000


def results_beside(hints: Hints) -> Beside:
    """Environment and claimed return in a ``results.json`` in the checkpoint's own folder, if it is one.

    A file that says something else, or is no JSON, says nothing: it is not what is being read.
    """
    values = _results(hints)
    env_id, games = values.get("env_id"), values.get("n_evaluation_episodes")
    if not isinstance(env_id, str) or not env_id:
        return Beside()
    mean, std = _number(values.get("mean_reward")), _number(values.get("std_reward"))
    count = games if type(games) is int and 0 < games <= _MAX_GAMES else None
    reported = None if mean is None else Reported(mean, RESULTS, std, count, "sample")
    return Beside(env_id, f"{RESULTS} beside it", reported)


def _results(hints: Hints) -> dict[str, Any]:
    if hints.companions is None or hints.file is None:
        return {}
    name = str(PurePosixPath(hints.file).with_name(RESULTS))
    if name not in hints.companions.names:
        return {}
    try:
        with hints.companions.path_of(name).open("rb") as file:
            values = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError, UserError):
        return {}
    return values if isinstance(values, dict) else {}


def _number(value: Any) -> float | None:
    """A finite number; numpy's were written as text by some versions of the course."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
