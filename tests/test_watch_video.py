"""Videos, read back: what was written is what was played, frame for frame, at its true speed."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from reincarnate.envs import env_spec, steps_per_second
from reincarnate.watching import film, video
from reincarnate.watching.screen import CAPTION_HEIGHT

from painted_games import COLOURS, FACTOR, HEIGHT, WIDTH, gif_frames, left_half, mp4_frames, teacher, watch

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
