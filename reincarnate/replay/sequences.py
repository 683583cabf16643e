"""Batches of sequences: drawn from all that is stored, mixed with fresh ones that are used once.

Sequences are rows of one lane in their order, so none crosses into another environment, whatever the order
in which the lanes' rows came. Both kinds are read from the same store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reincarnate.replay import sampling
from reincarnate.replay.feed import Sampler
from reincarnate.replay.index import Ints
from reincarnate.replay.ring import Replay
from reincarnate.replay.sampling import Behaviour
from reincarnate.types import SequenceBatch


class FreshRows:
    """The rows that no update has used yet, cut into sequences of ``length`` rows, lane by lane.

    The last row of a sequence only serves to bootstrap and is the first of the next one, so every action is
    learnt from once. Rows that were overwritten before their turn are passed over.

    Args:
        replay: where the rows are.
        length: rows of a sequence, 2 or more.
        next_rows: as :attr:`next_rows` of a run that is resumed; the oldest rows stored unless given.
    """

    def __init__(self, replay: Replay, length: int, next_rows: Sequence[int] | None = None) -> None:
        self._replay, self._length = replay, length
        self._next: Ints = np.zeros(replay.num_envs, dtype=np.int64)
        if next_rows is not None:
            self._next[:] = next_rows

    @property
    def next_rows(self) -> list[int]:
        """Per lane, the number of the first row that is not used yet."""
        return [int(number) for number in self._next]

    @property
    def waiting(self) -> int:
        """Whole sequences that can be taken."""
        return int(self._per_lane().sum())

    def take(self, count: int) -> Ints:
        """Flat indices [count] of the first rows of the oldest sequences waiting; they are used now.

        Raises:
            ValueError: fewer are waiting.
        """
        waiting = self._per_lane()
        if waiting.sum() < count:
            raise ValueError(f"{waiting.sum()} fresh sequences are there, not {count}")
        lanes, numbers = [], []
        for _ in range(count):
            lane = int(np.where(waiting > 0, self._next, np.iinfo(np.int64).max).argmin())
            lanes.append(lane)
            numbers.append(self._next[lane])
            self._next[lane] += self._length - 1
            waiting[lane] -= 1
        return self._replay.flat(np.array(numbers, dtype=np.int64), np.array(lanes, dtype=np.int64))

    def _per_lane(self) -> Ints:
        begin, _ = self._replay.sequence_bounds(self._length)
        np.maximum(self._next, begin, out=self._next)
        whole: Ints = np.maximum(0, self._replay.marks - self._next - 1) // (self._length - 1)
        return whole


def sequences_stored(replay: Replay, length: int) -> int:
    """How many sequences of ``length`` rows there are to draw from."""
    return int(replay.sequence_bounds(length)[1].sum())


class SequenceDraws:
    """Draws of sequences of ``length`` rows, uniform over all that ``replay`` stores.

    Where they may begin is sent to the device when rows were added, not at every draw: the host would wait
    for every update that is queued there.
    """

    def __init__(self, replay: Replay, length: int) -> None:
        self._replay, self._length = replay, length
        self._rows_added = -1
        self._begin = self._counts = torch.zeros(replay.num_envs, dtype=torch.int64, device=replay.device)

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Flat indices [count] on the buffer's device of first rows.

        Raises:
            ValueError: no sequence of that length is stored.
        """
        self._follow()
        return sampling.draw_sequences(count, generator, self._counts, self._begin, self._replay.lane_length)

    def _follow(self) -> None:
        added = int(self._replay.marks.sum())
        if added == self._rows_added:
            return
        begin, counts = self._replay.sequence_bounds(self._length)
        if not counts.any():
            raise ValueError(f"no {self._length} rows of one environment in a row yet")
        both = torch.from_numpy(np.stack((begin, counts))).to(self._replay.device)
        self._begin, self._counts = both.unbind()
        self._rows_added = added


class SequenceFeed:
    """One batch of sequences after the other, for a learner on ``device``; a ``Feed`` but for its batches.

    What rows a batch has is decided in :meth:`advance`, outside what is captured. From a buffer on the
    learner's own device they are gathered by :meth:`batch`, inside; from one on the host in
    :meth:`advance`, into tensors that stay where they are.

    Args:
        replay: the buffer.
        batch_size: sequences of a batch.
        length: rows of a sequence.
        sampler: draws the replayed ones.
        device: the learner's.
        fresh: where ``fresh_count`` sequences of each batch come from.
        fresh_count: of ``batch_size``; 0 without ``fresh``.
        behaviour: see :meth:`Replay.gather_sequences`.
    """

    def __init__(
        self,
        replay: Replay,
        batch_size: int,
        length: int,
        sampler: Sampler,
        device: torch.device,
        *,
        fresh: FreshRows | None = None,
        fresh_count: int = 0,
        behaviour: Behaviour | None = None,
    ) -> None:
        self._replay, self._length, self._sampler = replay, length, sampler
        self._fresh, self._behaviour = fresh, behaviour
        self._fresh_count = fresh_count if fresh is not None else 0
        self._batch_size = batch_size
        self._direct = replay.device == device and replay.frames_are_plain
        self._device = device
        self._draws = SequenceDraws(replay, length)
        self._rows = torch.zeros(batch_size, dtype=torch.int64, device=replay.device)
        self._batch: SequenceBatch | None = None

    def expect(self, updates: int) -> None:
        """Nothing is done in advance."""

    def advance(self) -> None:
        """Choose the rows of the next batch: fresh ones first, then draws.

        Raises:
            ValueError: too few fresh sequences, or none at all stored.
        """
        fresh = self._fresh_count
        if self._fresh is not None and fresh:
            self._rows[:fresh] = torch.from_numpy(self._fresh.take(fresh)).to(self._rows.device)
        if fresh < self._batch_size:
            count = self._batch_size - fresh
            self._rows[fresh:] = self._draws.draw(count, self._sampler.generator)
        if not self._direct:
            self._bring(self._replay.gather_sequences(self._rows, self._length, self._behaviour))

    def batch(self) -> SequenceBatch:
        """The current batch, on the learner's device.

        Raises:
            RuntimeError: before the first :meth:`advance`, from a buffer on the host.
        """
        if self._direct:
            return self._replay.gather_sequences(self._rows, self._length, self._behaviour)
        if self._batch is None:
            raise RuntimeError("batch() before advance()")
        return self._batch

    def _bring(self, found: SequenceBatch) -> None:
        """To the learner's device; on another device always to the same addresses."""
        if self._device.type == "cpu":
            self._batch = found
        elif self._batch is None:
            self._batch = found.to(self._device)
        else:
            for field in dataclasses.fields(SequenceBatch):
                value = getattr(found, field.name)
                if value is not None:
                    getattr(self._batch, field.name).copy_(value)
