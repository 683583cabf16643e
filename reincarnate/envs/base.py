"""What both backends share: settings checked, calls kept in order, actions checked, closed once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from reincarnate.errors import UserError
from reincarnate.types import EnvSpec, EnvStep

MAX_SEED = 2**31 - 1  # EnvPool and ALE keep seeds as int32

#: Atari fields of an EnvSpec whose observations are vectors: nothing is skipped, clipped or added.
NEUTRAL: dict[str, Any] = {
    "frame_skip": 1,
    "full_action_set": False,
    "noop_max": 1,
    "fire_reset": False,
    "sticky_probability": 0.0,
    "episodic_life": False,
    "reward_clip": False,
}


class CheckedEnv(ABC):
    """N environments; implements :class:`reincarnate.types.VectorEnv` around three methods of a backend.

    ``send`` without ``recv``, ``recv`` without ``send`` (it would wait for ever) and steps before ``reset``
    raise ``RuntimeError``.
    """

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self._stage = "new"  # new -> ready <-> sent, closed
        self._all_ids = np.arange(num_envs, dtype=np.int64)
        self._all_ids.setflags(write=False)  # every EnvStep shares it

    @abstractmethod
    def _reset(self) -> EnvStep:
        """Start new games everywhere."""

    @abstractmethod
    def _send(self, action: npt.NDArray[np.int32]) -> None:
        """Start stepping; action [N] int32 is known to be good."""

    @abstractmethod
    def _recv(self) -> EnvStep:
        """Wait for the outcome."""

    @abstractmethod
    def _close(self) -> None:
        """Free everything; called once."""

    def reset(self) -> EnvStep:
        """Start a new game in every environment; all rows have ``reset`` and ``game_start``."""
        self._require("new", "ready", "sent", call="reset")
        step = self._reset()
        self._stage = "ready"
        return step

    def send(self, action: npt.NDArray[np.int64]) -> None:
        """Start stepping: action [N] integer in 0..A-1, one for every environment.

        Raises:
            ValueError: wrong shape, dtype or range; nothing was sent.
        """
        self._require("ready", call="send")
        self._send(check_action(action, self.num_envs, self.spec.num_actions))
        self._stage = "sent"

    def recv(self) -> EnvStep:
        """Wait for the outcome of :meth:`send`: N rows in the order of their environments."""
        self._require("sent", call="recv")
        step = self._recv()
        self._stage = "ready"
        return step

    def step(self, action: npt.NDArray[np.int64]) -> EnvStep:
        """``send`` then ``recv``."""
        self.send(action)
        return self.recv()

    def pictures(self) -> npt.NDArray[np.uint8]:
        """What the games look like right now: [N, height, width, 3] RGB.

        Raises:
            RuntimeError: the environments were made without ``pictures``.
            UserError: they cannot be drawn.
        """
        self._require("ready", call="pictures")
        return self._pictures()

    def _pictures(self) -> npt.NDArray[np.uint8]:
        raise RuntimeError("these environments were made without pictures")

    def close(self) -> None:
        """Free the environments; safe to call twice."""
        if self._stage != "closed":
            self._stage = "closed"
            self._close()

    def __enter__(self) -> CheckedEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require(self, *stages: str, call: str) -> None:
        if self._stage not in stages:
            raise RuntimeError(f"{call}() does not fit here: the environments are {self._stage!r}")


def check_action(action: Any, num_envs: int, num_actions: int) -> npt.NDArray[np.int32]:
    """Action as int32 [num_envs], or ``ValueError`` before a backend sees it.

    EnvPool checks nothing: a short or 0-d array ends the process, an action out of range is silently played.
    """
    if not isinstance(action, np.ndarray) or action.dtype.kind not in "iu":
        raise ValueError(f"actions must be a numpy array of integers, got {_described(action)}")
    if action.shape != (num_envs,):
        raise ValueError(f"actions must have shape ({num_envs},), one per environment, got {action.shape}")
    if action.min() < 0 or action.max() >= num_actions:
        raise ValueError(f"actions must lie in 0..{num_actions - 1}, got {action.tolist()}")
    return action.astype(np.int32)


def _described(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def check_spec(spec: EnvSpec) -> None:
    """Refuse settings that EnvPool would crash on or accept in silence.

    Raises:
        UserError: a field out of its range.
    """
    rules = [("max_agent_steps", spec.max_agent_steps >= 1, "at least 1")]
    if spec.kind == "atari":
        probability = spec.sticky_probability
        rules += [
            ("frame_skip", spec.frame_skip >= 1, "at least 1"),
            ("noop_max", spec.noop_max >= 1, "at least 1"),
            ("sticky_probability", math.isfinite(probability) and 0 <= probability <= 1, "between 0 and 1"),
        ]
    for name, holds, words in rules:
        if not holds:
            raise UserError(f"{spec.env_id}: {name} must be {words}, got {getattr(spec, name)!r}")


def check_counts(num_envs: int, seed: int) -> None:
    """Number of environments and seed; environment i is seeded with ``seed + i``.

    Raises:
        UserError: no environments, or a seed that is negative or too large.
    """
    if num_envs < 1:
        raise UserError(f"the number of environments must be at least 1, got {num_envs}")
    if not 0 <= seed <= MAX_SEED - num_envs:
        raise UserError(f"the seed must lie between 0 and {MAX_SEED - num_envs}, got {seed}")


def check_agreement(spec: EnvSpec, real: EnvSpec) -> None:
    """What a checkpoint or a user assumes against ``real``, the environment's own EnvSpec.

    Raises:
        UserError: another kind of observation, another shape, or another number of actions.
    """
    if spec.kind != real.kind or (real.kind == "vector" and spec.obs_shape != real.obs_shape):
        raise UserError(
            f"{spec.env_id} has {real.kind} observations of shape {real.obs_shape}, "
            f"not {spec.kind} ones of shape {spec.obs_shape}"
        )
    if spec.num_actions != real.num_actions:
        raise UserError(f"{spec.env_id} has {real.num_actions} actions, not {spec.num_actions}")


def discrete_actions(env_id: str, space: Any) -> int:
    """Number of actions of a gymnasium action space.

    Raises:
        UserError: not a single choice among actions.
    """
    kind = type(space).__name__
    if kind != "Discrete":
        words = "continuous actions" if kind == "Box" else f"actions of type {kind}"
        raise UserError(f"{env_id} has {words}; only one choice among discrete actions is supported")
    return int(space.n)


def flat_observation(env_id: str, space: Any) -> tuple[int, ...]:
    """[features] of a gymnasium observation space.

    Raises:
        UserError: not a flat vector of real numbers.
    """
    shape: tuple[int, ...] = getattr(space, "shape", None) or ()
    if type(space).__name__ != "Box" or len(shape) != 1 or space.dtype.kind != "f":
        words = f"{type(space).__name__} of shape {tuple(shape)} {getattr(space, 'dtype', '')}".strip()
        raise UserError(
            f"{env_id} has observations that are not supported ({words}); only Atari images and flat vectors "
            "of real numbers are"
        )
    return (int(shape[0]),)
