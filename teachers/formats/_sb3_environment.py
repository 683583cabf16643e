"""Which environment a Stable-Baselines3 model plays, set up as its training set it up.

The name stands in RL Zoo's ``args.yml``, else in the names around the model. For Atari the wrapper's
arguments give the preprocessing (its defaults where nothing states them), and the name's generation says
whether actions stick and frames are skipped below the wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from reincarnate.envs import current_id, env_spec
from reincarnate.errors import UserError
from reincarnate.teachers.formats._checkpoint import Hints
from reincarnate.teachers.formats._environment import fit_environment
from reincarnate.teachers.formats._sb3_zoo import Zoo
from reincarnate.teachers.formats._weights import Weights
from reincarnate.types import EnvSpec

_WRAPPER = "AtariWrapper"
#: Wrappers that change nothing a policy sees.
_HARMLESS = frozenset(
    {"Monitor", "RecordEpisodeStatistics", "RecordVideo", "OrderEnforcing", "PassiveEnvChecker"}
)
#: Arguments of AtariWrapper: name -> (field of an EnvSpec, default).
_WRAPPER_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "noop_max": ("noop_max", 30),
    "frame_skip": ("frame_skip", 4),
    "terminal_on_life_loss": ("episodic_life", True),
    "clip_reward": ("reward_clip", True),
    "action_repeat_probability": ("sticky_probability", 0.0),
    "screen_size": ("obs_shape", 84),
}
#: Arguments of an environment that change nothing it does.
_RENDERING = frozenset({"render_mode", "render", "render_fps", "disable_env_checker"})
#: ``ALE/Breakout-v5``, ``BreakoutNoFrameskip-v4``, ``Breakout-v4``: three generations of one game.
_GENERATION = re.compile(
    r"(?P<ale>ALE/)?\w+?(?P<kind>NoFrameskip|Deterministic|)-v(?P<version>\d+)", re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*-v\d+")
_DEFAULT = "Stable-Baselines3's AtariWrapper"


@dataclass
class _Settings:
    """Fields of an EnvSpec and why each is believed."""

    fields: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, why: str) -> None:
        """One field."""
        self.fields[name], self.why[name] = value, why


def sb3_environment(path: Path, hints: Hints, weights: Weights, zoo: Zoo) -> tuple[EnvSpec, dict[str, str]]:
    """The environment of a model, and why each field is believed.

    Raises:
        UserError: nothing tells the environment, it does not go with the weights, or it was changed in a way
            that cannot be expressed here.
    """
    is_image = len(weights.obs_shape) == 3
    env_id, why = _env_id(path, hints, zoo, is_image)
    settings = _Settings(why={"env_id": why})
    if is_image:
        _atari_settings(path, env_id, weights, zoo, settings)
        _below_the_wrapper(path, hints, env_id, zoo, settings)
    else:
        _vector_settings(path, hints, zoo, settings)
    env = fit_environment(
        path, env_id, weights.obs_shape, weights.num_outputs, settings.fields, asked=hints.env_id is not None
    )
    if env.full_action_set and "full_action_set" not in settings.why:
        settings.why["full_action_set"] = f"the network has {weights.num_outputs} outputs"
    return env, settings.why


def _env_id(path: Path, hints: Hints, zoo: Zoo, is_image: bool) -> tuple[str, str]:
    """The environment's name and where it was found, the most explicit source first."""
    if hints.env_id:
        return hints.env_id, "--env"
    if zoo.env_id:
        name = re.sub(r"^ALE-", "ALE/", zoo.env_id)
        return _current(path, name, "args.yml")
    for kind, name in _names(path, hints):
        for candidate in _candidates(name):
            if _plays(candidate, is_image):
                return _current(path, candidate, f"the {kind} name {name!r}")
    raise UserError(f"{path}: nothing tells which environment this teacher plays; name it with --env")


def _current(path: Path, env_id: str, why: str) -> tuple[str, str]:
    """A name with the version that can be played now; Atari names keep what they say of their generation."""
    try:
        current = current_id(env_id)
        is_atari = env_spec(current).kind == "atari"
    except UserError as error:
        raise UserError(f"{path}: {error} (from {why})") from None
    if is_atari:
        return env_id, why
    if current.lower().startswith(env_id.lower()):  # the same, or without a version
        return current, why
    return current, f"{why}; {current} in the place of {env_id}"


