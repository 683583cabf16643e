"""Who is watched: several side by side, the games and scores of an evaluation, runs, and mistakes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import reincarnate
from reincarnate import runfiles
from reincarnate.cli import main
from reincarnate.config import RunConfig, override
from reincarnate.errors import UserError
from reincarnate.progress import Progress
from reincarnate.teachers.formats.native import save_native
from reincarnate.types import EnvStep
from reincarnate.watching import players, screen
from reincarnate.watching.screen import CAPTION_HEIGHT, Caption, Screen

from painted_games import (
    COLOURS,
    FACTOR,
    WIDTH,
    gif_frames,
    left_half,
    mp4_frames,
    score_part,
    spec_of,
    teacher,
    watch,
)

# ------------------------------------------------------------ side by side


def test_who_is_through_waits_with_the_final_score(tmp_path: Path) -> None:
    watched = watch(
        teacher("PaintedShort-v0", "a/short"), teacher("PaintedLong-v0", "b/long"), out=tmp_path / "x.gif"
    )
    frames, _ = gif_frames(tmp_path / "x.gif")
    assert frames[0].shape[1] == 2 * WIDTH * FACTOR + screen.GAP
    assert [tuple(left_half(frame, 0)) for frame in frames] == [COLOURS[i] for i in (0, 1, 2, 3, 3, 3, 3, 3)]
    assert [tuple(left_half(frame, 1)) for frame in frames] == [COLOURS[i % 6] for i in range(8)]
    for later in frames[4:]:
        np.testing.assert_array_equal(score_part(later, 0), score_part(frames[3], 0))
        assert (score_part(later, 1) != score_part(frames[3], 1)).any()
    gold = (np.abs(score_part(frames[3], 0).astype(int) - screen._GOLD).max(axis=2) < 30).any()
    assert gold
    assert not (np.abs(score_part(frames[3], 1).astype(int) - screen._GOLD).max(axis=2) < 30).any()
    assert [each.scores for each in watched.players] == [(4.5,), (10.5,)]


def test_games_of_different_heights_are_centred_under_equal_captions() -> None:
    layout = Screen([(210, 160, 3), (500, 500, 3), (33, 21, 3)])
    assert (layout.height, layout.width) == (CAPTION_HEIGHT + 500, 320 + 500 + 320 + 2 * screen.GAP)
    pictures = [
        np.full(size, 255 - i, np.uint8) for i, size in enumerate([(210, 160, 3), (500, 500, 3), (33, 21, 3)])
    ]
    frame = layout.draw(pictures, [Caption("", "x", "", "", False)] * 3)
    for i, (picture, factor) in enumerate(zip(pictures, (2, 1, 13), strict=True)):
        top, left, enlarged = layout.game_box(i)
        assert enlarged == factor
        assert top % 2 == left % 2 == 0
        mine = (frame[CAPTION_HEIGHT:] == 255 - i).all(axis=2)
        assert mine.sum() == picture.shape[0] * picture.shape[1] * factor**2
        assert mine[top - CAPTION_HEIGHT, left]
    assert layout.width % 2 == layout.height % 2 == 0


def test_a_long_name_loses_its_middle_and_stays_in_its_pane() -> None:
    font = screen._font("", 15)
    text = screen.shortened("somebody-with-a-long-name/BreakoutNoFrameskip-v4-dqn_atari_jax-seed1", font, 200)
    assert font.getlength(text) <= 200
    assert text.startswith("somebody")
    assert text.endswith("seed1")
    assert "…" in text
    assert screen.shortened("short", font, 200) == "short"
    caption = Caption("student", "x" * 300, "game 1 of 3", "score 1,234.5", False)
    drawn = screen.draw_caption(caption, 320)
    assert drawn.shape == (CAPTION_HEIGHT, 320, 3)
    assert (drawn[:, -8:] == drawn[0, 0]).all()  # the margin is free
    assert [screen.score_text(score) for score in (3.0, -21.0, 1234.5, 0.25)] == [
        "3",
        "-21",
        "1,234.5",
        "0.2",
    ]


# ------------------------------------------------------------ the games


def test_scores_are_those_of_an_evaluation_with_one_environment(tmp_path: Path) -> None:
    settings = {"act_rule": "epsilon=1", "seed": 5, "device": "cpu", "progress": Progress(io.StringIO())}
    measured = reincarnate.evaluate_teacher("bundled/CartPole-dqn", episodes=2, num_envs=1, **settings)
    watched = reincarnate.watch("bundled/CartPole-dqn", out=tmp_path / "x.mp4", games=2, **settings)
    assert watched.players[0].scores == measured.returns.returns
    # CartPole scores one point a step: a first picture and one a step per game, each last one held for 1 s
    steps = sum(measured.returns.returns)
    assert len(mp4_frames(tmp_path / "x.mp4")) == watched.frames == 2 + steps + 2 * 49


def test_scores_of_an_atari_game_are_those_of_an_evaluation(tmp_path: Path) -> None:
    settings = {"act_rule": "epsilon=1", "seed": 2, "device": "cpu", "progress": Progress(io.StringIO())}
    measured = reincarnate.evaluate_teacher("bundled/Breakout-dqn", episodes=1, num_envs=1, **settings)
    watched = reincarnate.watch("bundled/Breakout-dqn", out=tmp_path / "x.mp4", speed=8, **settings)
    assert watched.players[0].scores == measured.returns.returns
    assert (watched.width, watched.height) == (320, 420 + CAPTION_HEIGHT)
    frame = mp4_frames(tmp_path / "x.mp4")[0].astype(int)
    # Breakout's rows of bricks, in the middle of each, and its grey wall
    for line, colour in [(60, (200, 72, 72)), (78, (162, 162, 42)), (84, (72, 160, 72)), (90, (66, 72, 200))]:
        assert np.abs(frame[CAPTION_HEIGHT + 2 * line, 160] - colour).max() <= 4, line
    assert np.abs(frame[CAPTION_HEIGHT + 2 * 25, 160] - 142).max() <= 4


class Rows:
    """An environment of one lane that gives the rows it was told: (reward, game over, game starts)."""

    num_envs = 1

    def __init__(self, rows):
        self.rows, self.at = rows, -1

    def reset(self):
        return self._row(0.0, False, True)

    def step(self, action):
        self.at += 1
        return self._row(*self.rows[self.at])

    def pictures(self):
        return np.full((1, 1, 1, 3), self.at + 1, np.uint8)

    def _row(self, reward, over, starts):
        flags = [np.array([flag]) for flag in (over, False, over, starts, starts)]
        rewards = [np.array([reward], np.float32)] * 2
        return EnvStep(np.arange(1), np.zeros((1, 2), np.float32), *rewards, *flags)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_game_that_ends_inside_a_reset_keeps_its_own_last_picture(monkeypatch) -> None:
    rows = [
        (2.0, False, False),
        (1.0, True, True),
        (5.0, False, False),
        (1.0, True, False),
        (0.0, False, True),
    ]
    monkeypatch.setattr(players, "make_env", lambda *_, **__: Rows(rows))
    asked = players.Asked(None, None, None, torch.device("cpu"), None)
    [player] = players.find_players([teacher()], asked)
    stream = players.play(player, seed=1)
    seen = [next(stream) for _ in range(7)]
    assert [(int(shot.picture.max()), shot.score, shot.over) for shot in seen] == [
        (0, 0.0, False),
        (1, 2.0, False),
        (1, 3.0, True),  # ended in the row that opens the next game, whose picture is not its own
        (2, 0.0, False),
        (3, 5.0, False),
        (4, 6.0, True),
        (5, 0.0, False),
    ]


# ------------------------------------------------------------ runs


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run's files, as far as watching needs them: teacher of 3 steps' games, student likewise."""
    source = tmp_path / "source"
    source.mkdir()
    spec = spec_of("PaintedShort-v0")
    file = save_native(source / "paint.safetensors", spec.build(), spec)
    loaded = reincarnate.load_teacher(str(file))
    folder = tmp_path / "run"
    folder.mkdir()
    config = override(
        RunConfig(), {"teacher": str(file), "student": "qdagger-dqn", "evaluate.teacher_act": "greedy"}
    )
    runfiles.write_start(folder, config, loaded.to_json(), {})
    save_native(folder, spec.build(), spec)
    return folder


