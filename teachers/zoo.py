"""From a reference to a ``Teacher``, and which teachers there are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from reincarnate.teachers import hub
from reincarnate.teachers.claims import claimed_return
from reincarnate.teachers.formats import Companions, Hints, detect_and_read
from reincarnate.teachers.measured import recall
from reincarnate.teachers.reference import (
    BUNDLED,
    RUN_STUDENT,
    Reference,
    bundled_names,
    choose_file,
    files_below,
    local_card,
    local_file,
    parse_reference,
    split_name,
)
from reincarnate.teachers.teacher import Teacher, TeacherCard

Announce = Callable[[str], None]

Source = Literal["bundled", "hub", "cached"]

_CLEANRL_ENDING = ".cleanrl_model"
_ATARI_GAMES = ("Breakout", "Pong", "BeamRider")
_CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
#: CleanRL's repositories of algorithms that can be read here, ``cleanrl/{environment}-{script}-seed1``: those
#: of its Hub demo (docs/get-started/CleanRL_Huggingface_Integration_Demo.ipynb) and of benchmark/zoo.sh.
_CATALOGUE: tuple[tuple[str, str], ...] = (
    *((env, script) for script in ("dqn", "dqn_jax") for env in _CLASSIC),
    *(
        (f"{game}NoFrameskip-v4", script)
        for script in ("dqn_atari", "dqn_atari_jax")
        for game in _ATARI_GAMES
    ),
    ("SeaquestNoFrameskip-v4", "dqn_atari_jax"),
    *((f"{game}-v5", "ppo_atari_envpool_xla_jax_scan") for game in _ATARI_GAMES),
)
_ZOO_GAMES = (
    *("Asteroids", "BeamRider", "Breakout", "Enduro", "MsPacman", "Pong"),
    *("Qbert", "RoadRunner", "Seaquest", "SpaceInvaders"),
)
_ZOO_CLASSIC = ("Acrobot-v1", "CartPole-v1", "LunarLander-v2", "MountainCar-v0")
#: RL Zoo's trained agents with discrete actions and flat or Atari observations (its benchmark.md), named by
#: its rule ``sb3/{algorithm}-{environment}``.
_ZOO_CATALOGUE: tuple[str, ...] = tuple(
    f"sb3/{algorithm}-{env}"
    for algorithm in ("dqn", "ppo", "qrdqn")
    for env in (*_ZOO_CLASSIC, *(f"{game}NoFrameskip-v4" for game in _ZOO_GAMES))
)
#: Algorithms that name a repository with a Stable-Baselines3 archive, ``{algorithm}-{environment}``.
_ARCHIVED = frozenset({"dqn", "ppo", "qrdqn"})


@dataclass(frozen=True)
class _Found:
    """Weights on this machine and what is known of them."""

    path: Path
    resolved: str
    file: str
    revision: str | None
    card_text: str | None
    source: str | None  # name of the Hub repository, where there is one
    companions: Companions


def load_teacher(
    ref: str,
    *,
    env_id: str | None = None,
    device: torch.device | str = "cpu",
    announce: Announce | None = None,
) -> Teacher:
    """Resolve, download if need be, verify and read a teacher; nothing in its file is executed.

    Args:
        ref: a Hub repository (short form included), file, folder, run directory or ``bundled/NAME``.
        env_id: the environment it plays, where neither the file nor its name tells (or they are wrong).
        device: where its weights go.
        announce: told, a line at a time, what a reference resolved to and what is downloaded.

    Raises:
        UserError: the reference, the Hub, the file or the environment is not right; one line says which.
    """
    found = _locate(parse_reference(ref), announce)
    exp_name = found.path.stem if found.path.suffix == _CLEANRL_ENDING else None
    hints = Hints(env_id, found.source, exp_name, file=found.file, companions=found.companions)
    checkpoint = detect_and_read(found.path, hints)
    card = TeacherCard(
        ref=ref,
        resolved=found.resolved,
        revision=found.revision,
        file=found.file,
        sha256=hub.sha256_of(found.path),
        format=checkpoint.format,
        reported=checkpoint.reported
        or claimed_return(
            checkpoint.spec.env.env_id,
            checkpoint.spec.outputs,
            found.card_text,
            found.companions,
            found.file,
        ),
        assumed=checkpoint.assumed,
    )
    return Teacher(checkpoint.spec, card, checkpoint.state_dict).to(device)


def show_teacher(ref: str, *, env_id: str | None = None, announce: Announce | None = None) -> dict[str, Any]:
    """The JSON of ``teachers show``: reference, hash, format, architecture, environment, claim, assumptions.

    ``measured`` holds what was measured of this very policy on this machine, the newest first.

    Raises:
        UserError: as :func:`load_teacher`.
    """
    teacher = load_teacher(ref, env_id=env_id, announce=announce)
    return teacher.to_json() | {"measured": [each.to_dict() for each in recall(teacher)]}


def list_teachers(
    env: str | None = None, algorithm: str | None = None, source: Source | None = None
) -> list[dict[str, Any]]:
    """The JSON of ``teachers list``: rows of ``ref, env, algorithm, source, cached``; asks no network.

    Bundled teachers come first, then Hub repositories: those in the local cache that hold a teacher, and the
    known ones of CleanRL and RL Zoo.

    Args:
        env: only this environment, in any generation's name or version (``Breakout``, ``ALE/Breakout-v5``).
        algorithm: only this one, e.g. ``dqn``.
        source: only ``bundled`` ones, those of the ``hub``, or what is ``cached`` (bundled ones are).
    """
    bundled = [_bundled_row(name) for name in bundled_names()]
    cached = {each.repo for each in hub.cached_repositories() if _holds_teacher(each)}
    known = {f"cleanrl/{name}-{script}-seed1" for name, script in _CATALOGUE} | set(_ZOO_CATALOGUE)
    rows = bundled + [_hub_row(repo, repo in cached) for repo in sorted(known | cached)]
    return [row for row in rows if _wanted(row, env, algorithm, source)]


def _wanted(row: dict[str, Any], env: str | None, algorithm: str | None, source: Source | None) -> bool:
    if env is not None and _game(row["env"] or "") != _game(env):
        return False
    if algorithm is not None and _plain(row["algorithm"] or "") != _plain(algorithm):
        return False
    return source is None or (row["cached"] if source == "cached" else row["source"] == source)


def _game(env: str) -> str:
    """An environment's name without generation and version."""
    return _plain(re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-v\d+)?$", "", env, flags=re.IGNORECASE))


