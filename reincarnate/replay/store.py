"""Replay rows on disk: safetensors segments that are appended and never rewritten.

A buffer whose frames are on disk has them in its segments and nowhere else (see ``replay/frames.py``).
The list of segment records is the caller's to keep (in a manifest or a checkpoint): a segment counts from the
moment when the list that names it is on disk. Files not in the list are left over from a crash.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.replay import memory
from reincarnate.replay.index import Ints
from reincarnate.replay.ring import Replay
from reincarnate.replay.rows import OPTIONAL, Array, column_names

T = TypeVar("T")
#: Rows of one segment of :meth:`SegmentStore.append_new`: 60 MB of Atari, copied in memory while written.
SEGMENT_ROWS = memory.TAIL_ROWS

_NAME = re.compile(r"rows-(\d{6,})\.safetensors")


@dataclass(frozen=True)
class SegmentRecord:
    """One segment, as manifests and checkpoints list it; JSON lists are taken for tuples."""

    file: str  # name in the store's folder
    sha256: str  # of the whole file
    rows: int
    bytes: int
    ends: tuple[int, ...]  # per lane, the row number after its last row
    ring: tuple[int, ...]  # Replay.ring when it was written

    def __post_init__(self) -> None:
        """``TypeError`` on other values: lists of records come from files that can be damaged."""
        object.__setattr__(self, "ends", tuple(self.ends))
        object.__setattr__(self, "ring", tuple(self.ring))
        numbers = (self.rows, self.bytes, *self.ends, *self.ring)
        texts = isinstance(self.file, str) and isinstance(self.sha256, str)
        if not texts or len(self.ring) != 2 or any(type(n) is not int or n < 0 for n in numbers):
            raise TypeError(f"no record of a segment: {self.file!r}")


class SegmentStore:
    """Segments of one buffer in a folder; other files of the folder are left alone."""

    def __init__(self, folder: Path, records: Iterable[SegmentRecord] = ()) -> None:
        """``records``: the list kept elsewhere; nothing is deleted before :meth:`sweep`."""
        self._folder = folder
        self._records = list(records)
        self._number = _highest_number(self._records)

    @property
    def records(self) -> tuple[SegmentRecord, ...]:
        """Segments in the order in which they were appended."""
        return tuple(self._records)

    @property
    def rows(self) -> int:
        """Rows in all segments."""
        return sum(record.rows for record in self._records)

    def append(self, arrays: dict[str, Array]) -> SegmentRecord:
        """Write what :meth:`Replay.rows_since` returned; it is on disk when this returns.

        Raises:
            UserError: the folder cannot be written.
        """
        data = safetensors.numpy.save({name: np.ascontiguousarray(a) for name, a in arrays.items()})
        self._number += 1  # a name is never used again, be its segment discarded or not
        record = SegmentRecord(
            file=f"rows-{self._number:06d}.safetensors",
            sha256=hashlib.sha256(data).hexdigest(),
            rows=int(arrays["counts"].sum()),
            bytes=len(data),
            ends=tuple((arrays["starts"] + arrays["counts"]).tolist()),
            ring=tuple(arrays["ring"].tolist()),
        )
        self._write(record.file, data)
        self._records.append(record)
        return record

    def append_new(self, replay: Replay, marks: Ints) -> Ints:
        """Append the rows since ``marks`` in segments of :data:`SEGMENT_ROWS`; the marks to continue from.

        Raises:
            UserError: the folder cannot be written.
        """
        while (marks < replay.marks).any():
            arrays, marks = replay.rows_since(marks, SEGMENT_ROWS)
            record = self.append(arrays)
            replay.adopt(self._folder / record.file, arrays["starts"], arrays["counts"])
        return marks

    def restore(self, records: Iterable[SegmentRecord]) -> None:
        """Continue from a list kept elsewhere; segments that it does not name are deleted."""
        self._records = list(records)
        self._number = _highest_number(self._records)
        self.sweep()

    def discard_before(self, oldest: Sequence[int] | Ints) -> None:
        """Take segments off the records that hold only rows before :attr:`Replay.oldest` [N].

        Their files stay until :meth:`sweep`, which is to be called once the new list is on disk.
        """
        before = tuple(int(number) for number in oldest)
        while self._records and all(
            end <= number for end, number in zip(self._records[0].ends, before, strict=True)
        ):
            del self._records[0]

    def sweep(self) -> None:
        """Delete segments that are not in the records, and what a crash left half-written."""
        if not self._folder.is_dir():
            return
        listed = {record.file for record in self._records}
        for path in self._folder.iterdir():
            half_written = path.name.startswith(".rows-")
            if half_written or (_NAME.fullmatch(path.name) and path.name not in listed):
                path.unlink(missing_ok=True)

    def load_into(self, replay: Replay) -> None:
        """Add all segments to an empty ``replay``, which then samples exactly as the stored one did.

        Raises:
            UserError: a segment is missing, truncated, altered, or of another kind of environment.
        """
        if self._records:
            replay.follow(self._records[-1].ring)  # a ring that does not fit does nothing
        for record, arrays in zip(self._records, _ahead(self._read, self._records), strict=True):
            path = self._folder / record.file
            try:
                _check_rows(arrays, replay.num_envs, replay.spec.num_actions)
                replay.append_rows(arrays, path)
            except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
                raise UserError(f"{path} does not fit this buffer ({error}); collect it again") from None

    def _write(self, name: str, data: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write_bytes(self._folder / name, data)
            _flush_names(self._folder)
        except OSError as error:
            raise UserError(
                f"cannot write {self._folder / name} ({error.strerror}); check the room and rights there"
            ) from None

    def _read(self, record: SegmentRecord) -> dict[str, Array]:
        path = self._folder / record.file
        remedy = "put back a copy of it, or start again without this data"
        if not is_segment_name(record.file):
            raise UserError(f"{record.file!r} is not the name of a replay segment; the list is damaged")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
        if len(data) != record.bytes:
            raise UserError(f"{path} has {len(data)} bytes instead of {record.bytes}; {remedy}")
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise UserError(f"{path} was altered after it was written (sha256 differs); {remedy}")
        try:
            return safetensors.numpy.load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"{path} is no replay segment ({error}); {remedy}") from None


def _check_rows(arrays: dict[str, Array], num_envs: int, num_actions: int) -> None:
    """Refuse, with ValueError or KeyError, rows that would fail or poison a learner much later.

    A segment can come from somebody else: its hash says that it is the one that was listed, not that it is
    good.
    """
    for name in ("starts", "counts"):
        each = arrays[name]
        if each.shape != (num_envs,):
            raise ValueError(f"rows of {each.size} environments, not {num_envs}")
        if each.dtype.kind != "i" or int(each.min()) < 0:
            raise ValueError(f"{name} that are no counts")
    number = int(arrays["counts"].sum())
    for name in set(column_names()) - (set(OPTIONAL) - arrays.keys()):
        if arrays[name].shape[:1] != (number,):
            raise ValueError(f"{name} of {arrays[name].shape[:1]} rows, not {number}")
    action, outputs = arrays["action"], arrays["teacher_outputs"]
    same_actions = outputs.shape[1:] == (num_actions,)  # else that is what is told
    in_range = not number or 0 <= action.min() <= action.max() < num_actions
    if action.dtype.kind not in "iu" or (same_actions and not in_range):
        raise ValueError(f"actions that are not 0 to {num_actions - 1}")
    for name in ("frame", "reward", "raw_reward", "teacher_outputs"):
        if arrays[name].dtype.kind not in "iu" and not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name} holds what is no number")


def is_segment_name(name: str) -> bool:
    """Whether a file of that name can be a segment."""
    return _NAME.fullmatch(name) is not None


def _ahead(read: Callable[[SegmentRecord], T], records: Sequence[SegmentRecord]) -> Iterator[T]:
    """Read one segment while the one before is in use: hashing it takes as long as copying it."""
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[Future[T]] = deque()
        for record in records:
            waiting.append(pool.submit(read, record))
            if len(waiting) > 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _highest_number(records: list[SegmentRecord]) -> int:
    matches = (_NAME.fullmatch(record.file) for record in records)
    return max((int(match.group(1)) for match in matches if match), default=0)


def _flush_names(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
