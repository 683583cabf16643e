"""From a name to an :class:`EnvSpec`, and from an EnvSpec to environments."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any

from reincarnate.envs import gym, pool
from reincarnate.envs.base import NEUTRAL, CheckedEnv, check_agreement, check_counts, check_spec
from reincarnate.errors import UserError
from reincarnate.types import Backend, EnvSpec, Wrappers

#: ``BreakoutNoFrameskip-v4``, ``ALE/Breakout-v5``, ``Breakout``: one game; how it is set up is the EnvSpec's.
_ATARI_NAME = re.compile(r"(?:ALE/)?(?P<game>\w+?)(?:NoFrameskip|Deterministic)?(?:-v[045])?", re.IGNORECASE)
_VERSION = re.compile(r"(?P<name>.+)-v(?P<version>\d+)")


def env_spec(env_id: str, **overrides: Any) -> EnvSpec:
    """The EnvSpec of a named environment, with its defaults except for ``overrides`` (fields of EnvSpec).

    An override of None keeps the default, and Atari's fields do not apply to vector observations. The name
    says which game it is, not its settings: ``ALE/Breakout-v5`` and ``BreakoutNoFrameskip-v4`` both give
    ``Breakout-v5`` without sticky actions.

    Raises:
        UserError: unknown environment (with the nearest known names), continuous actions, observations that
            are neither Atari images nor flat vectors, a field out of its range.
    """
    changes = {name: value for name, value in overrides.items() if value is not None}
    known = canonical_id(env_id)
    real = _default_spec(known, full_action_set=bool(changes.get("full_action_set", False)))
    if real.kind == "vector":
        changes = {name: value for name, value in changes.items() if name not in NEUTRAL}
    try:
        spec = dataclasses.replace(real, **changes)
    except ValueError as error:
        raise UserError(f"{env_id}: {error}") from None
    check_spec(spec)
    check_agreement(spec, real)
    return spec


def make_env(
    spec: EnvSpec,
    num_envs: int,
    seed: int,
    backend: Backend = "envpool",
    wrappers: Wrappers = "common",
    *,
    pictures: bool = False,
) -> CheckedEnv:
    """``num_envs`` environments, stepped together; also a context manager that closes them.

    Environment i is seeded with ``seed + i``: pools that must differ need seeds ``num_envs`` apart. Calling
    ``reset`` again gives other games. What EnvPool lacks and gymnasium has runs through gymnasium, where
    ``wrappers`` says whose are put around an Atari game. ``pictures`` makes the same games ones that can be
    looked at, with ``pictures()``, and slower.

    Raises:
        UserError: the EnvSpec does not fit the environment, or a number is out of its range.
    """
    check_spec(spec)
    check_counts(num_envs, seed)
    if backend == "gymnasium" or spec.env_id not in pool.known_ids():
        return gym.GymnasiumEnv(spec, num_envs, seed, pictures, wrappers)
    return (pool.PicturedPoolEnv if pictures else pool.PoolEnv)(spec, num_envs, seed)


def canonical_id(env_id: str) -> str:
    """The name under which EnvPool, else gymnasium, knows the environment.

    Raises:
        UserError: neither knows it; the nearest known names are given.
    """
    if env_id in pool.known_ids():
        return env_id
    game = _ATARI_NAME.fullmatch(env_id)
    found = game and _same_game(game["game"], pool.atari_ids())
    for names in (pool.known_ids(), gym.known_ids()):
        found = found or _same_name(env_id, names)
    if not found:
        raise UserError(f"no environment {env_id!r}{_nearest(env_id)}")
    return found


def current_id(env_id: str) -> str:
    """:func:`canonical_id`, or the newest version where gymnasium retired the one that is named.

    ``LunarLander-v2`` gives ``LunarLander-v3``, though EnvPool still plays the older one: both backends must.

    Raises:
        UserError: no version is known; the nearest known names are given.
    """
    parts = _VERSION.fullmatch(env_id)
    if parts and not _same_name(env_id, gym.known_ids()):
        newest = _VERSION.fullmatch(_same_name(parts["name"], gym.known_ids()) or "")
        if newest and int(newest["version"]) > int(parts["version"]):
            return canonical_id(newest[0])
    return canonical_id(env_id)


def _default_spec(env_id: str, full_action_set: bool) -> EnvSpec:
    if env_id not in pool.known_ids():
        return gym.default_spec(env_id)
    return pool.default_spec(env_id, full_action_set and env_id in pool.atari_ids())


def _same_game(game: str, atari_ids: Iterable[str]) -> str | None:
    """``space_invaders`` and ``spaceinvaders`` are ``SpaceInvaders-v5``."""
    wanted = game.replace("_", "").lower()
    return next((name for name in atari_ids if name.lower().removesuffix("-v5") == wanted), None)


def _same_name(env_id: str, names: Iterable[str]) -> str | None:
    """The name itself in any case, or its newest version where none is given."""
    wanted, newest = env_id.lower(), (-1, "")
    for name in names:
        if name.lower() == wanted:
            return name
        parts = _VERSION.fullmatch(name)
        if parts and parts["name"].lower() == wanted:
            newest = max(newest, (int(parts["version"]), name))
    return newest[1] or None


def _nearest(env_id: str) -> str:
    names = {name.lower(): name for name in (*gym.known_ids(), *pool.known_ids())}
    close = difflib.get_close_matches(env_id.lower(), names, n=3, cutoff=0.6)
    if not close:
        return "; use a name that EnvPool or gymnasium knows, e.g. Breakout-v5 or CartPole-v1"
    return f" (did you mean {', '.join(names[name] for name in close)}?)"
