"""Data that crosses rooms: frozen dataclasses with the shape and dtype of every field.

Letters used everywhere: N environments, B batch, T time, A actions, n rows of one ``recv``.
Units never share a name: ``agent_steps`` (one action in one environment), ``frames``
(agent steps x frame skip), ``updates`` (gradient steps), ``vector_steps`` (one step of all environments).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

OutputKind = Literal["q_values", "policy_logits"]
Backend = Literal["envpool", "gymnasium"]
#: Whose Atari wrappers the gymnasium backend builds: ``sb3`` and ``cleanrl`` are theirs, for measuring;
#: ``common`` is Stable-Baselines3's with EnvPool's rule of stacking, which buffers rely on.
Wrappers = Literal["common", "sb3", "cleanrl"]
#: Recurrent state of N environments: nested tensors [N, ...], or None for a feed-forward policy.
State = Any


@dataclass(frozen=True)
class EnvSpec:
    """What a policy's weights assume of its environment; builds the environments of teacher and student.

    Atari fields are ignored when ``kind`` is ``"vector"`` (one flat observation, no frame stack).
    """

    env_id: str  # EnvPool's name, e.g. "Breakout-v5", "CartPole-v1"
    kind: Literal["atari", "vector"]
    num_actions: int
    obs_shape: tuple[int, ...]  # [stack, height, width] for Atari, [features] for vectors
    frame_skip: int = 4  # frames per agent step
    full_action_set: bool = False  # 18 actions instead of the game's own
    noop_max: int = 30  # random no-ops after a reset
    fire_reset: bool = True  # press FIRE after a reset where the game has it
    sticky_probability: float = 0.0  # probability that the previous action is repeated
    episodic_life: bool = True  # training: a lost life ends the episode (the game goes on)
    reward_clip: bool = True  # training: rewards are reduced to their sign
    max_agent_steps: int = 27_000  # per game (frame limit / frame skip); the game is truncated there

    def __post_init__(self) -> None:
        object.__setattr__(self, "obs_shape", tuple(int(size) for size in self.obs_shape))
        if self.num_actions < 1:
            raise ValueError(f"num_actions must be at least 1, got {self.num_actions}")
        expected = 3 if self.kind == "atari" else 1
        if len(self.obs_shape) != expected or min(self.obs_shape) < 1:
            raise ValueError(f"{self.kind} observations have {expected} positive sizes, got {self.obs_shape}")

    @property
    def frame_stack(self) -> int:
        """Frames per observation; 1 for vectors."""
        return self.obs_shape[0] if self.kind == "atari" else 1

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of what a buffer stores per step: [height, width], or [features]."""
        return self.obs_shape[1:] if self.kind == "atari" else self.obs_shape

    @property
    def obs_dtype(self) -> torch.dtype:
        """uint8 for Atari, float32 for vectors."""
        return torch.uint8 if self.kind == "atari" else torch.float32

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self) | {"obs_shape": list(self.obs_shape)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EnvSpec:
        """Inverse of :meth:`to_dict`; raises ``TypeError`` on unknown or missing fields."""
        return cls(**values)


@dataclass(frozen=True)
class EnvStep:
    """One ``recv`` of a vector environment: n rows, one per environment that moved.

    A row with ``reset`` set is not the outcome of an action: the action that was sent was ignored and ``obs``
    opens an episode (``game_start``: of a new game; else the next life of the same). Its reward is 0, but for
    points that the game itself gave during the reset. ``terminal`` and ``truncated`` exclude each other. A
    game that ends inside a life's reset has ``reset``, ``game_start`` and ``game_over`` on one row.
    """

    env_ids: npt.NDArray[np.int64]  # [n] which environments; 0..N-1 in order for a synchronous step
    obs: npt.NDArray[Any]  # [n, *obs_shape] uint8 or float32, after the action
    reward: npt.NDArray[np.float32]  # [n] for training (its sign if the EnvSpec clips)
    raw_reward: npt.NDArray[np.float32]  # [n] the game's own score
    terminal: npt.NDArray[np.bool_]  # [n] no bootstrap: game over, or a life lost if the EnvSpec says so
    truncated: npt.NDArray[np.bool_]  # [n] frame limit reached: episode ends, value still bootstraps
    game_over: npt.NDArray[np.bool_]  # [n] the whole game ended (terminated or truncated)
    reset: npt.NDArray[np.bool_]  # [n]
    game_start: npt.NDArray[np.bool_]  # [n] implies reset; all stacked frames equal the newest


class VectorEnv(Protocol):
    """N environments stepped together; ``reincarnate.envs`` makes them."""

    spec: EnvSpec
    num_envs: int

    def reset(self) -> EnvStep:
        """Start a new game in every environment; all rows have ``reset`` and ``game_start``."""

    def send(self, action: npt.NDArray[np.int64]) -> None:
        """Start stepping the environments of the last ``recv``: action [n] int64 in 0..A-1."""

    def recv(self) -> EnvStep:
        """Wait for the outcome of :meth:`send`."""

    def step(self, action: npt.NDArray[np.int64]) -> EnvStep:
        """``send`` then ``recv``."""

    def close(self) -> None:
        """Free the environments; safe to call twice."""


class Policy(Protocol):
    """Anything that can be evaluated: observations in, actions out."""

    def initial_state(self, num_envs: int) -> State:
        """State of ``num_envs`` environments at the start of a game, or None."""

    def act(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Obs [N, *obs_shape] on any device -> action [N] int64 and the next state."""


@dataclass(frozen=True)
class Batch:
    """B n-step transitions on the learner's device."""

    obs: Tensor  # [B, *obs_shape] uint8 or float32
    action: Tensor  # [B] int64
    reward: Tensor  # [B] float32, discounted sum of up to n training rewards
    discount: Tensor  # [B] float32, gamma^k of the bootstrap; 0 after a terminal
    next_obs: Tensor  # [B, *obs_shape], the observation k <= n steps later
    teacher_outputs: Tensor  # [B, A] float32 raw outputs at obs (zeros where none were stored)
    behaviour_log_prob: Tensor  # [B] float32 of the action taken


@dataclass(frozen=True)
class SequenceBatch:
    """B sequences of T rows, each from one environment, in the order in which they happened.

    A row is what a buffer's row is: an observation, the action taken at it, and the outcome. The row of the
    observation that ended a game has ``executed`` False; the next one opens a game. The last row of a
    sequence only serves to bootstrap, so T rows give T - 1 returns.
    """

    obs: Tensor  # [B, T, *obs_shape] uint8 or float32
    action: Tensor  # [B, T] int64
    reward: Tensor  # [B, T] float32, that followed the action
    terminal: Tensor  # [B, T] bool, the action ended the episode for good
    truncated: Tensor  # [B, T] bool, the action met the frame limit
    executed: Tensor  # [B, T] bool, False where the environment ignored the action or its outcome was lost
    game_start: Tensor  # [B, T] bool, the observation opens a new game
    behaviour_log_policy: Tensor  # [B, T, A] float32, of what acted
    state: Tensor | None  # [B, *state_shape] of the actor before the first row; None: none was stored
    teacher_outputs: Tensor | None = None  # [B, T, A] float32 raw outputs (zeros where none were stored)

    def to(self, device: torch.device | str) -> SequenceBatch:
        """All tensors on ``device``."""
        names = [field.name for field in dataclasses.fields(self)]
        moved: dict[str, Any] = {n: None if (x := getattr(self, n)) is None else x.to(device) for n in names}
        return SequenceBatch(**moved)


@dataclass(frozen=True)
class Returns:
    """Undiscounted raw returns of whole games, with a bootstrap interval of the mean."""

    mean: float
    std: float  # sample standard deviation over games (0 for one game)
    n: int
    ci95: tuple[float, float]
    returns: tuple[float, ...]

    @classmethod
    def from_games(cls, returns: Sequence[float], resamples: int = 10_000) -> Returns:
        """Summarise games; the interval is the percentile bootstrap over games with a fixed seed.

        Raises:
            ValueError: no games, or a return that is not finite.
        """
        values = np.asarray(returns, dtype=np.float64)
        if values.size == 0 or not np.isfinite(values).all():
            raise ValueError("returns need at least one game and finite scores")
        rng = np.random.default_rng(0)
        means = rng.choice(values, size=(resamples, values.size)).mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        std = float(values.std(ddof=1)) if values.size > 1 else 0.0
        return cls(
            float(values.mean()), std, int(values.size), (float(low), float(high)), tuple(values.tolist())
        )

    def to_dict(self) -> dict[str, Any]:
        """The RETURN object of ``result.json``."""
        return dataclasses.asdict(self) | {"ci95": list(self.ci95), "returns": list(self.returns)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Returns:
        """Inverse of :meth:`to_dict`."""
        return cls(**(values | {"ci95": tuple(values["ci95"]), "returns": tuple(values["returns"])}))

    def __str__(self) -> str:
        return (
            f"{self.mean:.1f} ± {self.std:.1f} ({self.n} games, 95% [{self.ci95[0]:.1f}, {self.ci95[1]:.1f}])"
        )
