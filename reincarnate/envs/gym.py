"""gymnasium (1.x) as a backend: vector environments, and Atari behind the wrappers of a teacher's source.

Slower than EnvPool and meant for two jobs: environments that EnvPool lacks, and claimed returns, which are
checked under the protocol they were measured with. Resets follow EnvPool's next-step rule. One step of all
environments runs in the caller's thread, inside ``recv``.

What differs between the sources' pipelines, beside EnvPool (``Wrappers``):

- ``common``: gray, then resized; the stack is filled where a game starts and goes on over a lost life.
- ``sb3`` (VecFrameStack): the same frames; after every reset, a lost life's too, the stack's rest is black.
- ``cleanrl`` (gym's FrameStack): resized, then gray, which rounds otherwise by one gray level at most; every
  reset fills the stack with its frame.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import cv2
import gymnasium
import numpy as np
import numpy.typing as npt

from reincarnate.envs.base import NEUTRAL, CheckedEnv, check_agreement, discrete_actions, flat_observation
from reincarnate.errors import UserError
from reincarnate.types import EnvSpec, EnvStep, Wrappers


class Row(NamedTuple):
    """One environment's part of an :class:`EnvStep`; ``frame`` is [height, width] or [features]."""

    frame: npt.NDArray[Any]
    reward: float
    raw_reward: float
    terminal: bool
    truncated: bool
    game_over: bool
    reset: bool
    game_start: bool


class Game(ABC):
    """One environment that resets itself at the step after an episode's end."""

    @abstractmethod
    def start(self, seed: int | None) -> Row:
        """A new game; the seed is given once."""

    @abstractmethod
    def advance(self, action: int) -> Row:
        """The outcome of an action, or of the reset that is due instead."""

    @abstractmethod
    def picture(self) -> npt.NDArray[np.uint8]:
        """[height, width, 3] RGB of the game as it stands."""

    @abstractmethod
    def close(self) -> None:
        """Free the emulator."""


class VectorGame(Game):
    """An environment with a flat observation, e.g. CartPole."""

    def __init__(self, spec: EnvSpec, pictures: bool = False) -> None:
        self._env_id = spec.env_id
        if pictures and "rgb_array" not in metadata(spec.env_id).get("render_modes", ()):
            raise UserError(f"{spec.env_id} cannot be drawn: it has no render mode rgb_array")
        mode = {"render_mode": "rgb_array"} if pictures else {}
        self._env = _make(spec.env_id, max_episode_steps=spec.max_agent_steps, **mode)
        self._over = False

    def start(self, seed: int | None) -> Row:
        """A new game."""
        self._over = False
        obs, _ = self._env.reset(seed=seed)
        return Row(np.asarray(obs, np.float32), 0.0, 0.0, False, False, False, True, True)

    def advance(self, action: int) -> Row:
        """One step, or the reset that is due."""
        if self._over:
            return self.start(None)
        obs, reward, terminated, truncated, _ = self._env.step(action)
        self._over = terminated or truncated
        frame, raw = np.asarray(obs, np.float32), float(reward)
        return Row(
            frame,
            raw,
            raw,
            terminated,
            truncated and not terminated,
            self._over,
            reset=False,
            game_start=False,
        )

    def picture(self) -> npt.NDArray[np.uint8]:
        """What the environment draws of itself."""
        try:
            return np.asarray(self._env.render(), dtype=np.uint8)
        except (gymnasium.error.Error, ImportError) as error:  # what it draws with is not installed
            reason = " ".join(str(error).split())
            raise UserError(f"gymnasium cannot draw {self._env_id!r}: {reason}") from None

    def close(self) -> None:
        """Free it."""
        self._env.close()


class ScoreKeeper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Innermost wrapper: the score that a monitor would report, points of no-ops and FIRE included."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.games = 0
        self.score = 0.0
        self.screens: list[npt.NDArray[np.uint8]] = []  # the last two frames [210, 160, 3]

    def reset(self, **kwargs: Any) -> Any:
        """A real reset of the emulator: a new game."""
        self.games += 1
        self.score = 0.0
        outcome = self.env.reset(**kwargs)
        self.screens = [outcome[0]]
        return outcome

    def step(self, action: Any) -> Any:
        """One frame."""
        outcome = self.env.step(action)
        self.score += float(outcome[1])
        self.screens = [self.screens[-1], outcome[0]]
        return outcome


