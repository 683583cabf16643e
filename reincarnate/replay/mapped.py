"""One array of a safetensors file, mapped into memory instead of read."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from reincarnate.replay.rows import Array

_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype(np.uint8), "F32": np.dtype("<f4")}
_LONGEST_HEADER = 100 << 20  # what the format itself allows


class MappedFile:
    """``array``: read-only, backed by the file; the system reads pages when they are touched.

    The map stays valid when the file's name is deleted, as long as the array is referred to.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Map the array called ``name`` of the safetensors file at ``path``.

        Raises:
            ValueError: no such array, or the file is damaged.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        dtype, shape, self._offset = self._locate(name)
        self.array: Array = np.frombuffer(
            self._map, dtype=dtype, count=math.prod(shape), offset=self._offset
        ).reshape(shape)
        self._item_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._advise = getattr(self._map, "madvise", None)
        if self._advise is not None and hasattr(mmap, "MADV_RANDOM"):
            # Without it a read of one page fetches some 30 around it, which nobody asked for.
            self._advise(mmap.MADV_RANDOM)

    def will_need(self, first: int, count: int) -> None:
        """Start reading items ``first .. first + count - 1`` of the array, without waiting."""
        if self._advise is None or not hasattr(mmap, "MADV_WILLNEED"):
            return
        begin = self._offset + first * self._item_bytes
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._advise(mmap.MADV_WILLNEED, page, begin + count * self._item_bytes - page)

    def _locate(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        size = int.from_bytes(self._map[:8], "little")
        if size > min(_LONGEST_HEADER, len(self._map) - 8):
            raise ValueError("its header is longer than the file")
        try:
            entry = json.loads(self._map[8 : 8 + size])[name]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its header does not tell where {name!r} is ({error})") from None
        begin, end = 8 + size + begin, 8 + size + end
        if min(shape, default=0) < 0 or not 8 + size <= begin <= end <= len(self._map):
            raise ValueError(f"its header puts {name!r} outside the file")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"its header gives {name!r} another size than its shape")
        return dtype, shape, begin
