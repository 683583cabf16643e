"""Batches for a learner, wherever the buffer is, in an order that depends on nothing but the seed.

A buffer on the learner's own device is sampled inside the update (:class:`DirectFeed`). From one on the host
a thread gathers the next batches while the learner works (:class:`HostFeed`). Both draw the same rows: draws
are made on the caller's thread, in order, and only for updates before which the buffer will not change.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reincarnate.device import Event, Queue, copy_queue, host_memory, learner_queue
from reincarnate.replay.ring import Replay
from reincarnate.types import Batch, EnvSpec

#: Batches that are gathered in advance, and the pieces of host memory for them: one more is being read, and
#: one may still be on its way to the device.
AHEAD, SLOTS = 2, 4
_ALIGNMENT = 64  # bytes


class Sampler:
    """The random numbers that batches are drawn with, on the buffer's device.

    What was drawn in advance does not count yet: :meth:`get_state` is that before the next batch to be used,
    so a run that is resumed from it draws that batch again.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self._before: deque[Tensor] = deque()  # states before the draws that were not used yet

    def draw_ahead(self, replay: Replay, batch_size: int) -> Tensor:
        """Rows [B] of a later batch."""
        self._before.append(self.generator.get_state())
        return replay.draw(batch_size, self.generator)

    def use(self) -> None:
        """The oldest batch that was drawn in advance is used now."""
        self._before.popleft()

    def get_state(self) -> Tensor:
        """As of the batches that were used."""
        return self._before[0] if self._before else self.generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """Go on from a state that :meth:`get_state` returned."""
        self._before.clear()
        self.generator.set_state(state)


class Feed(Protocol):
    """One batch after the other."""

    def expect(self, updates: int) -> None:
        """The buffer does not change before ``updates`` more calls of :meth:`advance`."""

    def advance(self) -> None:
        """Make the next batch the current one; called before each update, outside what is captured."""

    def batch(self) -> Batch:
        """The current batch, on the learner's device; called inside what is captured."""


def make_feed(replay: Replay, batch_size: int, sampler: Sampler, device: torch.device) -> Feed:
    """Batches of ``replay`` for a learner on ``device``."""
    if replay.device == device and replay.frames_are_plain:
        return DirectFeed(replay, batch_size, sampler)
    return HostFeed(replay, batch_size, sampler, device)


class DirectFeed:
    """The buffer is where the learner is: a batch is sampled when it is asked for."""

    def __init__(self, replay: Replay, batch_size: int, sampler: Sampler) -> None:
        self._replay, self._batch_size, self._sampler = replay, batch_size, sampler

    def expect(self, updates: int) -> None:
        """Nothing is done in advance."""

    def advance(self) -> None:
        """Nothing is kept between updates."""

    def batch(self) -> Batch:
        """A new sample at every call."""
        return self._replay.sample(self._batch_size, self._sampler.generator)


