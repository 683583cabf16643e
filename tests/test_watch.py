"""Videos, read back: what was written is what was played, frame for frame, pixel for pixel."""

from __future__ import annotations

import io
import json
import warnings
from fractions import Fraction
from pathlib import Path

import av
import cv2
import envpool
import gymnasium
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import reincarnate
from reincarnate import runfiles
from reincarnate.cli import main
from reincarnate.config import RunConfig, override
from reincarnate.envs import env_spec, make_env, steps_per_second
from reincarnate.envs.base import NEUTRAL
from reincarnate.errors import UserError
from reincarnate.progress import Progress
from reincarnate.teachers.formats.native import save_native
from reincarnate.teachers.teacher import Teacher, TeacherCard, TeacherSpec
from reincarnate.types import EnvSpec, EnvStep
from reincarnate.watching import film, players, screen, video
from reincarnate.watching.screen import CAPTION_HEIGHT, Caption, Screen

COLOURS = [(200, 40, 40), (40, 180, 60), (50, 60, 220), (230, 200, 50), (240, 240, 240), (20, 20, 20)]
HEIGHT, WIDTH, FACTOR = 30, 40, 14  # 14 is the least factor that makes 30 lines at least 400


class Painted(gymnasium.Env):
    """A game of ``length`` steps, 1.5 points each; its left half shows the step's colour."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=3, render_mode=None):
        self.length, self.render_mode, self.at = length, render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.at += 1
        return np.zeros(2, np.float32), 1.5, self.at == self.length, False, {}

    def render(self):
        picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        picture[:, : WIDTH // 2] = COLOURS[self.at % len(COLOURS)]
        return picture


class Fast(Painted):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 100}  # noqa: RUF012


class Unseen(Painted):
    metadata = {"render_modes": []}  # noqa: RUF012


class NeedsMore(Painted):
    def render(self):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed, run `pip install pygame`")


for name, make, length in [
    ("PaintedShort-v0", Painted, 3),
    ("PaintedLong-v0", Painted, 7),
    ("PaintedFast-v0", Fast, 9),
    ("PaintedUnseen-v0", Unseen, 3),
    ("PaintedNeedsMore-v0", NeedsMore, 3),
]:
    gymnasium.register(name, entry_point=make, kwargs={"length": length})


def spec_of(env_id):
    env = EnvSpec(env_id, "vector", 2, (2,), **NEUTRAL, max_agent_steps=1000)
    return TeacherSpec(env, "q_values", "mlp", {"hidden": [4]}, "dqn")


def teacher(env_id="PaintedShort-v0", ref="somebody/painter"):
    spec = spec_of(env_id)
    card = TeacherCard(ref, ref, None, "x", "0" * 64, "native")
    return Teacher(spec, card, spec.build().state_dict())


def watch(*who, **settings):
    return reincarnate.watch(*who, device="cpu", progress=Progress(stream=io.StringIO()), **settings)


def mp4_frames(path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def gif_frames(path):
    """Frames [H, W, 3] and their durations in hundredths of a second."""
    with Image.open(path) as image:
        frames, lengths = [], []
        for i in range(image.n_frames):
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
            lengths.append(image.info["duration"] // 10)
    return frames, lengths


def left_half(frame, pane=0):
    """The colour in the middle of a game's left half."""
    left = pane * (WIDTH * FACTOR + screen.GAP)
    return frame[CAPTION_HEIGHT + HEIGHT * FACTOR // 2, left + WIDTH * FACTOR // 4].astype(int)


def score_part(frame, pane=0):
    left = pane * (WIDTH * FACTOR + screen.GAP)
    return frame[:CAPTION_HEIGHT, left + WIDTH * FACTOR // 2 : left + WIDTH * FACTOR]


# ------------------------------------------------------------ the file


def test_an_mp4_is_h264_that_browsers_play_and_holds_every_step(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    watched = watch(teacher(), out=path, games=2)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == 10
        assert (stream.width, stream.height) == (WIDTH * FACTOR, HEIGHT * FACTOR + CAPTION_HEIGHT)
        assert stream.codec_context.colorspace == 1  # BT.709, said aloud
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # plays before it is loaded
    frames = mp4_frames(path)
    # a first picture, three steps, and the last one held for a second, twice
    expected = [COLOURS[i] for i in (0, 1, 2, *[3] * 10)] * 2
    assert len(frames) == len(expected) == watched.frames
    assert watched.seconds == pytest.approx(2.6)
    for frame, colour in zip(frames, expected, strict=True):
        assert np.abs(left_half(frame) - colour).max() <= 4
    assert watched.players[0].scores == (4.5, 4.5)
    assert not watched.cut
    assert [each.name for each in tmp_path.iterdir()] == ["x.mp4"]


def test_a_gif_has_exact_colours_and_true_time(tmp_path: Path) -> None:
    watched = watch(teacher(), out=tmp_path / "x.GIF", games=1)
    frames, hundredths = gif_frames(tmp_path / "x.GIF")
    # The score changes with every step; what stands still is one frame shown for longer.
    assert [tuple(left_half(frame)) for frame in frames] == COLOURS[:4]
    assert hundredths == [10, 10, 10, 100]
    assert watched.frames == 13
    assert frames[0].shape == (watched.height, watched.width, 3)


def test_gif_delays_add_up_where_a_frame_is_no_whole_hundredth(tmp_path: Path) -> None:
    frames = [np.full((8, 8, 3), 20 * i, np.uint8) for i in range(10)]
    with video.open_video(tmp_path / "x.gif", Fraction(15)) as out:
        for frame in frames:
            out.add(frame)
    got, hundredths = gif_frames(tmp_path / "x.gif")
    assert sum(hundredths) == 67
    assert set(hundredths) == {6, 7}
    for mine, theirs in zip(frames, got, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_gif_of_many_colours_is_near(tmp_path: Path) -> None:
    ramp = np.stack(np.meshgrid(np.arange(64) * 4, np.arange(64) * 4, [0], indexing="ij"), -1)
    noisy = ramp.reshape(64, 64, 3).astype(np.uint8)  # 4096 colours
    with video.open_video(tmp_path / "x.gif", Fraction(10)) as out:
        out.add(noisy)
    [got], _ = gif_frames(tmp_path / "x.gif")
    assert np.abs(got.astype(int) - noisy).mean() < 8


def test_an_interrupted_video_leaves_nothing_and_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.mp4"
    path.write_bytes(b"old")

    def interrupt(self, takes, bar):
        self._add(next(takes), 0, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(film._Film, "shoot", interrupt)
    with pytest.raises(KeyboardInterrupt):
        watch(teacher(), out=path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.mp4"]
    assert path.read_bytes() == b"old"


# ------------------------------------------------------------ time


def test_a_game_faster_than_a_screen_skips_pictures_but_not_its_last(tmp_path: Path) -> None:
    watched = watch(teacher("PaintedFast-v0"), out=tmp_path / "x.gif")  # 100 steps a second, 50 shown
    frames, hundredths = gif_frames(tmp_path / "x.gif")
    assert [tuple(left_half(frame)) for frame in frames] == [COLOURS[i % 6] for i in (0, 2, 4, 6, 8, 9)]
    assert hundredths == [2] * 5 + [100]
    assert watched.players[0].scores == (13.5,)


def test_speed_and_the_limit_of_seconds(tmp_path: Path) -> None:
    watched = watch(teacher("PaintedLong-v0"), out=tmp_path / "x.gif", speed=2, max_seconds=0.2)
    frames, hundredths = gif_frames(tmp_path / "x.gif")
    assert [tuple(left_half(frame)) for frame in frames] == COLOURS[:4]
    assert hundredths == [5] * 4
    assert watched.cut
    assert watched.players[0].scores == ()


@pytest.mark.parametrize(
    ("env_id", "rate"),
    [
        ("CartPole-v1", 50),
        ("CartPole-v0", 50),
        ("Acrobot-v1", 15),
        ("LunarLander-v2", 50),
        ("LunarLander-v3", 50),
    ],
)
def test_true_speed_of_vector_games(env_id: str, rate: int) -> None:
    assert steps_per_second(env_spec(env_id)) == rate


def test_true_speed_of_atari_follows_the_frame_skip() -> None:
    assert steps_per_second(env_spec("Pong-v5")) == 15
    assert steps_per_second(env_spec("Pong-v5", frame_skip=7)) == Fraction(60, 7)


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


# ------------------------------------------------------------ pictures of environments


def grey(picture):
    return cv2.resize(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
def test_the_picture_is_what_the_policy_sees_and_changes_nothing(backend: str) -> None:
    spec = env_spec("Breakout-v5", sticky_probability=0.25)
    rng, resets = np.random.default_rng(0), 0
    with make_env(spec, 1, 3, backend, pictures=True) as env, make_env(spec, 1, 3, backend) as plain:
        step, other = env.reset(), plain.reset()
        for _ in range(300):
            [picture] = env.pictures()
            assert picture.shape == (210, 160, 3)
            assert picture.dtype == np.uint8
            np.testing.assert_array_equal(step.obs, other.obs)
            np.testing.assert_array_equal(step.raw_reward, other.raw_reward)
            if not step.game_over[0]:  # a game that ends within a frame skip leaves the policy an old picture
                off = np.abs(grey(picture).astype(int) - step.obs[0, -1])
                # EnvPool greys each frame before the maximum, Stable-Baselines3 after it
                assert off.max() == 0 if backend == "gymnasium" else (off > 3).mean() < 0.01
            action = rng.integers(0, 2, 1)  # the bat stands still
            step, other = env.step(action), plain.step(action)
            resets += int(step.reset.sum())
            if resets == 2:
                break
        assert resets == 2  # lives were lost, and the pictures went on with the game
        with pytest.raises(RuntimeError, match="without pictures"):
            plain.pictures()


def space_invaders(frame_skip):
    """EnvPool itself, which can show the newest frame."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = envpool.make(
            "SpaceInvaders-v5",
            env_type="gymnasium",
            num_envs=1,
            seed=9,
            frame_skip=frame_skip,
            episodic_life=True,
            render_mode="rgb_array",
        )
    pool.reset()
    return pool


@pytest.mark.parametrize("frame_skip", [1, 4])
def test_the_picture_has_what_the_newest_frame_has_and_what_flickers(frame_skip: int) -> None:
    own, more = space_invaders(frame_skip), 0
    with make_env(env_spec("SpaceInvaders-v5", frame_skip=frame_skip), 1, 9, pictures=True) as env:
        env.reset()
        for i in range(60):
            picture, newest = env.pictures()[0], own.render()[0]
            assert (picture >= newest).all()
            more += int((picture > newest).any())
            env.step(np.array([i % 6]))
            own.step(np.array([i % 6], dtype=np.int32))
    assert more == 0 if frame_skip == 1 else more > 10


def test_vector_games_are_drawn_by_envpool_without_other_packages() -> None:
    with make_env(env_spec("CartPole-v1"), 2, 0, pictures=True) as env:
        env.reset()
        pictures = env.pictures()
    assert pictures.shape == (2, 400, 600, 3)
    assert (pictures[:, 0, 0] == 255).all()


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