def _plain(name: str) -> str:
    """``QR-DQN`` and ``qrdqn`` are one."""
    return re.sub(r"[-_ ]", "", name).lower()


def _locate(reference: Reference, announce: Announce | None) -> _Found:
    if reference.kind == "hub":
        got = hub.find_and_download(reference, announce=announce)
        return _Found(got.path, got.repo, got.file, got.revision, got.card_text, got.repo, got.companions)
    path = local_file(reference)
    folder = reference.path if reference.path is not None and reference.path.is_dir() else path.parent
    resolved = f"bundled/{reference.repo}" if reference.kind == "bundled" else str(folder)
    file = path.relative_to(folder).as_posix()
    return _Found(path, resolved, file, None, local_card(path), None, local_companions(folder))


def local_companions(folder: Path) -> Companions:
    """The files of a folder on this machine, and one level below it."""
    names = tuple(each.relative_to(folder).as_posix() for each in files_below(folder))
    return Companions(names, lambda name: folder / name)


def _bundled_row(name: str) -> dict[str, Any]:
    folder = BUNDLED / name
    path = folder / choose_file([each.name for each in folder.iterdir()], name)
    spec = detect_and_read(path, Hints()).spec
    return _row(f"bundled/{name}", spec.env.env_id, spec.algorithm, "bundled", True)


def _hub_row(repo: str, cached: bool) -> dict[str, Any]:
    env, script = split_name(repo.partition("/")[2])
    env = env and env.replace("NoFrameskip-v4", "-v5")  # EnvPool's name of the same game
    return _row(repo, env, script and script.partition("_")[0], "hub", cached)


def _row(ref: str, env: str | None, algorithm: str | None, source: str, cached: bool) -> dict[str, Any]:
    return {"ref": ref, "env": env, "algorithm": algorithm, "source": source, "cached": cached}


def _holds_teacher(cached: hub.Cached) -> bool:
    """Whether a cached repository is one of ours, CleanRL's or RL Zoo's; people cache other models too."""
    if any(name.endswith(_CLEANRL_ENDING) or name == RUN_STUDENT for name in cached.files):
        return True
    algorithm = split_name(cached.repo.partition("/")[2])[1]
    return algorithm in _ARCHIVED and any(name.endswith(".zip") for name in cached.files)