class HostFeed:
    """The buffer is on the host: a thread gathers into host memory, a queue copies to the device.

    The learner reads one batch at fixed addresses. Batch k is gathered into slot ``k % SLOTS``, copied to
    ``staging[k % 2]`` while the learner is busy with batch k - 1, and copied from there, on the device and
    in the learner's own order, to where it is read. On the CPU it is read in its slot.

    The thread touches host memory only and never CUDA, whose captures another thread's call would break.
    """

    def __init__(
        self,
        replay: Replay,
        batch_size: int,
        sampler: Sampler,
        device: torch.device,
        queues: tuple[Queue, Queue] | None = None,
    ) -> None:
        """``queues`` of the learner and of copies: those of ``device`` unless given."""
        self._replay, self._batch_size, self._sampler = replay, batch_size, sampler
        self._learner, self._copies = queues or (learner_queue(device), copy_queue(device))
        layout = _Layout.of(replay.spec, batch_size)
        self._slots = [layout.batch(host_memory(layout.size_bytes, device)) for _ in range(SLOTS)]
        self._device = [
            layout.batch(torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device))
            for _ in range(0 if device.type == "cpu" and queues is None else 3)
        ]
        self._copied: list[Event | None] = [None] * SLOTS  # per slot: its copy to the device
        self._taken: list[Event | None] = [None, None]  # per staging batch: the copy out of it
        self._waiting: deque[Future[None]] = deque()
        self._expected = 0  # batches that may still be drawn
        self._drawn = self._used = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        # The memory on the device was cleared, and may have been another's, in the learner's order.
        self._copies.wait(self._learner.record())

    def expect(self, updates: int) -> None:
        """The buffer does not change before ``updates`` more calls of :meth:`advance`."""
        self._expected = updates - len(self._waiting)
        self._gather_ahead()

    def advance(self) -> None:
        """Wait for the next batch, send it to the device and start to gather later ones.

        Raises:
            RuntimeError: more batches than expected.
        """
        if not self._waiting:
            raise RuntimeError("advance() beyond what expect() announced")
        self._waiting.popleft().result()
        self._sampler.use()
        self._send(self._used)
        self._used += 1
        self._gather_ahead()

    def batch(self) -> Batch:
        """The current batch; on a device, always at the same addresses.

        Raises:
            RuntimeError: before the first :meth:`advance`.
        """
        if not self._used:
            raise RuntimeError("batch() before advance()")
        return self._device[2].batch if self._device else self._slots[(self._used - 1) % SLOTS].batch

    def _gather_ahead(self) -> None:
        while self._expected > 0 and len(self._waiting) < AHEAD:
            slot = self._drawn % SLOTS
            copied = self._copied[slot]
            if copied is not None:
                copied.synchronize()  # two batches ago: it is over, or nearly
            rows = self._sampler.draw_ahead(self._replay, self._batch_size)
            self._waiting.append(self._pool.submit(self._gather, self._slots[slot], rows))
            self._drawn += 1
            self._expected -= 1

    def _gather(self, slot: PackedBatch, rows: Tensor) -> None:
        """On the thread: fill ``slot`` with the transitions at ``rows``."""
        found = self._replay.gather(rows, slot.observations)
        for name in ("action", "reward", "discount", "teacher_outputs", "behaviour_log_prob"):
            getattr(slot.batch, name).copy_(getattr(found, name))

    def _send(self, number: int) -> None:
        if not self._device:
            return
        slot, stage = number % SLOTS, number % 2
        source, staging, static = self._slots[slot].data, self._device[stage].data, self._device[2].data
        taken = self._taken[stage]
        if taken is not None:
            self._copies.wait(taken)
        self._copies.run(lambda: staging.copy_(source, non_blocking=True))
        copied = self._copied[slot] = self._copies.record()
        self._learner.wait(copied)
        self._learner.run(lambda: static.copy_(staging))
        self._taken[stage] = self._learner.record()


@dataclass(frozen=True)
class PackedBatch:
    """A batch in one piece of memory, so that one copy moves it."""

    data: Tensor  # [size_bytes] uint8
    observations: Tensor  # [2, B, *obs_shape]: obs and next_obs
    batch: Batch  # views of data


@dataclass(frozen=True)
class _Layout:
    """Where the fields of a batch are in one piece of memory."""

    fields: dict[str, tuple[torch.dtype, tuple[int, ...], int]]  # type, shape, first byte
    size_bytes: int

    @classmethod
    def of(cls, spec: EnvSpec, batch_size: int) -> _Layout:
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "observations": (spec.obs_dtype, (2, batch_size, *spec.obs_shape)),
            "action": (torch.int64, (batch_size,)),
            "reward": (torch.float32, (batch_size,)),
            "discount": (torch.float32, (batch_size,)),
            "teacher_outputs": (torch.float32, (batch_size, spec.num_actions)),
            "behaviour_log_prob": (torch.float32, (batch_size,)),
        }
        fields, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            fields[name] = (dtype, shape, end)
            size = math.prod(shape) * dtype.itemsize
            end += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        return cls(fields, end)

    def batch(self, data: Tensor) -> PackedBatch:
        views = {
            name: data[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (dtype, shape, begin) in self.fields.items()
        }
        observations = views.pop("observations")
        return PackedBatch(data, observations, Batch(obs=observations[0], next_obs=observations[1], **views))
