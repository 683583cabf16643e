"""How much memory and disk a replay takes, and how much the machine has."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from reincarnate import files
from reincarnate.replay.rows import INTEGERS, NO_EXTRAS, TEACHER, Extras
from reincarnate.types import EnvSpec

#: Rows that a buffer on disk keeps in memory before they go to a segment, and rows of a segment.
TAIL_ROWS = 8192

# Per row on the host: its place in a queue (8), need, leaving count and whether it was executed (1 each).
_INDEX_BYTES = 11
_ADDRESS_BYTES = 8  # per row, where its frame is on disk


@dataclass(frozen=True)
class LaneSize:
    """Rows of one lane of a ring."""

    shortest: int  # a lane's share of the capacity, and what a transition reaches over
    longest: int  # with room for the last observations of episodes, which are rows but not agent steps
    reach: int  # rows of the longest transition: its stack and its n steps


def lane_size(spec: EnvSpec, num_envs: int, capacity_agent_steps: int, n_step: int) -> LaneSize:
    """How long a lane is at least and at most.

    Every episode has an action, so twice the share always suffices; an Atari episode has eight and more.
    """
    share, reach = math.ceil(capacity_agent_steps / num_envs), spec.frame_stack + n_step
    episodes = math.ceil(share / 8) if spec.kind == "atari" else share
    return LaneSize(share + reach, share + episodes + reach, reach)


def frame_bytes(spec: EnvSpec) -> int:
    """Bytes of one frame as the environment gives it."""
    return math.prod(spec.frame_shape) * spec.obs_dtype.itemsize


def row_bytes(spec: EnvSpec, extras: Extras = NO_EXTRAS) -> int:
    """Bytes of one row in all columns, bookkeeping included."""
    floats = TEACHER + spec.num_actions + extras.floats(spec.num_actions)
    return frame_bytes(spec) + 4 * floats + 2 * INTEGERS + _INDEX_BYTES


def memory_needed(
    spec: EnvSpec,
    num_envs: int,
    capacity_agent_steps: int,
    *,
    n_step: int = 1,
    extras: Extras = NO_EXTRAS,
) -> int:
    """Bytes that a :class:`~reincarnate.replay.Replay` of these arguments takes at most.

    On the CPU it takes :func:`row_bytes` per row that is really used; elsewhere all of it at once.
    """
    return (
        lane_size(spec, num_envs, capacity_agent_steps, n_step).longest * num_envs * row_bytes(spec, extras)
    )


def disk_needed(spec: EnvSpec, num_envs: int, capacity_agent_steps: int, extras: Extras = NO_EXTRAS) -> int:
    """Bytes of the segments of a full replay: what its checkpoints take, and where its frames are on disk."""
    return lane_size(spec, num_envs, capacity_agent_steps, 1).longest * num_envs * row_bytes(spec, extras)


def memory_beside_disk(
    spec: EnvSpec, num_envs: int, capacity_agent_steps: int, extras: Extras = NO_EXTRAS
) -> int:
    """Bytes of memory of a replay whose frames are on disk: the other columns, and the newest frames."""
    rows = lane_size(spec, num_envs, capacity_agent_steps, 1).longest * num_envs
    # Writing a segment takes two copies of the tail.
    row = row_bytes(spec, extras)
    return rows * (row - frame_bytes(spec) + _ADDRESS_BYTES) + 3 * TAIL_ROWS * row


def memory_packed(
    spec: EnvSpec,
    num_envs: int,
    capacity_agent_steps: int,
    packed_frame_bytes: float,
    extras: Extras = NO_EXTRAS,
) -> int:
    """Bytes of a replay whose frames take ``packed_frame_bytes`` each when compressed."""
    rows = lane_size(spec, num_envs, capacity_agent_steps, 1).longest * num_envs
    return math.ceil(rows * (row_bytes(spec, extras) - frame_bytes(spec) + packed_frame_bytes))


def memory_available(device: torch.device) -> int | None:
    """Free bytes on the device, a container's limit considered; None where nobody tells."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    free = [amount for amount in (_system_free(), _container_free()) if amount is not None]
    return min(free, default=None)


def disk_available(folder: Path) -> int | None:
    """Free bytes of the disk that holds ``folder``, or will once it is made; None where nobody tells."""
    try:
        return shutil.disk_usage(files.existing(folder)).free
    except OSError:
        return None


def stored_bytes(folder: Path) -> int:
    """Bytes of the segments in ``folder``; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.glob("rows-*.safetensors"))


def disk_of(folder: Path) -> int:
    """A number that two folders on one disk share."""
    return files.existing(folder).stat().st_dev


def _system_free(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What Linux could give without swapping, page cache included."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(meminfo), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _container_free(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the limit of a container (cgroup v2) leaves; its page cache can be given back."""
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return None
    cache = re.search(r"^inactive_file (\d+)", _read(cgroup / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cache.group(1)) if cache else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
