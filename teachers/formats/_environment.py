"""Which environment a checkpoint's weights assume, and why we believe it.

CleanRL's files hold weights and no preprocessing. The environment's name comes from the user, from arguments
stored in the file, from a file beside it, or from the name of the repository or folder; its settings are
those of the script that wrote it; sizes and action count are checked against the weights. Everything believed
is recorded in ``assumed``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reincarnate.envs import current_id, env_spec
from reincarnate.errors import UserError
from reincarnate.teachers.formats._checkpoint import Hints
from reincarnate.teachers.formats._text import one_line, reason
from reincarnate.teachers.formats._weights import Weights
from reincarnate.types import EnvSpec

#: What CleanRL's Atari scripts set, through Stable-Baselines3's wrappers or through EnvPool alike.
_CLEANRL_ATARI: dict[str, Any] = {
    "frame_skip": 4,
    "noop_max": 30,
    "fire_reset": True,
    "sticky_probability": 0.0,
    "episodic_life": True,
    "reward_clip": True,
}
#: cleanba's ``make_env`` and CleanRL's ``..._machado``, after Machado et al. 2018: sticky actions instead of
#: no-ops, every action, games instead of lives. FIRE is EnvPool's default, which they leave.
_MACHADO = _CLEANRL_ATARI | {"noop_max": 1, "sticky_probability": 0.25, "episodic_life": False}
#: What all of cleanba's scripts set: 108,000 frames, 4 to a step.
_CLEANBA_LIMIT: dict[str, Any] = {"max_agent_steps": 27_000}
_FULL_ACTION_SET = 18
#: ``{env_id}-{exp_name}-seed1`` on the Hub, ``{env_id}__{exp_name}__1__{time}`` in CleanRL's runs folder.
_RUN_NAME = re.compile(
    r"(?P<env>\w+?-v\d+)(?:(?:-|__)(?P<exp>[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*))?(?![A-Za-z0-9])"
)
#: ``ppo-CartPole-v1``, ``unit8-LunarLander-v2``: a name with an environment inside.
_INNER_NAME = re.compile(r"(?<![A-Za-z0-9])(?P<env>[A-Z][A-Za-z0-9]*-v\d+)(?![A-Za-z0-9])")
#: ``Breakout-dqn``, ``CartPole``: a name without a version.
_BARE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?=[-_.]|$)")


def cleanrl_environment(
    path: Path,
    hints: Hints,
    weights: Weights,
    recorded: Mapping[str, Any],
    beside: tuple[str | None, str] = (None, ""),
) -> tuple[EnvSpec, dict[str, str]]:
    """The environment of CleanRL weights, and why each field is believed.

    ``recorded`` holds the script's arguments, where the file has them; ``beside`` is an environment's name
    that a file next to it gives, and which file that is.

    Raises:
        UserError: nothing tells the environment, or it does not go with the weights.
    """
    is_image = len(weights.obs_shape) == 3
    env_id, why = _env_id(path, hints, recorded, is_image, beside)
    if hints.env_id is None and not is_image:
        env_id, why = _newest(env_id, why)
    overrides, assumed = {}, {"env_id": why}
    if is_image:
        settings, believed = _atari_settings(path, hints, recorded, weights, env_id)
        overrides = settings | {"obs_shape": weights.obs_shape}
        assumed |= dict.fromkeys(settings, believed)
        if weights.image_sides:
            low, high = weights.image_sides
            assumed["obs_shape"] = f"{believed}; the weights fit square images of {low} to {high} pixels"
    env = fit_environment(
        path, env_id, weights.obs_shape, weights.num_outputs, overrides, asked=hints.env_id is not None
    )
    if env.full_action_set:
        assumed["full_action_set"] = f"the network has {weights.num_outputs} outputs"
    return env, assumed


def _atari_settings(
    path: Path, hints: Hints, recorded: Mapping[str, Any], weights: Weights, env_id: str
) -> tuple[dict[str, Any], str]:
    """How the script that wrote the weights sets up Atari, and why that is believed."""
    script = _script(path, hints, recorded) or ""
    if "procgen" in script:
        raise UserError(f"{path} was written by {script}: Procgen's colour images cannot be a teacher's here")
    believed = f"CleanRL's {script or 'Atari scripts'}"
    machado = _is_machado(script, recorded)
    if machado is None and weights.network == "impala" and recorded and _has_more_actions(weights, env_id):
        machado, believed = True, f"{believed}, with {weights.num_outputs} outputs"
    if machado:
        full: dict[str, Any] = {"full_action_set": True} if weights.num_outputs == _FULL_ACTION_SET else {}
        return _MACHADO | _CLEANBA_LIMIT | full, believed
    return _CLEANRL_ATARI | (_CLEANBA_LIMIT if _is_cleanba(script) else {}), believed


def _is_machado(script: str, recorded: Mapping[str, Any]) -> bool | None:
    """Whether a script has Machado's settings; None where neither its name nor its arguments tell.

    Users add to a script's name (``cleanba_ppo_a0_l1_d4``) or replace it; ``hiddens`` is an argument of
    ``cleanba_ppo`` and ``cleanba_impala`` alone. The older ones carry their settings in their names:
    ``..._impala_atari_wrapper`` has those of CleanRL.
    """
    if "machado" in script:
        return True
    if "impala_atari_wrapper" in script:
        return False
    return True if "hiddens" in recorded or script.startswith(("cleanba_ppo", "cleanba_impala")) else None


def _has_more_actions(weights: Weights, env_id: str) -> bool:
    """Whether the network has the full action set and the game a smaller one of its own.

    Of CleanRL's policies with the IMPALA CNN, only those with Machado's settings do.
    """
    try:
        return weights.num_outputs == _FULL_ACTION_SET > env_spec(env_id).num_actions
    except (UserError, ImportError):  # told where the environment is compared with the weights
        return False


def _is_cleanba(script: str) -> bool:
    return script.startswith(("cleanba_", "sebulba_")) or "impala_atari_wrapper" in script


def fit_environment(
    path: Path,
    env_id: str,
    obs_shape: tuple[int, ...],
    num_outputs: int,
    overrides: Mapping[str, Any],
    *,
    asked: bool,
    own: str | None = None,
) -> EnvSpec:
    """The EnvSpec of ``env_id`` with ``overrides``, checked against a network's input and output.

    Args:
        path: the teacher's file.
        env_id: the environment.
        obs_shape: what the network takes.
        num_outputs: what it gives, per value.
        overrides: fields of the EnvSpec.
        asked: the user named the environment, so that it, and not the file, is what does not fit.
        own: the environment that the file itself names, where it does.

    Raises:
        UserError: unknown environment, wrong kind or size of observation, wrong action count.
    """
    env = _known(path, env_id, asked)
    image = len(obs_shape) == 3
    if image != (env.kind == "atari") or (not image and env.obs_shape != obs_shape):
        found = f"the network takes observations of shape {list(obs_shape)}, {env.env_id} gives "
        raise misfit(path, env.env_id, found + str(list(env.obs_shape)), asked, own)
    settings = dict(overrides)
    if num_outputs != env.num_actions and image and num_outputs == _FULL_ACTION_SET:
        settings["full_action_set"] = True
    fitted = env_spec(env_id, **settings)
    if fitted.num_actions != num_outputs:
        found = f"the network has {num_outputs} outputs, {env.env_id} has {env.num_actions} actions"
        raise misfit(path, env.env_id, f"wrong action count: {found}", asked, own)
    return fitted


def misfit(path: Path, env_id: str, found: str, asked: bool, own: str | None = None) -> UserError:
    """An environment that does not go with the weights: whose mistake it is, and what to do."""
    if not asked:
        return UserError(f"{path}: {found}; name the right environment with --env")
    plays = f"it was trained in {own}" if own else "where its file or name tells what it plays"
    return UserError(
        f"--env {env_id} does not fit the teacher {path} ({found}); leave --env out ({plays}), or name an "
        "environment that fits"
    )


def _known(path: Path, env_id: str, asked: bool) -> EnvSpec:
    try:
        return env_spec(env_id)
    except UserError as error:
        raise UserError(f"--env: {error}" if asked else f"{path}: {error}") from None
    except ImportError as error:  # EnvPool's families need libraries of their own
        raise UserError(f"{path}: {env_id} cannot be played here ({reason(error)})") from None


def _env_id(
    path: Path,
    hints: Hints,
    recorded: Mapping[str, Any],
    is_image: bool,
    beside: tuple[str | None, str] = (None, ""),
) -> tuple[str, str]:
    """The environment's name and where it was found, the most explicit source first."""
    if hints.env_id:
        return hints.env_id, "--env"
    stored = recorded.get("env_id")
    if isinstance(stored, str) and stored:
        return stored, "arguments stored in the file"
    if beside[0]:
        return beside[0], beside[1]
    for kind, name in _names(path, hints):
        run = _RUN_NAME.match(name) or _INNER_NAME.search(name)
        found = run["env"] if run else _bare_env_id(name, is_image)
        if found:
            return found, f"the {kind} name {name!r}"
    raise UserError(f"{path}: nothing tells which environment this teacher plays; name it with --env")


