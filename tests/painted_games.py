"""Games whose pictures are told by their step, and what was written of them, read back."""

from __future__ import annotations

import io

import av
import gymnasium
import numpy as np
from PIL import Image

import reincarnate
from reincarnate.envs.base import NEUTRAL
from reincarnate.progress import Progress
from reincarnate.teachers.teacher import Teacher, TeacherCard, TeacherSpec
from reincarnate.types import EnvSpec
from reincarnate.watching import screen
from reincarnate.watching.screen import CAPTION_HEIGHT

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
