"""The return that somebody claims for a checkpoint, and whether a measurement agrees with it.

Claims stand beside the weights, in files that anybody can write: a model card's ``model-index`` and the
``results.json`` of RL Zoo and course repositories. Whatever is odd there is no claim; it never stops a load.

The most telling source wins: what the checkpoint itself holds (its reader says so), then ``results.json``,
which knows the number of games and the acting rule, then the card. The source is recorded with the claim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import scipy.stats
import yaml

from reincarnate.envs.make import canonical_id
from reincarnate.errors import UserError
from reincarnate.teachers.formats import Companions
from reincarnate.teachers.teacher import Reported
from reincarnate.types import OutputKind, Returns

#: Games assumed behind a claim that does not say how many.
GAMES_IF_UNSAID = 10
#: A measurement agrees with a claim above this p-value.
LEVEL = 0.05
RESULTS = "results.json"
_SETTINGS = "config.yml"
_METRIC = "mean_reward"
_MAX_CARD_CHARACTERS = 200_000
_MAX_METADATA_CHARACTERS = 50_000
_MAX_BRACKETS = 1_000
_MAX_RESULTS = 50
_MAX_NAME_CHARACTERS = 100
_MAX_FILE_BYTES = 100_000
_MAX_GAMES = 10_000_000
_SAME, _VERSION, _UNKNOWN, _ELSEWHERE = range(4)  # a claim's environment beside the teacher's
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_MEAN_AND_STD = re.compile(rf"\s*({_NUMBER})\s*(?:(?:\+/-|\+-|±)\s*({_NUMBER})\s*)?")
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
#: CleanRL's cards end with the script's arguments; its DQN and C51 are evaluated with the last epsilon.
_CLEANRL_EPSILON = re.compile(rf"^[ {{]*'end_e': ({_NUMBER})[,}}]", re.MULTILINE)
#: An entry of RL Zoo's config.yml: ``- - exploration_final_eps`` over ``  - 0.04``.
_ZOO_EPSILON = re.compile(rf"- exploration_final_eps[ \t]*\r?\n[ \t]*- ({_NUMBER})[ \t]*\r?$", re.MULTILINE)


def claimed_return(
    env_id: str,
    outputs: OutputKind,
    card_text: str | None,
    companions: Companions | None = None,
    file: str | None = None,
) -> Reported | None:
    """What is claimed beside a checkpoint, or None.

    Args:
        env_id: the environment it plays; claims for others do not count.
        outputs: what its network gives; tells what an undeterministic evaluation means.
        card_text: the model card.
        companions: the files beside the checkpoint.
        file: the checkpoint among them; a ``results.json`` nearer to it comes first.
    """
    on_card = card_claim(card_text, env_id, outputs)
    stored = _results_claim(env_id, outputs, companions, file or "")
    if stored is None:
        return on_card
    if stored.std is None and on_card is not None and abs(stored.mean - on_card.mean) <= 0.0051:
        return dataclasses.replace(stored, std=on_card.std, source=f"{stored.source} and {on_card.source}")
    return stored


def card_claim(card_text: str | None, env_id: str, outputs: OutputKind) -> Reported | None:
    """The ``mean_reward`` of a model card's ``model-index``, e.g. ``295.55 +/- 12.30``.

    Of several results the first one counts that names this environment, else another version of it. A name
    that is no environment's (a wrapper's, a typing error) is believed where it is the only one.
    """
    metadata = _front_matter(card_text)
    claims = list(itertools.islice(_card_results(metadata), _MAX_RESULTS))
    fitting = [(_distance(name, env_id), value) for name, value in claims]
    chosen = min(fitting, key=lambda each: each[0], default=(_ELSEWHERE, None))
    if chosen[0] == _ELSEWHERE or (chosen[0] == _UNKNOWN and len(claims) > 1):
        return None
    claim = parse_claim(chosen[1], "model card")
    if claim is None or metadata.get("library_name") != "cleanrl":
        return claim
    return dataclasses.replace(claim, act=_cleanrl_rule(card_text or "", outputs))


def parse_claim(value: Any, source: str) -> Reported | None:
    """A claim from ``295.55 +/- 12.30``, ``20 ± 1``, ``500`` or a number; None from anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _reported(_number(value), None, source)
    match = _MEAN_AND_STD.fullmatch(value) if isinstance(value, str) and len(value) < 100 else None
    if match is None:
        return None
    return _reported(_number(match[1]), _number(match[2]), source)


def p_value(measured: Returns, claim: Reported) -> float:
    """Welch's test of the two means: how likely a difference like this is if there is none.

    A claim without a number of games counts as 10, one without a deviation as one of the measured deviation.
    """
    std = measured.std if claim.std is None else claim.std
    if (measured.std == 0 and std == 0) or measured.n < 2:
        return float(math.isclose(measured.mean, claim.mean, abs_tol=0.0051))  # claims are rounded
    games = max(2, claim.n or GAMES_IF_UNSAID)
    test = scipy.stats.ttest_ind_from_stats(
        measured.mean, measured.std, measured.n, claim.mean, std, games, equal_var=False
    )
    return float(test.pvalue)