class ResizeThenGray(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Frames [height, width, 1] uint8 as CleanRL's scripts make them: colours are resized, then mixed."""

    def __init__(self, env: gymnasium.Env[Any, Any], width: int, height: int) -> None:
        super().__init__(env)
        self._size = (width, height)
        self.observation_space = gymnasium.spaces.Box(0, 255, (height, width, 1), np.uint8)

    def observation(self, observation: Any) -> Any:
        """One frame."""
        resized = cv2.resize(observation, self._size, interpolation=cv2.INTER_AREA)
        return cv2.cvtColor(resized, cv2.COLOR_RGB2GRAY)[:, :, None]


class AtariGame(Game):
    """An Atari game behind the pieces of Stable-Baselines3's ``AtariWrapper``, in its order.

    CleanRL's scripts use the same pieces in the same order, up to the frame's last step.

    Two things stay outside, so that they mean the same on both backends: the limit counts agent steps of a
    whole game, and rewards are clipped where the raw one is still known. A raw reward is the score's change
    since the game's previous row, so that a game's sum is the score a monitor below all wrappers reports.
    """

    def __init__(self, spec: EnvSpec, pictures: bool = False, wrappers: Wrappers = "common") -> None:
        self._spec = spec
        self._keeper = ScoreKeeper(_make_atari(spec))
        self._env, self._lives = _wrap(self._keeper, spec, wrappers)
        self._agent_steps, self._reported = 0, 0.0
        self._episode_over = self._game_over = False

    def start(self, seed: int | None) -> Row:
        """A new game, whatever the state of the old one."""
        self._game_over = True
        return self._next_episode(seed)

    def advance(self, action: int) -> Row:
        """One agent step, or the reset that is due."""
        if self._episode_over:
            return self._next_episode(None)
        frame, reward, terminated, truncated, _ = self._env.step(action)
        self._agent_steps += 1
        terminal = bool(terminated)
        died = self._lives.was_real_done if self._lives is not None else terminal
        limit = truncated or self._agent_steps >= self._spec.max_agent_steps
        self._game_over = died or limit
        self._episode_over = terminal or limit
        raw, self._reported = self._keeper.score - self._reported, self._keeper.score
        reward = float(np.sign(float(reward)) if self._spec.reward_clip else reward)
        return Row(
            frame[:, :, 0], reward, raw, terminal, limit and not terminal, self._game_over, False, False
        )

    def _next_episode(self, seed: int | None) -> Row:
        """The next life, or a new game: also one that the reset's own no-ops brought about."""
        expected, games = self._game_over, self._keeper.games
        if self._lives is not None and expected:
            self._lives.was_real_done = True  # also after the frame limit, which that wrapper does not see
        frame, _ = self._env.reset(seed=seed)
        new_game = self._keeper.games > games
        if new_game:
            self._agent_steps, self._reported = 0, 0.0
        self._episode_over = self._game_over = False
        return Row(frame[:, :, 0], 0.0, 0.0, False, False, new_game and not expected, True, new_game)

    def picture(self) -> npt.NDArray[np.uint8]:
        """The maximum of the last two frames, as in the observation; one alone lacks what flickers."""
        screens = self._keeper.screens[-min(2, self._spec.frame_skip) :]
        return np.maximum(screens[0], screens[-1])

    def close(self) -> None:
        """Free the emulator."""
        self._env.close()


def _wrap(
    env: gymnasium.Env[Any, Any], spec: EnvSpec, source: Wrappers
) -> tuple[gymnasium.Env[Any, Any], Any]:
    """Stable-Baselines3's wrappers on the emulator, and the one that ends episodes with lives (or None)."""
    from stable_baselines3.common import atari_wrappers as wrappers

    _, height, width = spec.obs_shape
    lives, unwrapped = None, cast("Any", env.unwrapped)
    env = wrappers.NoopResetEnv(env, noop_max=spec.noop_max)
    if spec.frame_skip > 1:
        env = wrappers.MaxAndSkipEnv(env, skip=spec.frame_skip)
    if spec.episodic_life:
        env = lives = wrappers.EpisodicLifeEnv(env)
    if spec.fire_reset and "FIRE" in unwrapped.get_action_meanings():
        env = wrappers.FireResetEnv(env)
    shrink = ResizeThenGray if source == "cleanrl" else wrappers.WarpFrame
    return shrink(env, width=width, height=height), lives


class GymnasiumEnv(CheckedEnv):
    """N games stepped one after the other in ``recv``.

    ``wrappers`` are Atari's. Those of a source are for measuring: a buffer rebuilds stacks by EnvPool's rule,
    which is that of ``common`` alone.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        seed: int,
        pictures: bool = False,
        wrappers: Wrappers = "common",
    ) -> None:
        if spec.kind == "vector":
            check_agreement(spec, default_spec(spec.env_id))
        super().__init__(spec, num_envs)
        self._pictured = pictures
        self._wrappers = wrappers
        self._games: list[Game] = [
            AtariGame(spec, pictures, wrappers) if spec.kind == "atari" else VectorGame(spec, pictures)
            for _ in range(num_envs)
        ]
        self._seeds: list[int | None] = [seed + i for i in range(num_envs)]
        self._obs: npt.NDArray[Any] = np.zeros((num_envs, *spec.obs_shape), _numpy_dtype(spec))
        self._action: list[int] = []

    def _reset(self) -> EnvStep:
        rows = [game.start(seed) for game, seed in zip(self._games, self._seeds, strict=True)]
        self._seeds = [None] * self.num_envs
        return self._joined(rows)

    def _send(self, action: npt.NDArray[np.int32]) -> None:
        self._action = action.tolist()

    def _recv(self) -> EnvStep:
        return self._joined(
            [game.advance(action) for game, action in zip(self._games, self._action, strict=True)]
        )

    def _joined(self, rows: list[Row]) -> EnvStep:
        frames, reward, raw, *flags = zip(*rows, strict=True)
        flags = [np.array(flag, dtype=np.bool_) for flag in flags]
        obs = np.stack(frames)
        if self.spec.kind == "atari":
            obs = self._stacked(obs, fresh=flags[-1] if self._wrappers == "common" else flags[-2])
        return EnvStep(self._all_ids, obs, np.array(reward, np.float32), np.array(raw, np.float32), *flags)

    def _stacked(self, frames: npt.NDArray[np.uint8], fresh: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        """Stack [N, K, H, W] in a new array: shifted by one; where it starts ``fresh``, filled or black."""
        obs = np.empty_like(self._obs)
        obs[:, :-1], obs[:, -1] = self._obs[:, 1:], frames
        if self._wrappers == "sb3":
            obs[fresh, :-1] = 0
        else:
            obs[fresh] = frames[fresh, None]
        self._obs = obs
        return obs

    def _pictures(self) -> npt.NDArray[np.uint8]:
        if not self._pictured:
            return super()._pictures()
        return np.stack([game.picture() for game in self._games])

    def _close(self) -> None:
        for game in self._games:
            game.close()


def _numpy_dtype(spec: EnvSpec) -> type[np.generic]:
    return np.uint8 if spec.kind == "atari" else np.float32


def known_ids() -> tuple[str, ...]:
    """Every name registered with gymnasium right now (packages may add theirs)."""
    return tuple(gymnasium.registry)


@functools.cache
def default_spec(env_id: str) -> EnvSpec:
    """EnvSpec of an environment with a flat observation that gymnasium knows.

    Raises:
        UserError: it cannot be made, or its actions or observations are not supported.
    """
    env = _make(env_id)
    try:
        actions = discrete_actions(env_id, env.action_space)
        shape = flat_observation(env_id, env.observation_space)
        limit = env.spec.max_episode_steps if env.spec is not None else None
    finally:
        env.close()
    return EnvSpec(
        env_id, "vector", actions, shape, **NEUTRAL, max_agent_steps=limit or EnvSpec.max_agent_steps
    )


@functools.cache
def metadata(env_id: str) -> dict[str, Any]:
    """What gymnasium's environment says of itself: ``render_modes``, ``render_fps``.

    Raises:
        UserError: it cannot be made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old version: EnvPool may know it
        env = _make(env_id)
    try:
        return dict(env.metadata)
    finally:
        env.close()


def _make(env_id: str, **settings: Any) -> gymnasium.Env[Any, Any]:
    """An environment of gymnasium, its errors (retired version, missing package) in one line."""
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **settings)
    except (gymnasium.error.Error, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"gymnasium cannot make {env_id!r}: {reason}") from None


def has_fire(spec: EnvSpec) -> bool:
    """Whether FIRE is among an Atari game's actions, so that a FIRE reset does anything."""
    env = _make_atari(spec)
    try:
        return "FIRE" in cast("Any", env.unwrapped).get_action_meanings()
    finally:
        env.close()


def _make_atari(spec: EnvSpec) -> gymnasium.Env[Any, Any]:
    """The emulator, frame by frame, in RGB; sticky actions are ALE's own, frame by frame as in EnvPool."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    gymnasium.register_envs(ale_py)
    ids = {name.lower(): name for name in gymnasium.registry if name.startswith("ALE/")}
    name = ids.get(f"ale/{spec.env_id}".lower())
    if name is None:
        raise UserError(f"gymnasium has no Atari game {spec.env_id!r}")
    env = _make(
        name,
        frameskip=1,
        repeat_action_probability=spec.sticky_probability,
        full_action_space=spec.full_action_set,
        max_num_frames_per_episode=0,
    )
    real = EnvSpec(spec.env_id, "atari", discrete_actions(name, env.action_space), spec.obs_shape)
    check_agreement(spec, real)
    return env