def test_a_run_shows_teacher_and_student_and_keeps_its_replay(run_folder: Path) -> None:
    result = CliRunner().invoke(main, ["watch", str(run_folder), "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["path"] == str(run_folder / "replay.mp4")
    assert [(each["role"], each["act"]) for each in document["players"]] == [
        ("teacher", "greedy"),
        ("student", "epsilon=0.01"),
    ]
    assert [each["scores"] for each in document["players"]] == [[4.5], [4.5]]
    assert len(mp4_frames(run_folder / "replay.mp4")) == document["frames"]
    assert (document["width"], document["height"]) == mp4_frames(run_folder / "replay.mp4")[0].shape[1::-1]


def test_a_run_whose_teacher_has_changed_or_gone_says_how_to_go_on(run_folder: Path) -> None:
    file = run_folder.parent / "source" / "paint.safetensors"
    spec = spec_of("PaintedShort-v0")
    save_native(file, spec.build(), spec)
    with pytest.raises(UserError, match=r"has changed since.*give .*student\.safetensors"):
        watch(run_folder)
    file.unlink()
    with pytest.raises(UserError, match=r"not there any more.*give .*student\.safetensors"):
        watch(run_folder)
    alone = watch(run_folder / "student.safetensors", out=run_folder / "alone.gif")
    assert len(alone.players) == 1


# ------------------------------------------------------------ what a user can get wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bundled/CartPole-dqn", "--out", "x.avi"], r"'x.avi'.*ends in \.mp4 or \.gif"),
        (["bundled/CartPole-dqn", "--out", "nowhere/x.mp4"], "there is no folder 'nowhere'"),
        (["bundled/CartPole-dqn", "--games", "0"], "at least 1 game"),
        (["bundled/CartPole-dqn", "--speed", "0"], "speed must lie between"),
        (["bundled/CartPole-dqn", "--speed", "nan"], "speed must lie between"),
        (["bundled/CartPole-dqn", "--max-seconds", "-1"], "above 0"),
        (["bundled/CartPole-dqn", "--seed", "-1"], "seed must lie"),
        (["bundled/CartPole-dqn", "--act", "wild"], "no acting rule 'wild'"),
        (["bundled/CartPole-dqn"] * 5, "1 to 4 players"),
        (
            ["bundled/CartPole-dqn", "bundled/Breakout-dqn"],
            "CartPole-v1 50, Breakout-v5 15.*watch them apart",
        ),
        (["bundled/Nothing"], "no bundled teacher"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(arguments, message, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["watch", *arguments, "--device", "cpu"])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    with pytest.raises(UserError, match=message):
        raise UserError(result.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("PaintedUnseen-v0", "PaintedUnseen-v0 cannot be drawn"),
        ("PaintedNeedsMore-v0", "cannot draw 'PaintedNeedsMore-v0': pygame is not installed"),
    ],
)
def test_a_game_that_cannot_be_drawn_says_so(env_id: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        watch(teacher(env_id), out=tmp_path / "x.mp4")
    assert list(tmp_path.iterdir()) == []


def test_without_an_encoder_it_says_what_to_install_and_gif_still_works(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(UserError, match=r"pip install av.*\.gif"):
        watch(teacher(), out=tmp_path / "x.mp4")
    watch(teacher(), out=tmp_path / "x.gif")
    assert [each.name for each in tmp_path.iterdir()] == ["x.gif"]


def test_watch_is_a_function_whatever_was_imported_before() -> None:
    import reincarnate.watching

    assert callable(reincarnate.watch)
    assert reincarnate.watching.watch is reincarnate.watch