def agrees(measured: Returns, claim: Reported | None) -> bool | None:
    """Whether a measurement agrees with a claim; None without a claim, its deviation or a second game."""
    if claim is None or claim.std is None or measured.n < 2:
        return None
    return p_value(measured, claim) > LEVEL


def _reported(mean: float | None, std: float | None, source: str, **more: Any) -> Reported | None:
    if mean is None:
        return None
    return Reported(mean, source, None if std is None or std < 0 else std, **more)


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


# The model card


class _PlainLoader(yaml.SafeLoader):
    """YAML's plain values; no merge keys, by which a small file becomes a huge one."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Nothing is merged; ``<<`` then has no meaning and refuses the document."""


def _front_matter(card_text: str | None) -> dict[str, Any]:
    """The metadata of a card; empty where there is none that can be read."""
    match = _FRONT_MATTER.match((card_text or "")[:_MAX_CARD_CHARACTERS])
    if match is None or len(match[1]) > _MAX_METADATA_CHARACTERS:
        return {}
    if match[1].count("[") + match[1].count("{") > _MAX_BRACKETS:  # yaml's time grows with their square
        return {}
    try:
        metadata = yaml.load(match[1], _PlainLoader)
    except Exception:  # yaml raises errors of many kinds on hostile text; all mean: nothing is claimed
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _card_results(metadata: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Environment as the card names it (or an empty text) and value of every ``mean_reward``."""
    for model in _dicts(metadata.get("model-index")):
        for result in _dicts(model.get("results")):
            dataset = result.get("dataset")
            names = [dataset.get("type"), dataset.get("name")] if isinstance(dataset, dict) else []
            env = next((name for name in names if isinstance(name, str)), "")
            for metric in _dicts(result.get("metrics")):
                if metric.get("type", metric.get("name")) == _METRIC:
                    yield env, metric.get("value")


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _distance(name: str, env_id: str) -> int:
    """How far what a claim calls its environment is from ``env_id``."""
    if name == env_id:
        return _SAME
    try:
        found = canonical_id(name) if 0 < len(name) <= _MAX_NAME_CHARACTERS else None
    except UserError:
        found = None
    if found is None:
        return _UNKNOWN
    if found == env_id:
        return _SAME
    return _VERSION if found.rpartition("-v")[0] == env_id.rpartition("-v")[0] else _ELSEWHERE


def _cleanrl_rule(card_text: str, outputs: OutputKind) -> str | None:
    if outputs == "policy_logits":
        return "sample"
    return _epsilon_rule(_CLEANRL_EPSILON.search(card_text[:_MAX_CARD_CHARACTERS]))


def _epsilon_rule(match: re.Match[str] | None) -> str | None:
    epsilon = None if match is None else _number(match[1])
    return None if epsilon is None or not 0 <= epsilon <= 1 else f"epsilon={epsilon:g}"


# results.json


def _results_claim(
    env_id: str, outputs: OutputKind, companions: Companions | None, file: str
) -> Reported | None:
    """The claim of the nearest ``results.json``."""
    text = _companion_text(companions, file, RESULTS)
    if text is None:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    env = values.get("env_id")
    if isinstance(env, str) and _distance(env, env_id) == _ELSEWHERE:
        return None
    games = values.get("n_eval_episodes", values.get("n_evaluation_episodes"))
    counted = isinstance(games, int) and not isinstance(games, bool) and 1 <= games <= _MAX_GAMES
    return _reported(
        _number(values.get("mean_reward")),
        _number(values.get("std_reward")),
        RESULTS,
        n=games if counted else None,
        act=_stored_rule(values.get("is_deterministic"), outputs, companions, file),
    )


def _stored_rule(
    deterministic: Any, outputs: OutputKind, companions: Companions | None, file: str
) -> str | None:
    """Stable-Baselines3's meaning of (un)deterministic: a DQN explores with its last epsilon."""
    if deterministic is True:
        return "greedy"
    if deterministic is not False:
        return None
    if outputs == "policy_logits":
        return "sample"
    return _epsilon_rule(_ZOO_EPSILON.search(_companion_text(companions, file, _SETTINGS) or ""))


def _companion_text(companions: Companions | None, file: str, name: str) -> str | None:
    """The text of a small file of this name, the one nearest to the checkpoint ``file``."""
    folder = PurePosixPath(file).parent
    places = [str(place / name) for place in (folder, *folder.parents)]
    for place in places if companions is not None else ():
        if companions is not None and place in companions.names:
            with contextlib.suppress(UserError, OSError, UnicodeDecodeError):  # gone, or not served
                return _small_text(companions.path_of(place))
            return None
    return None


def _small_text(path: Path) -> str | None:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    return data.decode("utf-8") if len(data) <= _MAX_FILE_BYTES else None
