"""Dopamine's JAX agents with action-values: ``ckpt.N``, read without JAX or TensorFlow.

Agents: DQN, C51 and Rainbow, full Rainbow (dueling, noisy), QR-DQN, IQN; Nature and Impala CNNs, and the
classic-control networks. The checkpoint says neither game nor settings: the game's name is taken from the
folders around it (``Breakout/1/ckpt.399``), its settings are those of Dopamine's sticky-action protocol.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import torch

from reincarnate.envs import env_spec
from reincarnate.errors import UserError
from reincarnate.teachers.formats import _dopamine_networks as networks
from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._dopamine_bundle import looks_like_bundle, read_parameters
from reincarnate.teachers.formats._dopamine_gin import Gin, gin_beside
from reincarnate.teachers.formats._environment import fit_environment, misfit
from reincarnate.teachers.formats._weights import Weights, assemble
from reincarnate.teachers.teacher import TeacherSpec
from reincarnate.types import EnvSpec

NAME = "dopamine"
SUMMARY = "Dopamine in JAX: a pickled bundle, ckpt.N"

#: ``AtariPreprocessing`` and the runner: sticky actions, whole games, no reset tricks.
_ATARI: dict[str, Any] = {
    "frame_skip": 4,
    "noop_max": 1,
    "fire_reset": False,
    "sticky_probability": 0.25,
    "episodic_life": False,
    "reward_clip": True,
    "max_agent_steps": 27_000,
}
_PROTOCOL = "Dopamine's Atari protocol"
_NO_NOOPS = f"{_PROTOCOL} has no random no-ops; one is the least that can be asked for"
#: Lowest and highest observation that the classic-control networks scale to -1..1.
_BOUNDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]] | None] = {
    "CartPole": (
        (-2.4, -5.0, -torch.pi / 12, -torch.pi * 2),
        (2.4, 5.0, torch.pi / 12, torch.pi * 2),
    ),
    "Acrobot": ((-1.0, -1.0, -1.0, -1.0, -5.0, -5.0), (1.0, 1.0, 1.0, 1.0, 5.0, 5.0)),
    "MountainCar": ((-1.2, -0.07), (0.6, 0.07)),
    "LunarLander": None,  # taken as it is
}
_FOLDERS_UP = 4  # how far from the file the game's name may stand


def matches(path: Path) -> bool:
    """Whether the file is a pickle that names a bundle's entries."""
    return looks_like_bundle(path)


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        UserError: damaged, hostile, an agent without action-values, or at odds with its environment.
    """
    arrays = read_parameters(path)
    body = networks.body_of(path, arrays)
    gin = gin_beside(hints)
    game, why = _environment(path, hints, gin, body.is_image)
    head = networks.head_of(path, arrays, body, game.num_actions, gin)
    weights = assemble(networks.layers_of(path, arrays, body, head), hints.image_size)
    if body.network == "iqn":
        networks.reorder_embedding(weights)
    if not body.is_image:
        _normalise(path, weights, game)
    overrides, assumed = _settings(weights, gin) if body.is_image else ({}, {})
    env = fit_environment(
        path, game.env_id, weights.obs_shape, weights.num_outputs, overrides, asked=hints.env_id is not None
    )
    if env.full_action_set:
        assumed["full_action_set"] = f"the network has {weights.num_outputs} outputs per value"
    spec = TeacherSpec(env, "q_values", weights.network, weights.options, head.algorithm)
    return Checkpoint(spec, weights.state_dict, NAME, assumed={"env_id": why} | assumed | head.assumed)


def _settings(weights: Weights, gin: Gin) -> tuple[dict[str, Any], dict[str, str]]:
    """EnvSpec fields of an Atari agent, and why each is believed."""
    overrides = _ATARI | {"obs_shape": weights.obs_shape}
    assumed = dict.fromkeys(_ATARI, _PROTOCOL) | {"noop_max": _NO_NOOPS}
    if gin.sticky is not None:
        overrides["sticky_probability"] = 0.25 if gin.sticky else 0.0
        assumed["sticky_probability"] = gin.source or ""
    if weights.image_sides:
        low, high = weights.image_sides
        fits = f"the weights fit square images of {low} to {high} pixels"
        assumed["obs_shape"] = f"{_PROTOCOL}; {fits}"
    return overrides, assumed


def _environment(path: Path, hints: Hints, gin: Gin, is_image: bool) -> tuple[EnvSpec, str]:
    """The environment with its defaults, and where its name was found."""
    if hints.env_id:
        return _known(path, hints.env_id, is_image, True), "--env"
    if gin.game:
        return _known(path, gin.game, is_image, False), f"{gin.source}"
    for kind, name in _names(path, hints):
        env = _named(name)
        if env is not None and (env.kind == "atari") == is_image:
            return env, f"the {kind} name {name!r}"
    raise UserError(
        f"{path}: nothing tells which game this teacher plays (a folder named after it would, as in "
        "Breakout/1/ckpt.399); name it with --env"
    )


def _known(path: Path, name: str, is_image: bool, asked: bool) -> EnvSpec:
    try:
        env = env_spec(name)
    except UserError as error:
        raise UserError(f"--env: {error}" if asked else f"{path}: {error}") from None
    if (env.kind == "atari") != is_image:
        sees = "images" if is_image else "vectors"
        found = f"the network takes {sees}, not what {env.env_id} gives"
        raise misfit(path, env.env_id, found, asked)
    return env


def _names(path: Path, hints: Hints) -> list[tuple[str, str]]:
    """Names that may tell, the nearest first: folders around the file, then the repository."""
    inside = PurePosixPath(hints.file or "").parent.parts[::-1]
    folders = inside if hints.source else path.absolute().parent.parts[::-1][:_FOLDERS_UP]
    names = [("folder", name) for name in folders[:_FOLDERS_UP]]
    if hints.source:
        names.append(("repository", hints.source.rsplit("/", 1)[-1]))
    return names


def _named(name: str) -> EnvSpec | None:
    """The environment that a name or one of its parts is: ``Breakout``, ``Pong-v5``, ``c51_pong``."""
    parts = (name, *name.replace("_", "-").split("-"))
    return next((env for part in parts if (env := _env_or_none(part))), None)


def _env_or_none(name: str) -> EnvSpec | None:
    try:
        return env_spec(name)
    except UserError:
        return None


def _normalise(path: Path, weights: Weights, game: EnvSpec) -> None:
    """Fold Dopamine's scaling of classic-control observations into the first layer."""
    name = game.env_id.partition("-")[0]
    if name not in _BOUNDS:
        raise UserError(
            f"{path}: {game.env_id}: Dopamine's classic-control settings are for {', '.join(_BOUNDS)}; how "
            "observations of another environment were scaled is not in the file"
        )
    bounds = _BOUNDS[name]
    if bounds is not None and weights.obs_shape == (len(bounds[0]),):
        networks.fold_normalisation(weights, torch.tensor(bounds[0]), torch.tensor(bounds[1]))
