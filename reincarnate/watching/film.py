"""``watch``: whole games of one or several players as a video."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from reincarnate.device import beside_environments, pick_device
from reincarnate.envs import steps_per_second
from reincarnate.envs.base import MAX_SEED
from reincarnate.errors import UserError
from reincarnate.progress import Phase, Progress
from reincarnate.teachers.teacher import Teacher
from reincarnate.types import Backend
from reincarnate.watching.players import (
    Asked,
    Player,
    Shot,
    find_players,
    play,
    run_folder,
    side_by_side,
)
from reincarnate.watching.screen import Caption, Screen, score_text
from reincarnate.watching.video import Video, check_path, frames_per_second, open_video

#: How long the last picture of a game stays.
HOLD_SECONDS = 1.0
FILE_NAME = "replay.mp4"


@dataclass(frozen=True)
class Performance:
    """What one player did in the video."""

    role: str  # "teacher", "student" or none
    ref: str
    act: str
    scores: tuple[float, ...]  # raw returns of the whole games that were shown

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"role": self.role or None, "ref": self.ref, "act": self.act, "scores": list(self.scores)}


@dataclass(frozen=True)
class Watched:
    """A video that was written."""

    path: Path
    env: str
    players: tuple[Performance, ...]
    seconds: float  # of video
    frames: int
    width: int
    height: int
    cut: bool  # ``max_seconds`` ended it before the games did

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``watch --json``."""
        numbers = {name: getattr(self, name) for name in ("seconds", "frames", "width", "height", "cut")}
        return (
            {"path": str(self.path), "env": self.env}
            | numbers
            | {"players": [player.to_dict() for player in self.players]}
        )


