"""EnvPool, and everything that is peculiar to it (https://github.com/sail-sg/envpool; checked on 1.2.5).

- ``env_type="gymnasium"`` resets at the step after an episode's end: that step ignores its action.
- With ``episodic_life`` a lost life is ``terminated``; the game is over only where ``info["terminated"]`` or
  ``truncated`` says so. ``elapsed_step`` counts agent steps, goes on across lives and not within a reset, so
  ``max_episode_steps`` is a limit per game; reaching it reports ``truncated`` whatever else happened there.
- A reset after a lost life plays up to 30 frames of no-ops. The last life can be lost in them (seen in
  RoadRunner): a new game starts in a row that follows no game over; its stack is filled instead of shifted.
  ``elapsed_step`` goes on there, so that new game is truncated early.
- ``info["reward"]`` is the raw reward even if ``reward_clip`` is set. Environment i is seeded ``seed + i``.
- ``reset()`` in mid-game goes on with the same game if ``episodic_life``; only a new pool starts over.
- Without ``info["terminated"]`` (vectors) an episode that ends by itself at the limit counts as truncated.
- ``recv`` returns fresh arrays, in the order of the environments when ``batch_size == num_envs``.
- Two pools with one seed, the same settings of the game and the same actions play the same games.
- ``render()`` gives an Atari game's newest frame alone, while the observation is the maximum of the last two.
- Settings and actions are not checked (a 0-d action, ``noop_max=0`` or ``stack_num=0`` kills the process).
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from reincarnate.envs.base import NEUTRAL, CheckedEnv, check_agreement, discrete_actions, flat_observation
from reincarnate.errors import UserError
from reincarnate.types import EnvSpec, EnvStep


@functools.cache
def known_ids() -> tuple[str, ...]:
    """Every name EnvPool knows."""
    import envpool

    return tuple(envpool.list_all_envs())


@functools.cache
def atari_ids() -> tuple[str, ...]:
    """EnvPool's Atari games, e.g. ``Breakout-v5``."""
    import envpool

    return tuple(
        name for name in known_ids() if envpool.registration.registry.specs[name][0] == "envpool.atari"
    )


def task_name(env_id: str) -> str:
    """The ROM behind an Atari name: ``space_invaders`` for ``SpaceInvaders-v5``."""
    return str(_describe(env_id).config.task)


@functools.cache
def default_spec(env_id: str, full_action_set: bool = False) -> EnvSpec:
    """EnvSpec of a name that EnvPool knows.

    Raises:
        UserError: actions or observations of a kind that is not supported, or EnvPool cannot make it here.
    """
    if env_id in atari_ids():
        about = _describe(env_id, full_action_space=full_action_set)
        actions = discrete_actions(env_id, about.gymnasium_action_space)
        return EnvSpec(env_id, "atari", actions, (4, 84, 84), full_action_set=full_action_set)
    about = _describe(env_id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium: bounds given in double precision
        actions = discrete_actions(env_id, about.gymnasium_action_space)
        shape = flat_observation(env_id, about.gymnasium_observation_space)
    limit = int(about.config.max_episode_steps)
    return EnvSpec(env_id, "vector", actions, shape, **NEUTRAL, max_agent_steps=limit)


def _describe(env_id: str, **settings: Any) -> Any:
    """EnvPool's own specification object.

    Raises:
        UserError: EnvPool lists the name and cannot make it here (a library or a file is missing).
    """
    import envpool

    try:
        return envpool.make_spec(env_id, **settings)
    except Exception as error:  # each family of environments fails in its own way
        raise _unmakeable(env_id, error) from None


def _unmakeable(env_id: str, error: Exception) -> UserError:
    """One line about an environment that is listed and cannot be made."""
    told = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"EnvPool cannot make {env_id!r} here: {told[:300]}")


def _settings(spec: EnvSpec) -> dict[str, Any]:
    """EnvPool's names for an EnvSpec's fields."""
    if spec.kind == "vector":
        return {"max_episode_steps": spec.max_agent_steps}
    stack, height, width = spec.obs_shape
    return {
        "max_episode_steps": spec.max_agent_steps,
        "stack_num": stack,
        "img_height": height,
        "img_width": width,
        "frame_skip": spec.frame_skip,
        "full_action_space": spec.full_action_set,
        "noop_max": spec.noop_max,
        "use_fire_reset": spec.fire_reset,
        "repeat_action_probability": spec.sticky_probability,
        "episodic_life": spec.episodic_life,
        "reward_clip": spec.reward_clip,
        "gray_scale": True,
    }


