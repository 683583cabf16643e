"""Video files, written frame by frame: H.264 in mp4, or GIF, by the ending of the name.

Nothing but the frame at hand is kept, and the file appears under its name when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reincarnate.errors import UserError

#: Frames per second that screens (mp4) and browsers (GIF: no delay below 0.02 s) really show.
MOST_FRAMES_PER_SECOND = {".mp4": 60, ".gif": 50}
#: One in so many seconds can be jumped to.
_KEY_FRAME_SECONDS = 4
_BT709, _LIMITED_RANGE = 1, 1  # H.264's numbers for the colours that players assume, and say so


class Video(Protocol):
    """A video that is being written; all frames [height, width, 3] RGB have one size, even both ways."""

    def add(self, frame: npt.NDArray[np.uint8]) -> None:
        """Append a frame."""

    def finish(self) -> None:
        """Write what is left."""

    def close(self) -> None:
        """Let go of the file, finished or not."""


def check_path(path: Path) -> None:
    """Refuse early what cannot be written.

    Raises:
        UserError: another ending, no such folder, or no encoder for mp4.
    """
    if path.suffix.lower() not in MOST_FRAMES_PER_SECOND:
        raise UserError(f"cannot write {str(path)!r} as a video; give a name that ends in .mp4 or .gif")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {str(path.parent)!r} to write {path.name} to; make it first")
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; give the name of a file")
    if path.suffix.lower() == ".mp4":
        _av()


def frames_per_second(path: Path) -> int:
    """The most that a file of this ending shows."""
    return MOST_FRAMES_PER_SECOND[path.suffix.lower()]


@contextlib.contextmanager
def open_video(path: Path, rate: Fraction) -> Iterator[Video]:
    """A video of ``rate`` frames per second; it takes the name ``path`` if the block ends well.

    Raises:
        UserError: as :func:`check_path`.
    """
    check_path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        video: Video = (_Gif if path.suffix.lower() == ".gif" else _Mp4)(Path(temporary), rate)
        with contextlib.closing(video):
            yield video
            video.finish()
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _av() -> Any:
    """PyAV, if it is there and can write H.264."""
    try:
        import av
    except ImportError:
        raise UserError(
            "writing mp4 needs PyAV, which is not installed: pip install av, or give a name that ends in .gif"
        ) from None
    if "libx264" not in av.codecs_available:
        raise UserError(
            "this PyAV cannot write H.264 (it was built without libx264): pip install --force-reinstall av, "
            "or give a name that ends in .gif"
        )
    return av


class _Mp4:
    """H.264 as every browser plays it: 4:2:0, and its index in front, so that it starts at once."""

    def __init__(self, path: Path, rate: Fraction) -> None:
        self._av, self._rate = _av(), rate
        self._container = self._av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream: Any = None
        self._frames = 0

    def add(self, frame: npt.NDArray[np.uint8]) -> None:
        """Append a frame."""
        if self._stream is None:
            self._stream = self._start(*frame.shape[:2])
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        yuv = picture.reformat(
            format="yuv420p", dst_colorspace="ITU709", src_color_range="JPEG", dst_color_range="MPEG"
        )
        yuv.pts, yuv.time_base = self._frames, 1 / self._rate
        self._frames += 1
        self._container.mux(self._stream.encode(yuv))

    def _start(self, height: int, width: int) -> Any:
        stream = self._container.add_stream("libx264", rate=self._rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "20", "preset": "medium", "tune": "animation"}
        codec = stream.codec_context
        codec.time_base = 1 / self._rate
        codec.gop_size = max(1, round(self._rate * _KEY_FRAME_SECONDS))
        codec.colorspace = codec.color_primaries = codec.color_trc = _BT709
        codec.color_range = _LIMITED_RANGE
        return stream

    def finish(self) -> None:
        """Write what the encoder still holds."""
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))

    def close(self) -> None:
        """Write the index and let go of the file."""
        self._container.close()


class _Gif:
    """GIF89a: of every frame the part that changed, in its own (up to 256) colours; repeats for ever.

    Pillow would collect all frames before it writes the first, so it only packs single ones here.
    """

    def __init__(self, path: Path, rate: Fraction) -> None:
        self._file, self._rate = path.open("wb"), rate
        self._frames, self._hundredths = 0, 0  # added; of a second, written
        self._shown: npt.NDArray[np.uint8] | None = (
            None  # what the file shows once the waiting part is written
        )
        self._waiting: tuple[npt.NDArray[np.uint8], tuple[int, int]] | None = None  # part, its left and top

    def add(self, frame: npt.NDArray[np.uint8]) -> None:
        """Append a frame; the one before it is written now that its length is known."""
        box = _changed(self._shown, frame)
        if box is not None:
            if self._shown is None:
                self._head(*frame.shape[:2])
            self._write_waiting()
            top, bottom, left, right = box
            self._waiting, self._shown = (frame[top:bottom, left:right].copy(), (left, top)), frame.copy()
        self._frames += 1

    def _head(self, height: int, width: int) -> None:
        size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
        self._file.write(b"GIF89a" + size + b"\x70\x00\x00")  # no common colours
        self._file.write(b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # repeat for ever

    def _write_waiting(self) -> None:
        """The waiting part, shown up to the frames added so far; rounding never adds up."""
        if self._waiting is None:
            return
        from PIL import GifImagePlugin

        part, corner = self._waiting
        until = round(100 * self._frames / self._rate)
        delay, self._hundredths = until - self._hundredths, until
        for block in GifImagePlugin.getdata(
            _paletted(part), corner, duration=10 * delay, include_color_table=True, disposal=1
        ):
            self._file.write(block)
        self._waiting = None

    def finish(self) -> None:
        """Write the last frame and the end mark."""
        self._write_waiting()
        self._file.write(b";")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _changed(
    before: npt.NDArray[np.uint8] | None, frame: npt.NDArray[np.uint8]
) -> tuple[int, int, int, int] | None:
    """Top, bottom, left and right of what differs from the frame before; None where nothing does."""
    if before is None:
        return 0, frame.shape[0], 0, frame.shape[1]
    differs = (before != frame).any(axis=2)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    if not len(rows):
        return None
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _paletted(frame: npt.NDArray[np.uint8]) -> Any:
    """A palette image of exactly these colours, or of the 256 nearest where there are more."""
    from PIL import Image

    packed = frame.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)
    colours, index = np.unique(packed, return_inverse=True)
    if len(colours) > 256:
        return Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE)
    image = Image.fromarray(index.reshape(packed.shape).astype(np.uint8), "P")
    image.putpalette(
        np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8).tobytes()
    )
    return image
