"""What changes over a run: epsilon, the learning rate and the distillation coefficient m."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


def linear(start: float, end: float, duration: float, step: float) -> float:
    """From ``start`` at step 0 to ``end`` at step ``duration``, constant outside; same unit for both.

    Raises:
        ValueError: ``duration`` is not positive.
    """
    if not duration > 0:
        raise ValueError(f"duration must be greater than 0, got {duration}")
    if step >= duration:
        return end
    done = max(step / duration, 0.0)
    return (1.0 - done) * start + done * end


def learning_rate(m: float, high: float, low: float) -> float:
    """``m * high + (1 - m) * low`` (Agarwal et al. 2022, appendix: 1e-4 and 1e-5)."""
    return m * high + (1.0 - m) * low


class DistillCoefficient:
    """m of the online phase: the share of the teacher's lead that the student has yet to make up.

    ``m = clip(1 - (G_S - G_random) / (G_T - G_random), 0, 1)``, G_S the mean raw return of the last K
    training games. Agarwal et al. 2022 (appendix A.3) use evaluation returns; CleanRL uses training
    games over G_T alone, which turns round for negative returns and passes 1 below random play.

    - m is 1 until every environment has finished a game and K games are done: the first games to finish
      are the short ones.
    - It stays at 0 once two windows of K games that share no game have reached 0, or from t0 on.
    - A teacher no better than random play gives no scale: m falls linearly from 1 to 0 over t0.

    Args:
        teacher_return: G_T, raw and undiscounted, as G_random.
        random_return: G_random.
        num_envs: environments that the student plays in.
        window_games: K.
        stop_agent_step: t0, agent steps of the online phase, summed over environments.

    Raises:
        ValueError: a return that is not finite, or sizes that are not positive (t0 may be 0).
    """

    def __init__(
        self,
        *,
        teacher_return: float,
        random_return: float,
        num_envs: int,
        window_games: int,
        stop_agent_step: int,
    ) -> None:
        if not (math.isfinite(teacher_return) and math.isfinite(random_return)):
            raise ValueError(f"returns must be finite, got {teacher_return} and {random_return}")
        if min(num_envs, window_games) < 1 or stop_agent_step < 0:
            raise ValueError("num_envs and window_games must be at least 1, stop_agent_step 0 or more")
        self._teacher, self._random = teacher_return, random_return
        self._num_envs, self._stop = num_envs, stop_agent_step
        self._window: deque[float] = deque(maxlen=window_games)
        self._games = 0
        self._finished_envs: set[int] = set()
        self._first_zero_game: int | None = None  # games done when a window first reached 0
        self._caught_up = False
        self._latched_at: int | None = None

    @property
    def degenerate(self) -> bool:
        """Whether the teacher plays no better than random, so that returns cannot drive m."""
        return self._teacher <= self._random

    @property
    def student_return(self) -> float | None:
        """Mean raw return of the last K games, of all so far if there are fewer; None before the first."""
        return sum(self._window) / len(self._window) if self._window else None

    @property
    def latched_at_agent_step(self) -> int | None:
        """The agent step from which m is 0 for good; None as long as it is not."""
        return self._latched_at

    def observe_game(self, env_id: int, raw_return: float) -> None:
        """Count a finished training game.

        Raises:
            ValueError: a return that is not finite, or an environment that is not there.
        """
        if not math.isfinite(raw_return) or not 0 <= env_id < self._num_envs:
            raise ValueError(f"environment {env_id} of {self._num_envs} finished a game with {raw_return}")
        self._window.append(raw_return)
        self._games += 1
        self._finished_envs.add(env_id)
        if not self.degenerate and self._gap() == 0.0:
            self._count_zero()

    def value(self, agent_step: int) -> float:
        """m at ``agent_step`` of the online phase, from 0 to 1; call it with steps that never fall."""
        if self._latched_at is None and (self._caught_up or agent_step >= self._stop):
            self._latched_at = agent_step
        if self._latched_at is not None:
            return 0.0
        return linear(1.0, 0.0, self._stop, agent_step) if self.degenerate else self._gap()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; the constructor's arguments are not among them."""
        return {
            "window": list(self._window),
            "games": self._games,
            "finished_envs": sorted(self._finished_envs),
            "first_zero_game": self._first_zero_game,
            "caught_up": self._caught_up,
            "latched_at_agent_step": self._latched_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._window = deque(state["window"], maxlen=self._window.maxlen)
        self._games = state["games"]
        self._finished_envs = set(state["finished_envs"])
        self._first_zero_game = state["first_zero_game"]
        self._caught_up = state["caught_up"]
        self._latched_at = state["latched_at_agent_step"]

    def _gap(self) -> float:
        """m as the window of games has it; 1 while there are too few of them."""
        mean = self.student_return
        full = len(self._window) == self._window.maxlen and len(self._finished_envs) == self._num_envs
        if mean is None or not full:
            return 1.0
        return min(max(1.0 - (mean - self._random) / (self._teacher - self._random), 0.0), 1.0)

    def _count_zero(self) -> None:
        if self._first_zero_game is None:
            self._first_zero_game = self._games
        elif self._games - self._first_zero_game >= (self._window.maxlen or 0):
            self._caught_up = True