def num_threads(num_envs: int) -> int:
    """Threads that step environments: a small machine's cores; two fewer on a larger one, for the learner.

    ``REINCARNATE_CORES`` says how many of the cores are this process's, where several runs share them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("REINCARNATE_CORES", "")
    cores = min(cores, int(told)) if told.isdecimal() and int(told) > 0 else cores
    return max(1, min(num_envs, cores if cores <= 4 else cores - 2))


class PoolEnv(CheckedEnv):
    """N environments of one EnvPool, all stepped together; EnvPool's threads work between send and recv."""

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int) -> None:
        check_agreement(spec, default_spec(spec.env_id, spec.kind == "atari" and spec.full_action_set))
        super().__init__(spec, num_envs)
        self._seed, self._resets = seed, 0
        self._pool: Any = None
        self._obs: npt.NDArray[Any] = np.empty(0)
        self._lives: npt.NDArray[np.int32] = np.zeros(num_envs, dtype=np.int32)
        self._episode_over = np.zeros(num_envs, dtype=np.bool_)
        self._game_over = np.zeros(num_envs, dtype=np.bool_)

    def _reset(self) -> EnvStep:
        seed = (self._seed + self._resets * self.num_envs) % (2**31 - self.num_envs)
        self._resets += 1
        self._pool = None  # its threads end before the next ones start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium: bounds given in double precision
            self._pool = self._make(seed)
            obs, info = self._pool.reset()
        self._episode_over, self._game_over = np.zeros((2, self.num_envs), dtype=np.bool_)
        return self._first_step(obs, info)

    def _make(self, seed: int, **changes: Any) -> Any:
        """A pool of this EnvSpec; ``changes`` are EnvPool's own settings."""
        import envpool

        try:
            return envpool.make(
                self.spec.env_id,
                env_type="gymnasium",
                num_envs=self.num_envs,
                num_threads=num_threads(self.num_envs),
                seed=seed,
                **(_settings(self.spec) | changes),
            )
        except Exception as error:  # as above
            raise _unmakeable(self.spec.env_id, error) from None

    def _first_step(self, obs: npt.NDArray[Any], info: dict[str, Any]) -> EnvStep:
        yes, no = np.ones(self.num_envs, dtype=np.bool_), np.zeros(self.num_envs, dtype=np.bool_)
        zero = np.zeros(self.num_envs, dtype=np.float32)
        self._obs = self._network_dtype(obs)
        self._lives = info.get("lives", self._lives)
        return EnvStep(self._all_ids, self._obs, zero, zero, no, no, no, yes, yes)

    def _send(self, action: npt.NDArray[np.int32]) -> None:
        self._pool.send(action)

    def _recv(self) -> EnvStep:
        obs, reward, terminated, truncated, info = self._pool.recv()
        if self.spec.kind == "atari":
            return self._atari_step(obs, reward, terminated, truncated, info)
        over = terminated | truncated
        reset, self._episode_over = self._episode_over, over
        obs = self._network_dtype(obs)
        reward = reward.astype(np.float32, copy=False)
        return EnvStep(self._all_ids, obs, reward, reward, terminated, truncated, over, reset, reset)

    def _atari_step(
        self,
        obs: npt.NDArray[np.uint8],
        reward: npt.NDArray[np.float32],
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
        info: dict[str, Any],
    ) -> EnvStep:
        lives = info["lives"]
        died = info["terminated"] == 1
        terminal = terminated | died
        if truncated.any() and self.spec.episodic_life:  # the limit hides a life lost at that very step
            terminal |= truncated & (lives < self._lives) & (lives > 0)
        game_over = died | truncated
        reset, game_start = self._episode_over, self._game_over
        if (reset & ~game_start).any():
            restarted = self._restarted(obs, lives, reset & ~game_start)
            game_start, game_over = game_start | restarted, game_over | restarted
        self._episode_over, self._game_over = terminal | truncated, died | truncated
        self._obs, self._lives = obs, lives
        truncated = truncated & ~terminal
        return EnvStep(
            self._all_ids, obs, reward, info["reward"], terminal, truncated, game_over, reset, game_start
        )

    def _restarted(
        self, obs: npt.NDArray[np.uint8], lives: npt.NDArray[np.int32], next_life: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Of the rows that should open the next life: those that opened a new game, [N] bool.

        A new game fills the stack with one frame; the next life shifts it. Where the screen stood still both
        look the same, and lives that rise tell.
        """
        restarted = np.zeros_like(next_life)
        for i in np.flatnonzero(next_life):
            filled = bool((obs[i] == obs[i, -1]).all())
            shifted = np.array_equal(obs[i, :-1], self._obs[i, 1:])
            restarted[i] = filled and (not shifted or lives[i] > self._lives[i])
        return restarted

    def _network_dtype(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return obs if self.spec.kind == "atari" else obs.astype(np.float32, copy=False)

    def _close(self) -> None:
        self._pool = None


#: An Atari screen as it is, in colour: what an observation is before it is made grey, small and a stack.
_SCREEN = {"gray_scale": False, "img_height": 210, "img_width": 160, "stack_num": 1}


class PicturedPoolEnv(PoolEnv):
    """A :class:`PoolEnv` whose games can be looked at.

    Atari: a second pool plays the same games and is observed in colour at full size. Like the policy's, its
    observation is the maximum of the last two frames: one frame alone lacks the objects that a game draws on
    every other frame only. Anything else is drawn by EnvPool's ``render``.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int) -> None:
        super().__init__(spec, num_envs, seed)
        self._colour: Any = None
        self._screens: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def _make(self, seed: int, **changes: Any) -> Any:
        if self.spec.kind == "vector":
            return super()._make(seed, render_mode="rgb_array", **changes)
        self._colour = None
        self._colour = super()._make(seed, **_SCREEN)
        self._screens, _ = self._colour.reset()
        return super()._make(seed, **changes)

    def _send(self, action: npt.NDArray[np.int32]) -> None:
        super()._send(action)
        if self._colour is not None:
            self._colour.send(action)

    def _recv(self) -> EnvStep:
        step = super()._recv()
        if self._colour is not None:
            self._screens, _, _, _, info = self._colour.recv()
            if not (info["reward"] == step.raw_reward).all() or not (info["lives"] == self._lives).all():
                raise RuntimeError(f"{self.spec.env_id}: the game in colour went another way")
        return step

    def _pictures(self) -> npt.NDArray[np.uint8]:
        if self._colour is not None:
            return self._screens.transpose(0, 2, 3, 1)
        try:
            return np.asarray(self._pool.render(env_ids=self._all_ids), dtype=np.uint8)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"EnvPool cannot draw {self.spec.env_id!r}: {reason}") from None

    def _close(self) -> None:
        super()._close()
        self._colour = None
