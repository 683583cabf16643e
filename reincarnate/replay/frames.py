"""Frames that are not held plainly in memory: in files on disk, or compressed.

Both are what :class:`~reincarnate.replay.table.Table` is for frames in memory: rows are written, and copies
of them taken, bit for bit the same. Only frames are worth it; the other columns of a row are 2 % of it.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.replay.index import Ints
from reincarnate.replay.mapped import MappedFile
from reincarnate.replay.rows import Array, on_host

#: How a lossless compression is called; ``none`` stores plainly.
Compression = Literal["none", "lz4", "zlib"]

# An address is file * 2^32 + place in it; file 0 is the tail.
_FILE_BITS = 32
_NOWHERE = -1
# A bytes object's own size, its place in the list, and what the allocator rounds up by.
_OBJECT_BYTES = 33 + 8 + 15


class Frames(Protocol):
    """Where the frames of a replay are."""

    def write(self, rows: Array, values: Array | Tensor) -> None:
        """Overwrite ``rows`` [n] int64, distinct."""

    def take(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of ``rows`` [n] int64, in ``out`` [n, *frame_shape] if that is given."""

    def read(self, rows: Array) -> Array:
        """A host copy of ``rows`` [n] int64."""


class DiskFrames:
    """Frames in files that others write once: the segments of checkpoints and of D_T, mapped into memory.

    New frames wait in a *tail* in memory. When the owner of the segments has written rows to a file,
    :meth:`adopt` makes these rows refer to it, and the tail has room again. So every frame is on disk once,
    and the buffer may be larger than memory: what is read often stays in the system's page cache.

    ``take`` asks for all its rows in advance and reads neighbours in one go: the rows of a stack are
    neighbours in a segment, so a transition is one read of some 50 kB, and all reads are under way at once.
    """

    def __init__(
        self, rows: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], tail_rows: int
    ) -> None:
        """Room for ``rows`` frames of ``shape``, of which at most ``tail_rows`` wait for a file."""
        self._address: Ints = np.full(rows, _NOWHERE, dtype=np.int64)
        self._tail: Array = np.zeros((tail_rows, *shape), dtype=dtype)
        self._used = 0  # of the tail
        self._files: dict[int, MappedFile] = {}
        self._live: dict[int, int] = {0: 0}  # per file, rows that refer to it
        self._last_file = 0

    @property
    def room(self) -> int:
        """Rows that can be written before some must be adopted."""
        return len(self._tail) - self._used

    @property
    def mapped_files(self) -> int:
        """Files that rows refer to."""
        return len(self._files)

    def write(self, rows: Array, values: Array | Tensor) -> None:
        """Overwrite ``rows`` [n] int64, distinct; n is at most :attr:`room`."""
        if len(rows) > self.room:
            raise RuntimeError("the tail is full: its rows must be written to a file first")
        places = np.arange(self._used, self._used + len(rows))
        self._tail[places] = on_host(values)
        self._used += len(rows)
        self._refer(rows, 0, places)

    def adopt(self, file: MappedFile, rows: Ints, places: Ints) -> None:
        """Let ``rows`` [n] be those at ``places`` [n] of ``file``, which holds the same frames."""
        if file is not self._files.get(self._last_file):
            self._last_file += 1
            self._files[self._last_file] = file
            self._live[self._last_file] = 0
        self._refer(rows, self._last_file, places)

    def take(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of ``rows`` [n] int64, in ``out`` [n, *frame_shape] if that is given."""
        addresses, which = np.unique(self._address[rows.numpy()], return_inverse=True)
        runs = list(_runs(addresses))
        for file, place, begin, end in runs:
            if file:
                self._files[file].will_need(place, end - begin)
        distinct = np.empty((len(addresses), *self._tail.shape[1:]), dtype=self._tail.dtype)
        for file, place, begin, end in runs:
            source = self._files[file].array if file else self._tail
            distinct[begin:end] = source[place : place + end - begin]
        return _expand(distinct, which, out)

    def read(self, rows: Array) -> Array:
        """A host copy of ``rows`` [n] int64."""
        return self.take(torch.from_numpy(np.asarray(rows, dtype=np.int64))).numpy()

    def _refer(self, rows: Array, file: int, places: Array) -> None:
        before, counts = np.unique(self._address[rows] >> _FILE_BITS, return_counts=True)
        self._address[rows] = (file << _FILE_BITS) + places
        self._live[file] += len(rows)
        for old, count in zip(before.tolist(), counts.tolist(), strict=True):
            if old != _NOWHERE:
                self._forget(old, count)

    def _forget(self, file: int, count: int) -> None:
        self._live[file] -= count
        if not self._live[file]:
            if file:
                del self._live[file], self._files[file]  # the last array of it closes the map
            else:
                self._used = 0


class PackedFrames:
    """Frames in memory, each compressed without loss on its own."""

    def __init__(
        self, rows: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], compression: Compression
    ) -> None:
        self._pack, self._unpack = codec(compression)
        self._shape, self._dtype = shape, dtype
        self._frames = [b""] * rows

    @property
    def packed_bytes(self) -> int:
        """Bytes of the compressed frames, without what Python takes to hold them."""
        return sum(map(len, self._frames))

    def write(self, rows: Array, values: Array | Tensor) -> None:
        """Overwrite ``rows`` [n] int64, distinct."""
        frames = np.asarray(on_host(values), dtype=self._dtype)
        for row, frame in zip(rows.tolist(), frames, strict=True):
            self._frames[row] = self._pack(frame.tobytes())

    def take(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of ``rows`` [n] int64, in ``out`` [n, *frame_shape] if that is given."""
        unique, which = np.unique(rows.numpy(), return_inverse=True)
        distinct = np.zeros((len(unique), *self._shape), dtype=self._dtype)
        for frame, row in zip(distinct, unique.tolist(), strict=True):
            if packed := self._frames[row]:  # never written: zeros, as in a table
                frame[...] = np.frombuffer(self._unpack(packed), dtype=self._dtype).reshape(self._shape)
        return _expand(distinct, which, out)

    def read(self, rows: Array) -> Array:
        """A host copy of ``rows`` [n] int64."""
        return self.take(torch.from_numpy(np.asarray(rows, dtype=np.int64))).numpy()


def codec(compression: Compression) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    """Functions that pack and unpack bytes.

    Raises:
        UserError: the library of that compression is not installed.
    """
    if compression == "zlib":
        return lambda data: zlib.compress(data, 1), zlib.decompress
    try:
        block = importlib.import_module("lz4.block")
    except ImportError:
        raise UserError(
            "system.compress=lz4 needs the package lz4: run `pip install lz4`, or use system.compress=zlib"
        ) from None
    return block.compress, block.decompress


def packed_frame_bytes(frames: Array, compression: Compression) -> float:
    """Mean bytes in memory of one of ``frames`` [n, *frame_shape] when packed, as an object of Python."""
    pack, _ = codec(compression)
    return float(np.mean([_OBJECT_BYTES + len(pack(frame.tobytes())) for frame in frames]))


def open_frames(path: Path, frame_shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> MappedFile:
    """Map the frames of the segment at ``path``.

    Raises:
        ValueError: no frames of that shape and type in there.
        OSError: it cannot be read.
    """
    file = MappedFile(path, "frame")
    if file.array.dtype != dtype:
        raise ValueError(f"frames of {file.array.dtype}")
    if file.array.shape[1:] != frame_shape:
        raise ValueError(f"frames must have shape {frame_shape}, got {file.array.shape[1:]}")
    return file


def _runs(addresses: Ints) -> Iterator[tuple[int, int, int, int]]:
    """Neighbours among sorted distinct addresses: file, first place in it, and where they are in the list."""
    begins = np.flatnonzero(np.diff(addresses, prepend=_NOWHERE - 1) != 1)
    ends = np.append(begins[1:], len(addresses))[: len(begins)]
    firsts = addresses[begins]
    places = firsts & (2**_FILE_BITS - 1)
    return zip((firsts >> _FILE_BITS).tolist(), places.tolist(), begins.tolist(), ends.tolist(), strict=True)


def _expand(distinct: Array, which: Array, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.from_numpy(distinct[which])
    # Any mode but "raise", whose output would be buffered; the indices are right.
    distinct.take(which, axis=0, out=out.numpy(), mode="clip")
    return out
