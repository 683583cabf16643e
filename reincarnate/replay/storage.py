"""Where a buffer lives: on the device, in memory or on disk; what does not fit is refused beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from reincarnate.errors import UserError
from reincarnate.replay import memory
from reincarnate.replay.frames import Compression
from reincarnate.replay.rows import NO_EXTRAS, Extras
from reincarnate.types import EnvSpec

#: Where the frames are. ``cuda``: with the learner; ``ram``, ``disk``: batches are drawn on the host.
Storage = Literal["ram", "cuda", "disk"]

#: Of what is free, ``auto`` takes at most this part: networks, environments and the rest need room too.
DEVICE_SHARE, MEMORY_SHARE, DISK_SHARE = 0.6, 0.5, 0.9


@dataclass(frozen=True)
class Buffer:
    """A buffer that a run will hold: D_T or D_S."""

    num_envs: int
    agent_steps: int
    folder: Path  # of its segments: the artefact, or the checkpoint
    complete: bool = False  # all of its segments are there already
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True)
class Sizes:
    """Bytes of the largest buffer of a run (they are never held at once), by where its frames are."""

    memory: int  # everything, on the device or in memory
    beside_disk: int  # memory, when frames are on disk
    packed: int | None = None  # memory, when frames are compressed


@dataclass(frozen=True)
class Room:
    """Free bytes; None where nobody tells, or where there is no such thing."""

    device: int | None
    memory: int | None
    disk: int | None  # beyond what the buffers need there; negative: that much is missing


@dataclass(frozen=True)
class Choice:
    """Where the buffers of a run live, and the line that says so."""

    storage: Storage
    line: str

    def device(self, learner: torch.device) -> torch.device:
        """Where the tables of a buffer are for a learner on that device."""
        return learner if self.storage == "cuda" or learner.type != "cuda" else torch.device("cpu")


def sizes_of(spec: EnvSpec, buffers: list[Buffer], packed_frame_bytes: float | None = None) -> Sizes:
    """Bytes that the largest of ``buffers`` takes; ``packed_frame_bytes`` of a frame that is compressed."""
    shapes = [((spec, each.num_envs, each.agent_steps), each.extras) for each in buffers]
    packed = [memory.memory_packed(*shape, packed_frame_bytes or 0.0, extras) for shape, extras in shapes]
    return Sizes(
        memory=max(memory.memory_needed(*shape, extras=extras) for shape, extras in shapes),
        beside_disk=max(memory.memory_beside_disk(*shape, extras) for shape, extras in shapes),
        packed=max(packed) if packed_frame_bytes is not None else None,
    )


def room_for(spec: EnvSpec, buffers: list[Buffer], device: torch.device) -> Room:
    """What this machine has free."""
    on_device = memory.memory_available(device) if device.type != "cpu" else None
    return Room(on_device, memory.memory_available(torch.device("cpu")), disk_left(spec, buffers))


def disk_left(spec: EnvSpec, buffers: list[Buffer]) -> int | None:
    """Bytes that the segments of all buffers leave of the disks they go to, at least; None if unknown."""
    needed: dict[int, int] = {}
    free: dict[int, int] = {}
    for each in buffers:
        available = memory.disk_available(each.folder)
        if available is None:
            return None
        disk = memory.disk_of(each.folder)
        more = 0 if each.complete else memory.disk_needed(spec, each.num_envs, each.agent_steps, each.extras)
        more -= memory.stored_bytes(each.folder)
        needed[disk] = needed.get(disk, 0) + max(0, more)
        free[disk] = available
    return min((int(DISK_SHARE * free[disk]) - needed[disk] for disk in needed), default=None)


def choose(asked: str, sizes: Sizes, room: Room, device: torch.device, compression: Compression) -> Choice:
    """The storage for ``--buffer asked``.

    ``auto``: on the device if that takes at most 60 % of its free memory, else in memory if that takes at
    most 50 % of what is free, else on disk.

    Raises:
        UserError: what was asked for does not fit, or nothing does.
    """
    refuse_impossible(asked, device, compression)
    if compression != "none":
        return _packed(asked, sizes, room, compression)
    if asked != "auto":
        return _explicit(asked, sizes, room)
    if device.type == "cuda" and _within(sizes.memory, room.device, DEVICE_SHARE):
        return Choice("cuda", _line("cuda", sizes.memory, room.device, "on the device"))
    if _within(sizes.memory, room.memory, MEMORY_SHARE):
        return Choice("ram", _line("ram", sizes.memory, room.memory, "in memory"))
    if _disk_fits(room) and _within(sizes.beside_disk, room.memory, MEMORY_SHARE):
        return Choice("disk", _disk_line(sizes, room))
    raise UserError(
        f"the replay buffer ({gigabytes(sizes.memory)}) does not fit anywhere: {_all(sizes, room, device)}; "
        "ask for fewer --collect-steps and a smaller online.replay_capacity_agent_steps, or free some"
    )


def refuse_impossible(asked: str, device: torch.device, compression: Compression) -> None:
    """Refuse what no size would make possible.

    Raises:
        UserError: no such buffer, none on this device, none with this compression.
    """
    if asked not in ("auto", "ram", "cuda", "disk"):
        raise UserError(f"no buffer {asked!r}; use auto, ram, cuda or disk")
    if asked == "cuda" and device.type != "cuda":
        raise UserError(f"--buffer cuda needs a CUDA learner, and the device is {device}; use --buffer auto")
    if compression != "none" and asked not in ("auto", "ram"):
        raise UserError(
            f"system.compress={compression} is for buffers in memory, not --buffer {asked}; "
            "leave one of them out"
        )


def _packed(asked: str, sizes: Sizes, room: Room, compression: Compression) -> Choice:
    needed = sizes.packed or sizes.memory
    if not _within(needed, room.memory, 1.0):
        raise _too_large(f"the replay buffer, compressed with {compression},", needed, room.memory, "memory")
    line = _line("ram", needed, room.memory, f"in memory, {compression}, {gigabytes(sizes.memory)} unpacked")
    return Choice("ram", line)


def _explicit(asked: str, sizes: Sizes, room: Room) -> Choice:
    if asked == "cuda":
        if not _within(sizes.memory, room.device, 1.0):
            raise _too_large("the replay buffer", sizes.memory, room.device, "the CUDA device")
        return Choice("cuda", _line("cuda", sizes.memory, room.device, "on the device"))
    if asked == "ram":
        if not _within(sizes.memory, room.memory, 1.0):
            raise _too_large("the replay buffer", sizes.memory, room.memory, "memory")
        return Choice("ram", _line("ram", sizes.memory, room.memory, "in memory"))
    if not _within(sizes.beside_disk, room.memory, 1.0):
        raise _too_large("a replay buffer on disk", sizes.beside_disk, room.memory, "memory")
    if not _disk_fits(room):
        raise UserError(
            f"the replay buffers do not fit on disk: {gigabytes(-(room.disk or 0))} are missing; free some, "
            "or ask for a smaller capacity"
        )
    return Choice("disk", _disk_line(sizes, room))


def _within(needed: int, available: int | None, share: float) -> bool:
    return available is None or needed <= share * available


def _disk_fits(room: Room) -> bool:
    return room.disk is None or room.disk >= 0


def _too_large(what: str, needed: int, available: int | None, where: str) -> UserError:
    return UserError(
        f"{what} needs {gigabytes(needed)} of {where} but {gigabytes(available or 0)} are free; "
        "ask for a smaller capacity, free some memory, or use --buffer auto"
    )


def _line(storage: Storage, needed: int, available: int | None, where: str) -> str:
    free = "an unknown amount" if available is None else gigabytes(available)
    return f"buffer: {storage} (at most {gigabytes(needed)} {where}, {free} free)"


def _disk_line(sizes: Sizes, room: Room) -> str:
    left = "an unknown amount" if room.disk is None else gigabytes(room.disk)
    return (
        f"buffer: disk (at most {gigabytes(sizes.memory)}, {gigabytes(sizes.beside_disk)} of it in memory; "
        f"{left} left on disk)"
    )


def _all(sizes: Sizes, room: Room, device: torch.device) -> str:
    parts = []
    if device.type == "cuda":
        parts.append(f"{gigabytes(room.device or 0)} are free on the device, of which 60 % may be used")
    parts.append(f"{gigabytes(room.memory or 0)} in memory, of which 50 %")
    if not _disk_fits(room):
        parts.append(f"and on disk {gigabytes(-(room.disk or 0))} are missing")
    else:
        parts.append(f"and beside a disk {gigabytes(sizes.beside_disk)} of memory would be needed")
    return ", ".join(parts)


def gigabytes(amount: int) -> str:
    """Bytes in words, in units that suit."""
    return f"{amount / 1e9:.2f} GB" if abs(amount) >= 1e7 else f"{amount / 1e6:.2f} MB"