def _names(path: Path, hints: Hints) -> Iterator[tuple[str, str]]:
    """Names that may tell, most likely first."""
    file = PurePosixPath(hints.file or path.name)
    yield "file", file.stem if file.suffix == ".zip" else file.name
    if file.parent.name:
        yield "folder", file.parent.name
    if hints.source:
        yield "repository", hints.source.rsplit("/", 1)[-1]
    else:
        for folder in path.absolute().parents[:2]:
            yield "folder", folder.name


def _candidates(name: str) -> Iterator[str]:
    """Environments that ``ppo-LunarLander-v2``, ``ALE-Breakout-v5`` or ``dqn_CartPole`` may mean."""
    for match in _NAME.finditer(name):
        parts = match[0].split("_")
        for i in range(len(parts)):
            rest = "_".join(parts[i:])
            yield f"ALE/{rest}" if name[: match.start()].endswith("ALE-") else rest
    yield from re.findall(r"[A-Za-z][A-Za-z0-9]+", name)


def _plays(env_id: str, is_image: bool) -> bool:
    try:
        return (env_spec(current_id(env_id)).kind == "atari") == is_image
    except UserError:
        return False


def _vector_settings(path: Path, hints: Hints, zoo: Zoo, settings: _Settings) -> None:
    """Nothing can be set there: what the training changed is refused, or left to a user who names it."""
    changes = [f"wraps it in {name}" for name, _ in zoo.wrappers() if _short(name) not in _HARMLESS]
    if zoo.vec_wrapper():
        changes.append(f"wraps it in {zoo.vec_wrapper()}")
    if (zoo.frame_stack() or 1) > 1:
        changes.append(f"stacks {zoo.frame_stack()} observations")
    said = [f"{zoo.config_file} {change}" for change in changes]
    kwargs = {name: value for name, value in zoo.env_kwargs.items() if name not in _RENDERING}
    limit = kwargs.pop("max_episode_steps", None)
    if type(limit) is int and limit > 0:
        settings.set("max_agent_steps", limit, str(zoo.env_kwargs_file))
    said += [f"{zoo.env_kwargs_file} sets {each}" for each in _changed(kwargs)]
    if not said:
        return
    if hints.env_id is None:
        raise UserError(
            f"{path} was trained in a changed environment ({'; '.join(said)}), which cannot be expressed "
            "here; --env plays it in the environment as it is"
        )
    settings.why["changes"] = f"left out, as --env names the environment: {'; '.join(said)}"


def _changed(env_kwargs: Mapping[str, Any]) -> list[str]:
    return [f"{name}={str(value)[:40]}" for name, value in env_kwargs.items()]


def _atari_settings(path: Path, env_id: str, weights: Weights, zoo: Zoo, settings: _Settings) -> None:
    """Preprocessing of the wrapper, and what lies below it."""
    arguments, why = _wrapper_arguments(path, zoo)
    _refuse_colour(path, weights, zoo)
    for name, (target, default) in _WRAPPER_ARGUMENTS.items():
        if name != "screen_size":
            settings.set(target, arguments.get(name, default), why)
    settings.set("fire_reset", True, why)
    _image_size(path, arguments, weights, why, settings)
    if settings.fields["noop_max"] == 0:
        settings.set("noop_max", 1, f"{why}: none there, one no-op here at the least")


def _wrapper_arguments(path: Path, zoo: Zoo) -> tuple[dict[str, Any], str]:
    """The arguments of AtariWrapper and where they stand.

    Raises:
        UserError: other wrappers, or arguments that it does not have.
    """
    named = [(name, arguments) for name, arguments in zoo.wrappers() if _short(name) not in _HARMLESS]
    others = [name for name, _ in named if _short(name) != _WRAPPER]
    others += [zoo.vec_wrapper() or ""] if zoo.vec_wrapper() else []
    if others:
        raise UserError(
            f"{path} was trained in an environment that cannot be expressed here: {zoo.config_file} wraps "
            f"it in {others[0]}"
        )
    if not named:
        return {}, _DEFAULT
    arguments = named[-1][1]
    for name, value in arguments.items():
        if name not in _WRAPPER_ARGUMENTS or type(value) not in (int, float, bool):
            raise UserError(f"{path}: {zoo.config_file}: {_WRAPPER} has no argument {name}={str(value)[:40]}")
    return arguments, f"{_DEFAULT} ({zoo.config_file})"