def _newest(env_id: str, why: str) -> tuple[str, str]:
    """``LunarLander-v2`` is ``LunarLander-v3`` now: EnvPool still has both, gymnasium only the newer one."""
    try:
        current = current_id(env_id)
    except UserError:  # told where the environment is compared with the weights
        return env_id, why
    name, version, _ = env_id.partition("-v")
    if not version or current.lower() == env_id.lower() or current.partition("-v")[0].lower() != name.lower():
        return env_id, why
    return current, f"{why}; {current} in the place of {env_id}"


def _names(path: Path, hints: Hints) -> list[tuple[str, str]]:
    """Names that may tell, most likely first."""
    if hints.source:
        return [("repository", hints.source.rsplit("/", 1)[-1])]
    return [("folder", path.absolute().parent.name), ("file", path.name)]


def _script(path: Path, hints: Hints, recorded: Mapping[str, Any]) -> str | None:
    """The script that wrote the file, where anything tells; what it wrote itself before its name today."""
    if isinstance(recorded.get("exp_name"), str) and recorded["exp_name"]:
        return one_line(recorded["exp_name"])  # it is shown on terminals
    if hints.exp_name:
        return hints.exp_name
    runs = (_RUN_NAME.match(name) for _, name in _names(path, hints))
    return next((run["exp"] for run in runs if run and run["exp"]), None)


def _bare_env_id(name: str, is_image: bool) -> str | None:
    """The environment that a name opens with, if there is one of the right kind."""
    bare = _BARE_NAME.match(name)
    if not bare:
        return None
    try:
        env = env_spec(bare[0])
    except UserError:
        return None
    return env.env_id if (env.kind == "atari") == is_image else None
