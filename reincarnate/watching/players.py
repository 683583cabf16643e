"""Who plays, and their games as a stream of pictures with the score so far."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from reincarnate import runfiles, seeds
from reincarnate.acting import ActRule, parse_act_rule
from reincarnate.envs import make_env
from reincarnate.errors import UserError
from reincarnate.evaluate import RecurrentPolicy
from reincarnate.report.rundir import short_path
from reincarnate.teachers.reference import RUN_STUDENT, parse_reference
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import Backend, EnvSpec

Announce = Callable[[str], None]
#: More than so many side by side are no longer legible.
MOST_PLAYERS = 4


@dataclass(frozen=True)
class Asked:
    """What the user asked for; None leaves it to the run, or to the usual."""

    act_rule: str | None
    env_id: str | None
    backend: Backend | None
    device: torch.device
    announce: Announce | None


@dataclass(frozen=True)
class Player:
    """A frozen policy, how it acts, and the environment it plays."""

    role: Literal["", "teacher", "student"]
    name: str
    teacher: Teacher
    spec: EnvSpec
    rule: ActRule
    backend: Backend


@dataclass(frozen=True)
class Shot:
    """A game after one agent step."""

    picture: npt.NDArray[np.uint8]  # [height, width, 3] RGB
    score: float  # raw, so far
    over: bool  # this picture is the game's last, and the score its return


def find_players(players: Sequence[str | Path | Teacher], asked: Asked) -> list[Player]:
    """The players in order; a run directory alone stands for its teacher and its student.

    Raises:
        UserError: none or too many; a reference, a run or a rule that is not right.
    """
    if not 1 <= len(players) <= MOST_PLAYERS:
        raise UserError(f"watch shows 1 to {MOST_PLAYERS} players side by side, got {len(players)}")
    if len(players) == 1 and (folder := run_folder(players[0])) is not None:
        return _players_of_run(folder, asked)
    return [_single(player, asked) for player in players]


def run_folder(player: str | Path | Teacher) -> Path | None:
    """The run directory that a player is given as, or None.

    Raises:
        UserError: a path that does not exist, or a run without a student.
    """
    if isinstance(player, Teacher):
        return None
    return Path(player).expanduser() if parse_reference(str(player)).kind == "run" else None


def _single(player: str | Path | Teacher, asked: Asked) -> Player:
    if isinstance(player, Teacher):
        loaded = player.to(asked.device)
    else:
        loaded = _load(str(player), asked.env_id, asked)
    return _player(
        "", short_path(loaded.card.ref), loaded, loaded.spec.env, asked.act_rule, asked.backend, asked
    )


def _players_of_run(folder: Path, asked: Asked) -> list[Player]:
    """Teacher, if there was one, and student, in the student's environment, as the run measures them."""
    config, recorded = runfiles.read_config(folder), runfiles.read_teacher(folder)
    student = _load(str(folder), asked.env_id, asked)
    spec, backend = student.spec.env, asked.backend or config.env.backend
    rule = asked.act_rule or config.evaluate.student_act
    players = [_player("student", student.spec.algorithm, student, spec, rule, backend, asked)]
    if recorded is not None:
        teacher = _teacher_of_run(folder, recorded, asked.env_id or config.env.id, asked)
        rule = asked.act_rule or config.evaluate.teacher_act
        name = short_path(recorded["ref"])
        players.insert(0, _player("teacher", name, teacher, spec, rule, backend, asked))
    return players


def _teacher_of_run(folder: Path, recorded: dict[str, str], env_id: str | None, asked: Asked) -> Teacher:
    try:
        teacher = _load(runfiles.exact_reference(recorded), env_id, asked)
        runfiles.check_same_teacher(folder, recorded, teacher)
    except UserError as error:
        raise UserError(
            f"the teacher of {folder} is not there any more ({error}); to watch its student alone, give "
            f"{folder / RUN_STUDENT}"
        ) from None
    return teacher


def _load(ref: str, env_id: str | None, asked: Asked) -> Teacher:
    return load_teacher(ref, env_id=env_id, device=asked.device, announce=asked.announce)


def _player(
    role: Literal["", "teacher", "student"],
    name: str,
    teacher: Teacher,
    spec: EnvSpec,
    rule: str | None,
    backend: Backend | None,
    asked: Asked,
) -> Player:
    chosen = parse_act_rule(rule or "auto", teacher.spec.outputs)
    return Player(role, name, teacher, spec, chosen, backend or "envpool")


def play(player: Player, seed: int) -> Generator[Shot, None, None]:
    """Game after game: the first picture of each, then one after every agent step; without end.

    Environment and actions are drawn as :func:`reincarnate.evaluate_teacher` draws them with one environment,
    so the scores are those that ``teachers eval REF --num-envs 1 --seed SEED`` reports.
    """
    teacher = player.teacher
    generator = torch.Generator(teacher.device).manual_seed(seeds.derive(seed, "act"))
    policy = RecurrentPolicy(teacher, player.rule, teacher.temperature, generator)
    env_seed = seeds.derive(seed, "evaluate teacher")
    with make_env(player.spec, 1, env_seed, player.backend, pictures=True) as env:
        step, state = env.reset(), policy.initial_state(1)
        picture, score = env.pictures()[0], 0.0
        yield Shot(picture, score, over=False)
        while True:
            action, state = policy.act(torch.from_numpy(step.obs).to(teacher.device), state)
            step = env.step(action.cpu().numpy())
            score += float(step.raw_reward[0])
            over, starts = bool(step.game_over[0]), bool(step.game_start[0])
            last, picture = picture, env.pictures()[0]
            if over:  # where the next game starts in the same row, this picture is already its own
                yield Shot(last if starts else picture, score, over=True)
                score = 0.0
            if starts:
                state = policy.initial_state(1)
            if starts or not over:
                yield Shot(picture, score, over=False)


def side_by_side(streams: Sequence[Iterator[Shot]], games: int) -> Iterator[tuple[Shot, ...]]:
    """``games`` games of each, started together; who is through with one waits at its last picture."""
    for _ in range(games):
        shots = tuple(next(stream) for stream in streams)
        yield shots
        while not all(shot.over for shot in shots):
            shots = tuple(
                shot if shot.over else next(stream) for shot, stream in zip(shots, streams, strict=True)
            )
            yield shots
