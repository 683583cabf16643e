"""What a viewer sees: every player's game, enlarged by whole pixels, under its name and score."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Picture = npt.NDArray[np.uint8]  # [height, width, 3] RGB

#: A game is enlarged by the least whole factor that makes it so high: Atari's 210 lines become 420.
LEAST_HEIGHT = 400
LEAST_WIDTH = 320  # room for a caption
GAP = 8
CAPTION_HEIGHT = 60
_MARGIN = 10
_NAME_SIZE, _LINE_SIZE = 15, 17
_BACKGROUND, _CAPTION = (16, 17, 20), (32, 34, 40)
_WHITE, _GREY, _GOLD = (245, 245, 245), (165, 170, 180), (255, 200, 60)


@dataclass(frozen=True)
class Caption:
    """The words above a game."""

    role: str  # "teacher", "student" or none
    name: str
    line: str  # e.g. "game 1 of 3"
    score: str
    final: bool  # the game is over


class Screen:
    """Where everything goes; every frame has the same even width and height, as video wants them.

    Games start at even pixels, so with an even factor the colours of a video, stored for two by two pixels
    together, stay exact.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Shapes: [height, width, 3] of each player's pictures."""
        self._factors = [max(1, math.ceil(LEAST_HEIGHT / height)) for height, *_ in shapes]
        sizes = [
            (height * factor, width * factor)
            for (height, width, _), factor in zip(shapes, self._factors, strict=True)
        ]
        game_height = _even(max(height for height, _ in sizes))
        self._widths = [_even(max(width, LEAST_WIDTH)) for _, width in sizes]
        self._lefts = [sum(self._widths[:i]) + GAP * i for i in range(len(sizes))]
        self._corners = [
            (CAPTION_HEIGHT + _centred(game_height, height), left + _centred(room, width))
            for (height, width), left, room in zip(sizes, self._lefts, self._widths, strict=True)
        ]
        self.height = CAPTION_HEIGHT + game_height
        self.width = self._lefts[-1] + self._widths[-1]

    def draw(self, pictures: Sequence[Picture], captions: Sequence[Caption]) -> Picture:
        """One frame, [height, width, 3]."""
        frame = np.empty((self.height, self.width, 3), dtype=np.uint8)
        frame[:] = _BACKGROUND
        for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            left, (top, start) = self._lefts[i], self._corners[i]
            frame[:CAPTION_HEIGHT, left : left + self._widths[i]] = draw_caption(caption, self._widths[i])
            large = picture.repeat(self._factors[i], axis=0).repeat(self._factors[i], axis=1)
            frame[top : top + large.shape[0], start : start + large.shape[1]] = large
        return frame

    def game_box(self, player: int) -> tuple[int, int, int]:
        """Top, left and enlargement of a player's game."""
        return (*self._corners[player], self._factors[player])


@functools.lru_cache(maxsize=64)
def draw_caption(caption: Caption, width: int) -> Picture:
    """Two lines of text, [CAPTION_HEIGHT, width, 3]."""
    image = Image.new("RGB", (width, CAPTION_HEIGHT), _CAPTION)
    pen = ImageDraw.Draw(image)
    name, line, bold = _font("", _NAME_SIZE), _font("", _LINE_SIZE), _font("-Bold", _LINE_SIZE)
    left, right = _MARGIN, width - _MARGIN
    if caption.role:
        pen.text((left, 18), f"{caption.role} ", _GREY, name, anchor="lm")
        left += math.ceil(name.getlength(f"{caption.role}  "))
    pen.text((left, 18), shortened(caption.name, name, right - left), _WHITE, name, anchor="lm")
    pen.text((_MARGIN, 43), caption.line, _GREY, line, anchor="lm")
    pen.text((right, 43), caption.score, _GOLD if caption.final else _WHITE, bold, anchor="rm")
    return np.asarray(image)


def score_text(score: float) -> str:
    """Whole scores without a point, others with one digit."""
    return f"{score:,.0f}" if score == round(score) else f"{score:,.1f}"


def shortened(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """Text of at most ``width`` pixels: the middle is left out, both ends tell names apart."""
    if font.getlength(text) <= width:
        return text
    for kept in range(len(text) - 1, 1, -1):
        short = f"{text[: kept // 2]}…{text[len(text) - (kept - kept // 2) :]}"
        if font.getlength(short) <= width:
            return short
    return "…"


@functools.cache
def _font(style: str, size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans as matplotlib ships it: the same letters on every machine."""
    import matplotlib

    return ImageFont.truetype(
        Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"DejaVuSans{style}.ttf", size
    )


def _even(size: int) -> int:
    return size + size % 2


def _centred(room: int, size: int) -> int:
    """An even offset that puts ``size`` in the middle of ``room``."""
    return (room - size) // 4 * 2