def _refuse_colour(path: Path, weights: Weights, zoo: Zoo) -> None:
    channels, stack = weights.obs_shape[0], zoo.frame_stack()
    if channels != (stack or channels) or (stack is None and channels % 3 == 0):
        known = f"frame_stack {stack}" if stack else "no frame_stack is known"
        raise UserError(
            f"{path} takes images of {channels} channels ({known}): colour; gray frames, stacked, can be read"
        )


def _image_size(
    path: Path, arguments: Mapping[str, Any], weights: Weights, why: str, settings: _Settings
) -> None:
    size = arguments.get("screen_size")
    if size is not None and weights.image_sides is not None:
        low, high = weights.image_sides
        if not low <= size <= high:
            raise UserError(
                f"{path}: the weights fit images of {low} to {high} pixels, screen_size is {size} ({why})"
            )
        settings.set("obs_shape", (weights.obs_shape[0], int(size), int(size)), why)
        return
    settings.fields["obs_shape"] = weights.obs_shape
    if weights.image_sides is not None:
        low, high = weights.image_sides
        settings.why["obs_shape"] = f"{why}; the weights fit square images of {low} to {high} pixels"


def _below_the_wrapper(path: Path, hints: Hints, env_id: str, zoo: Zoo, settings: _Settings) -> None:
    """Sticky actions and skipped frames of the emulator itself, by the name's generation and env_kwargs."""
    sticky, skip = _generation(path, env_id, zoo)
    kwargs = {name: value for name, value in zoo.env_kwargs.items() if name not in _RENDERING}
    file = str(zoo.env_kwargs_file)
    why_sticky = why_skip = f"the name {env_id}"
    if "repeat_action_probability" in kwargs:
        sticky, why_sticky = _number(path, file, kwargs, "repeat_action_probability"), file
    if "frameskip" in kwargs:
        skip, why_skip = _number(path, file, kwargs, "frameskip"), file
    if sticky:
        settings.set("sticky_probability", float(sticky), why_sticky)
    if skip > 1:
        own = settings.fields["frame_skip"]
        words = f"{why_skip}: the emulator skips {int(skip)} frames, the wrapper {own} of these"
        settings.set("frame_skip", int(own * skip), f"{words}; the maximum is over neighbouring frames here")
    if kwargs.pop("full_action_space", False) is True:
        settings.set("full_action_set", True, file)
    frames = kwargs.pop("max_num_frames_per_episode", None)
    if type(frames) is int and frames >= 100:
        settings.set("max_agent_steps", frames // settings.fields["frame_skip"], file)
    _refuse_the_rest(path, hints, kwargs, file, settings)


def _refuse_the_rest(
    path: Path, hints: Hints, kwargs: Mapping[str, Any], file: str, settings: _Settings
) -> None:
    """Arguments of the emulator that have no counterpart; 0 is the default of mode and difficulty."""
    known = ("repeat_action_probability", "frameskip", "game")
    rest = {
        name: value for name, value in kwargs.items() if name not in known and value not in (None, 0, "rgb")
    }
    if not rest:
        return
    if hints.env_id is None:
        name, value = next(iter(rest.items()))
        raise UserError(f"{path}: {file} sets {name}={str(value)[:40]}, which cannot be expressed here")
    settings.why["changes"] = f"left out, as --env names the environment: {', '.join(_changed(rest))}"


def _generation(path: Path, env_id: str, zoo: Zoo) -> tuple[float, float]:
    """Stickiness and frame skip that an Atari name brings by itself."""
    match = _GENERATION.fullmatch(env_id)
    if match is None or (not match["ale"] and match["version"] == "5"):
        return 0.0, 1.0  # EnvPool's name, or none with a version: as NoFrameskip-v4
    if match["ale"]:
        return 0.25, 4.0
    sticky = 0.25 if match["version"] == "0" else 0.0
    if match["kind"].lower() == "noframeskip":
        return sticky, 1.0
    if match["kind"].lower() == "deterministic":
        return sticky, 3.0 if env_id.startswith("SpaceInvaders") else 4.0
    if "frameskip" in zoo.env_kwargs:
        return sticky, 1.0
    raise UserError(
        f"{path}: {env_id} skips 2 to 4 frames at random, which cannot be expressed here; --env names "
        "another environment to play in"
    )


def _number(path: Path, file: str, kwargs: Mapping[str, Any], name: str) -> float:
    value = kwargs[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1000:
        raise UserError(f"{path}: {file} sets {name}={str(value)[:40]}, which cannot be expressed here")
    return float(value)


def _short(name: str) -> str:
    return name.rpartition(".")[2]
