"""The frame-once replay: a ring of T rows for each of N environments.

Each frame is stored once; stacks are rebuilt when sampling and equal what the environment returned bit for
bit. Lanes advance on their own, so asynchronous environments can add their rows in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from reincarnate.replay import memory, sampling
from reincarnate.replay.columns import Columns
from reincarnate.replay.frames import Compression, DiskFrames, Frames, PackedFrames, open_frames
from reincarnate.replay.index import Completed, Ints, LaneIndex
from reincarnate.replay.mapped import MappedFile
from reincarnate.replay.rows import (
    NO_EXTRAS,
    Array,
    Extras,
    RowBatch,
    column_names,
    numpy_dtype,
    on_host,
    pack_flags,
)
from reincarnate.replay.table import Mirror, Table
from reincarnate.types import Batch, EnvSpec, SequenceBatch


class Replay:
    """A ring of lanes of rows (see :mod:`reincarnate.replay.rows`) from which n-step transitions are drawn.

    Lanes grow until ``capacity_agent_steps`` executed actions are stored, and from then on overwrite their
    oldest rows. The last observation of an episode takes a row without being an agent step, so the ring is
    longer than the capacity by as many rows as it met then; on the CPU, rows never used take no memory.

    Frames are held ``plain`` in the device's memory, ``packed`` there without loss (on the CPU), or on
    ``disk``: then in the segments of a :class:`~reincarnate.replay.store.SegmentStore`, but for the newest.
    All three give the same batches. :attr:`spill` writes segments when there are too many new frames.

    Attributes:
        spec: environments the rows come from.
        num_envs: N lanes.
        capacity: agent steps that fit, at least, at the density of episodes seen when it first filled up.
        n_step, discount: what :meth:`sample` returns; not part of the stored rows.
        device: where the tables and the batches are.
        frames_on_disk: whether frames are in segments.
        spill: for frames on disk, called with the buffer when the tail is full; gives a store all new rows.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        capacity_agent_steps: int,
        *,
        n_step: int,
        discount: float,
        device: torch.device | str = "cpu",
        frames_on_disk: bool = False,
        compression: Compression = "none",
        extras: Extras = NO_EXTRAS,
    ) -> None:
        if num_envs < 1 or capacity_agent_steps < 1 or n_step < 1:
            raise ValueError("num_envs, capacity_agent_steps and n_step must be at least 1")
        self.spec, self.num_envs, self.n_step, self.discount = spec, num_envs, n_step, discount
        self.device, self.extras = torch.device(device), extras
        self.capacity = capacity_agent_steps
        size = memory.lane_size(spec, num_envs, capacity_agent_steps, n_step)
        self._index = LaneIndex(
            num_envs, capacity_agent_steps, size, stack=spec.frame_stack, n_step=n_step, discount=discount
        )
        rows = size.longest * num_envs
        self.frames_on_disk = frames_on_disk
        self.spill: Callable[[Replay], None] | None = None
        self._frames = self._new_frames(rows, compression)
        self._columns = Columns(rows, spec.num_actions, extras, self.device)
        self._queue = Mirror(self._index.queue, self.device)
        self._summary = Mirror(self._index.summary, self.device)
        self._sizes = Mirror(self._index.sizes, self.device)
        self._gatherer = sampling.Gatherer(self._frames, self._columns, spec, num_envs, self._sizes.tensor[1])
        self._frozen: Tensor | None = None

    def _new_frames(self, rows: int, compression: Compression) -> Frames:
        spec = self.spec
        if not (self.frames_on_disk or compression != "none"):
            return Table((rows, *spec.frame_shape), spec.obs_dtype, self.device)
        if self.device.type != "cpu" or (self.frames_on_disk and compression != "none"):
            raise ValueError("frames are on disk, or compressed, beside tables in the host's memory only")
        if self.frames_on_disk:
            return DiskFrames(rows, spec.frame_shape, numpy_dtype(spec.obs_dtype), memory.TAIL_ROWS)
        return PackedFrames(rows, spec.frame_shape, numpy_dtype(spec.obs_dtype), compression)

    @property
    def frames_are_plain(self) -> bool:
        """Whether a batch costs no more than copying memory."""
        return isinstance(self._frames, Table)

    @property
    def agent_steps(self) -> int:
        """Executed actions stored."""
        return self._index.executed_rows

    @property
    def sampleable(self) -> int:
        """Transitions that :meth:`sample` draws from."""
        return self._index.sampleable

    @property
    def rows(self) -> int:
        """Rows stored, the last observations of episodes included."""
        return int((self._index.total - self._index.oldest).sum())

    @property
    def bytes_per_transition(self) -> int:
        """Bytes of one row in all columns, bookkeeping included."""
        return memory.row_bytes(self.spec, self.extras)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows stored now."""
        return self.rows * self.bytes_per_transition

    @property
    def marks(self) -> Ints:
        """Rows ever added to each lane [N]; what :meth:`rows_since` continues from."""
        return self._index.total.copy()

    @property
    def oldest(self) -> Ints:
        """Number of the oldest row stored of each lane [N], counted as :attr:`marks` are."""
        return self._index.oldest

    def can_sample(self, batch_size: int = 1) -> bool:
        """Whether at least ``batch_size`` different transitions are there."""
        return self.sampleable >= batch_size

    def add(self, lanes: Ints, rows: RowBatch) -> None:
        """Append one row to each of ``lanes`` [n] int64, distinct, in any order.

        Raises:
            ValueError: the buffer is frozen, lanes repeat or do not exist, or a shape is not the EnvSpec's.
        """
        numbers = lanes.tolist()
        if len(set(numbers)) != len(numbers) or not all(0 <= lane < self.num_envs for lane in numbers):
            raise ValueError(f"lanes must be distinct and below {self.num_envs}, got {numbers}")
        self._check(len(numbers), rows)
        if isinstance(self._frames, DiskFrames) and self._frames.room < len(numbers) and self.spill:
            self.spill(self)
        flags = pack_flags(rows)
        pushed = self._index.push(lanes, on_host(rows.reward), flags)
        self._frames.write(pushed.row, rows.frame)
        self._columns.write(pushed.row, rows, flags, pushed.need)
        self._finish(pushed.completed)

    def sample(self, batch_size: int, generator: torch.Generator | None) -> Batch:
        """Draw n-step transitions uniformly, with replacement, from all that are stored whole.

        No tensor is read by the host. ``generator`` belongs to :attr:`device`.

        Raises:
            ValueError: no transition is whole yet; :meth:`can_sample` tells beforehand.
        """
        if not self.can_sample():
            raise ValueError(f"no whole {self.n_step}-step transition among {self.rows} rows yet")
        return self.gather(self.draw(batch_size, generator))

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Tensor:
        """Flat indices [B] int64 of the rows that :meth:`sample` would return."""
        if self._frozen is not None:
            return sampling.draw_from_list(batch_size, generator, self._frozen)
        return sampling.draw_from_lanes(
            batch_size, generator, self._summary.tensor, self._queue.tensor, self._sizes.tensor[0]
        )

    def gather(self, rows: Tensor, out: Tensor | None = None) -> Batch:
        """Transitions that start at ``rows`` [B], flat indices of sampleable rows.

        ``out`` [2, B, *obs_shape], contiguous, on :attr:`device`: receives obs and next_obs.
        """
        return self._gatherer.transitions(rows, out)

    def sequence_bounds(self, length: int) -> tuple[Ints, Ints]:
        """Row numbers at which a sequence of ``length`` rows may begin: the first [N], and how many [N]."""
        return self._index.sequence_bounds(length)

    @property
    def lane_length(self) -> Tensor:
        """Rows per lane, 0-d int64 on :attr:`device`; follows when the lanes settle."""
        return self._sizes.tensor[0]

    def flat(self, numbers: Ints, lanes: Ints) -> Ints:
        """Flat indices of row ``numbers`` of ``lanes``, as :meth:`gather_sequences` takes them."""
        return self._index.flat(numbers, lanes)

    def gather_sequences(
        self, begin: Tensor, length: int, behaviour: sampling.Behaviour | None = None
    ) -> SequenceBatch:
        """``length`` rows of one lane from each of ``begin`` [B], flat indices, on :attr:`device`.

        ``behaviour`` gives the log-policy from the teacher's outputs and epsilon, where it is no column.

        Raises:
            ValueError: no column of it, and nothing to make it from.
        """
        return self._gatherer.sequences(begin, length, behaviour)

    def sampleable_rows(self) -> Tensor:
        """Flat indices ``slot * N + lane`` of everything :meth:`sample` draws from, lane by lane."""
        return torch.from_numpy(self._index.sampleable_rows()).to(self.device)

    def freeze(self) -> None:
        """Make the buffer static: it takes no more rows, and draws come from one list."""
        self._frozen = self.sampleable_rows()

    def rows_since(self, marks: Ints, limit: int | None = None) -> tuple[dict[str, Array], Ints]:
        """Rows added since ``marks`` [N], for storage, and the marks to continue from.

        ``limit`` bounds the rows of one call (to one per lane at least); without it all are copied at once.

        The rows of a lane are consecutive, oldest first, lane after lane: ``counts[l]`` of them starting
        with row number ``starts[l]``. Rows overwritten meanwhile are left out: ``starts - marks`` says how
        many. ``ring`` is :attr:`ring`.
        """
        starts = np.maximum(np.asarray(marks, dtype=np.int64), self.oldest)
        counts = self._index.total - starts
        if limit is not None:
            counts = np.minimum(counts, max(1, limit // self.num_envs))
        lanes = [
            self._index.flat(np.arange(start, start + count), lane)
            for lane, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
        rows = np.concatenate(lanes)
        columns = {"frame": self._frames.read(rows)} | self._columns.read(rows)
        return columns | {"starts": starts, "counts": counts, "ring": self.ring}, starts + counts

    @property
    def ring(self) -> Ints:
        """[2] capacity, and the rows per lane once they are settled, else 0."""
        return np.array((self.capacity, self._index.length if self._index.settled else 0), dtype=np.int64)

    def follow(self, ring: Sequence[int]) -> None:
        """Before rows are loaded: overwrite rows as early as the buffer that :attr:`ring` was read from.

        Does nothing for a buffer of another capacity, one whose lanes had not settled, or a length that
        this buffer cannot have (its transitions reach further).

        Raises:
            ValueError: the buffer is not empty.
        """
        capacity, length = ring
        if capacity == self.capacity and self._index.can_settle(length):
            self._index.settle(length)
            self._sizes.update(slice(None))

    def adopt(self, path: Path, starts: Ints, counts: Ints) -> None:
        """Frames of rows stored here are in the segment at ``path`` now; says nothing to frames in memory.

        ``starts`` and ``counts`` are those of :meth:`rows_since`.
        """
        if isinstance(self._frames, DiskFrames):
            file = open_frames(path, self.spec.frame_shape, numpy_dtype(self.spec.obs_dtype))
            lanes = np.repeat(np.arange(self.num_envs), counts)
            places = np.arange(len(lanes))
            numbers = starts[lanes] + places - (np.cumsum(counts) - counts)[lanes]
            self._frames.adopt(file, self._index.flat(numbers, lanes), places)

    def append_rows(self, arrays: dict[str, Array], path: Path | None = None) -> None:
        """Add what :meth:`rows_since` returned, in the order in which it was returned.

        ``path``: the segment they were read from, in which frames on disk stay; other frames are copied.

        Raises:
            ValueError: rows of other lanes or shapes, or rows that are not after those already there.
        """
        starts, counts = arrays["starts"], arrays["counts"]
        rows = RowBatch(**{name: arrays[name] for name in column_names(self.extras)})
        if starts.shape != (self.num_envs,):
            raise ValueError(f"rows of {len(starts)} environments, not {self.num_envs}")
        if on_host(rows.frame).dtype != numpy_dtype(self.spec.obs_dtype):
            raise ValueError(f"frames of {rows.frame.dtype}")
        self._check(int(counts.sum()), rows)
        for lane in np.flatnonzero(starts != self._index.total):
            self._index.skip(int(lane), int(starts[lane]))
        begin = np.cumsum(counts) - counts
        file, places = self._file(path), np.arange(int(counts.sum()))
        for run in range(0, int(counts.max()), self._index.longest_run):
            end = np.minimum(run + self._index.longest_run, counts)
            for lane in np.flatnonzero(end > run):
                part = slice(begin[lane] + run, begin[lane] + end[lane])
                self._append_run(int(lane), rows.part(part), file, places[part])

    def _file(self, path: Path | None) -> MappedFile | None:
        if not isinstance(self._frames, DiskFrames):
            return None
        if path is None:
            raise ValueError("frames on disk need the segment that the rows were read from")
        return open_frames(path, self.spec.frame_shape, numpy_dtype(self.spec.obs_dtype))

    def _append_run(self, lane: int, rows: RowBatch, file: MappedFile | None, places: Ints) -> None:
        flags = pack_flags(rows)
        pushed = self._index.push_run(lane, on_host(rows.reward), flags)
        if file is not None and isinstance(self._frames, DiskFrames):
            self._frames.adopt(file, pushed.row, places)
        else:
            self._frames.write(pushed.row, rows.frame)
        self._columns.write(pushed.row, rows, flags, pushed.need)
        self._finish(pushed.completed)

    def _check(self, number: int, rows: RowBatch) -> None:
        if self._frozen is not None:
            raise ValueError("the buffer is frozen")
        if rows.frame.shape != (number, *self.spec.frame_shape):
            expected = (number, *self.spec.frame_shape)
            raise ValueError(f"frames must have shape {expected}, got {tuple(rows.frame.shape)}")
        outputs = rows.teacher_outputs
        if outputs is not None and outputs.shape != (number, self.spec.num_actions):
            expected = (number, self.spec.num_actions)
            raise ValueError(f"teacher outputs must have shape {expected}, got {tuple(outputs.shape)}")
        for name, shape in self.extras.shapes(self.spec.num_actions).items():
            found = getattr(rows, name)
            if found is None or tuple(found.shape) != (number, *shape):
                raise ValueError(f"{name} must have shape {(number, *shape)}")

    def _finish(self, done: Completed) -> None:
        """Write what the future of completed rows is, and let draws know of them."""
        if len(done.row):
            self._columns.finish(done)
            self._queue.update(done.position)
        self._summary.update(slice(None))
        self._sizes.update(slice(None))