def watch(
    *players: str | Path | Teacher,
    out: Path | str | None = None,
    games: int = 1,
    act_rule: str | None = None,
    env_id: str | None = None,
    backend: Backend | None = None,
    speed: float = 1.0,
    max_seconds: float | None = None,
    seed: int = 1,
    device: str = "auto",
    announce: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Watched:
    """Write a video of whole games, in colour, at full size and true speed; several players side by side.

    The policy sees what it always sees; only the viewer sees colours. Scores are raw, and those that
    :func:`reincarnate.evaluate_teacher` measures with ``num_envs=1``, the same ``seed`` and acting rule.

    Args:
        players: one to four references or teachers. A run directory alone stands for its teacher (left) and
            its student (right), in the run's environment and under the run's acting rules.
        out: an ``.mp4`` or ``.gif``, replaced if it exists; ``replay.mp4`` in the run directory, or here.
        games: how many games each plays; who is through with one waits for the others.
        act_rule: of all players: ``auto``, ``greedy``, ``sample`` or ``epsilon=X``.
        env_id: the environment, where a reference does not say.
        backend: which implementation of the environment; the run's, or EnvPool.
        speed: 1 is true speed, 2 twice as fast.
        max_seconds: end the video there, even in mid-game.
        seed: of the games and of the actions.
        device: where the policies run.
        announce: told, a line at a time, what references resolved to.
        progress: where to show progress; standard error unless given.

    Raises:
        UserError: a reference, a setting or the file's name is not right; the environment cannot be drawn;
            the players' games run at different speeds; no encoder.
    """
    _check(games, speed, max_seconds, seed)
    path = _path(out, players)
    check_path(path)
    asked = Asked(act_rule, env_id, backend, pick_device(device), announce)
    found = find_players(players, asked)
    clock = _Clock.of(found, speed, frames_per_second(path))
    with contextlib.ExitStack() as stack:
        stack.enter_context(beside_environments(asked.device))
        streams = [stack.enter_context(contextlib.closing(play(player, seed))) for player in found]
        bar = stack.enter_context((progress or Progress()).phase("watch", total=games, unit="games"))
        video = stack.enter_context(open_video(path, clock.rate))
        film = _Film(video, clock, found, games, max_seconds)
        film.shoot(side_by_side(streams, games), bar)
    return film.summary(path)


class _Clock:
    """Frames per second, and agent steps per frame."""

    def __init__(self, steps_per_second: Fraction, most: int) -> None:
        self.steps_per_frame = math.ceil(steps_per_second / most)
        self.rate = steps_per_second / self.steps_per_frame

    @classmethod
    def of(cls, players: Sequence[Player], speed: float, most: int) -> _Clock:
        """The common clock of the players.

        Raises:
            UserError: their games run at different speeds.
        """
        rates = {player.spec.env_id: steps_per_second(player.spec) for player in players}
        each = [steps_per_second(player.spec) for player in players]
        if len(set(each)) > 1:
            named = ", ".join(f"{env_id} {float(rate):g}" for env_id, rate in rates.items())
            raise UserError(
                f"these games run at different speeds (agent steps per second: {named}); watch them apart"
            )
        return cls(each[0] * Fraction(speed).limit_denominator(1000), most)


class _Film:
    """Frames in, until the games or the time are over."""

    def __init__(
        self, video: Video, clock: _Clock, players: Sequence[Player], games: int, max_seconds: float | None
    ) -> None:
        self._video, self._clock, self._players, self._games = video, clock, players, games
        self._most_frames = None if max_seconds is None else max(1, round(max_seconds * clock.rate))
        self._screen: Screen | None = None
        self._frames = 0
        self._scores: list[list[float]] = [[] for _ in players]

    @property
    def seconds(self) -> float:
        """Of video so far."""
        return float(self._frames / self._clock.rate)

    @property
    def full(self) -> bool:
        """Whether ``max_seconds`` are reached."""
        return self._most_frames is not None and self._frames >= self._most_frames

    def shoot(self, takes: Any, bar: Phase) -> None:
        """Film every take that is due: each first and last one of a game, and every n-th between."""
        game, steps = 0, 0
        for shots in takes:
            over = all(shot.over for shot in shots)
            if over or steps % self._clock.steps_per_frame == 0:
                self._add(shots, game, math.ceil(HOLD_SECONDS * self._clock.rate) if over else 1)
            steps = 0 if over else steps + 1
            if over:
                game += 1
                for scores, shot in zip(self._scores, shots, strict=True):
                    scores.append(shot.score)
            bar.update(game, video_seconds=self.seconds)
            if self.full:
                return

    def _add(self, shots: Sequence[Shot], game: int, times: int) -> None:
        if self._screen is None:
            self._screen = Screen([shot.picture.shape for shot in shots])
        captions = [
            self._caption(player, shot, game) for player, shot in zip(self._players, shots, strict=True)
        ]
        frame = self._screen.draw([shot.picture for shot in shots], captions)
        for _ in range(times):
            if not self.full:
                self._video.add(frame)
                self._frames += 1

    def _caption(self, player: Player, shot: Shot, game: int) -> Caption:
        line = f"game {game + 1} of {self._games}" if self._games > 1 else player.spec.env_id
        return Caption(
            player.role,
            player.name,
            line,
            f"{'final' if shot.over else 'score'} {score_text(shot.score)}",
            shot.over,
        )

    def summary(self, path: Path) -> Watched:
        """What was written."""
        performances = tuple(
            Performance(player.role, player.teacher.card.ref, str(player.rule), tuple(scores))
            for player, scores in zip(self._players, self._scores, strict=True)
        )
        assert self._screen is not None  # a game has a first picture
        return Watched(
            path,
            " and ".join(dict.fromkeys(player.spec.env_id for player in self._players)),
            performances,
            self.seconds,
            self._frames,
            self._screen.width,
            self._screen.height,
            cut=len(self._scores[0]) < self._games,
        )


def _path(out: Path | str | None, players: Sequence[str | Path | Teacher]) -> Path:
    if out is not None:
        return Path(out).expanduser()
    folder = run_folder(players[0]) if len(players) == 1 else None
    return (folder or Path()) / FILE_NAME


def _check(games: int, speed: float, max_seconds: float | None, seed: int) -> None:
    """Refuse numbers that make no sense.

    Raises:
        UserError: one of them.
    """
    if games < 1:
        raise UserError(f"a video needs at least 1 game, got {games}")
    if not 0.01 <= speed <= 100:
        raise UserError(f"the speed must lie between 0.01 and 100 (1 is true speed), got {speed}")
    if max_seconds is not None and not 0 < max_seconds < math.inf:
        raise UserError(f"max-seconds must be a number above 0, got {max_seconds}")
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"the seed must lie between 0 and {MAX_SEED}, got {seed}")
