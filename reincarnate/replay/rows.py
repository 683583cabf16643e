"""What one row of a lane is, and how its small columns are packed.

A row t of a lane is the frame of obs_t, whether obs_t opens a game, the action taken at obs_t and its
outcome. The observation that ended an episode is a row too, with ``executed`` False: the environment
ignored its action, but it is the ``next_obs`` of the transition before it.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

#: Columns of the float32 table; the teacher's outputs follow from ``TEACHER`` on.
RETURN, DISCOUNT, REWARD, RAW_REWARD, EPSILON, LOG_PROB, TEACHER = range(7)
#: Columns of the int16 table. STEPS: k <= n; NEED: earlier rows that the row's stack reaches back to, and
#: NEXT_NEED the same of the row k later. The last two are written when the row's future is known.
ACTION, FLAGS, NEED, NEXT_NEED, STEPS, INTEGERS = range(6)
#: Bits of the FLAGS column.
TERMINAL, TRUNCATED, EXECUTED, GAME_START = 1, 2, 4, 8
_BITS = {"terminal": TERMINAL, "truncated": TRUNCATED, "executed": EXECUTED, "game_start": GAME_START}


@dataclass(frozen=True)
class RowBatch:
    """One row for each of n lanes; numpy arrays or tensors.

    ``teacher_outputs`` None stores zeros. Frames, actions, teacher outputs and log-probabilities may be
    device tensors, so that nothing waits for the device; the other fields are read on the host.
    """

    frame: Array | Tensor  # [n, *frame_shape] uint8 or float32, the newest frame of obs_t
    action: Array | Tensor  # [n] integer, taken at obs_t
    reward: Array | Tensor  # [n] float32 for training
    raw_reward: Array | Tensor  # [n] float32, the game's own score
    terminal: Array | Tensor  # [n] bool, the action ended the episode: no bootstrap
    truncated: Array | Tensor  # [n] bool, the action met the frame limit: bootstraps
    executed: Array | Tensor  # [n] bool, False where the environment ignored the action
    game_start: Array | Tensor  # [n] bool, obs_t opens a new game (not: the next life)
    teacher_outputs: Array | Tensor | None  # [n, A] float32 raw outputs at obs_t
    behaviour_log_prob: Array | Tensor  # [n] float32 of the action
    epsilon: Array | Tensor  # [n] float32 the behaviour explored with
    # Only stored by a buffer that has these columns (see Extras).
    behaviour_log_policy: Array | Tensor | None = None  # [n, A] float32 of all actions
    state: Array | Tensor | None = None  # [n, *state_shape] float32 of the actor before obs_t

    def part(self, which: slice) -> RowBatch:
        """Some of the rows, without a copy."""
        values: dict[str, Any] = {name: getattr(self, name) for name in column_names()}
        parts: dict[str, Any] = {name: None if v is None else v[which] for name, v in values.items()}
        return RowBatch(**parts)


@dataclass(frozen=True)
class Extras:
    """Float columns that only some students need; without them a row is as small as it can be."""

    behaviour_log_policy: bool = False  # of all A actions
    state_shape: tuple[int, ...] | None = None  # of the actor's recurrent state, per environment

    def names(self) -> tuple[str, ...]:
        """The columns there are."""
        held = (self.behaviour_log_policy, self.state_shape is not None)
        return tuple(name for name, there in zip(OPTIONAL, held, strict=True) if there)

    def shapes(self, num_actions: int) -> dict[str, tuple[int, ...]]:
        """Column -> shape of one row."""
        every = {"behaviour_log_policy": (num_actions,), "state": self.state_shape or ()}
        return {name: every[name] for name in self.names()}

    def floats(self, num_actions: int) -> int:
        """Numbers per row in all of them."""
        return sum(math.prod(shape) for shape in self.shapes(num_actions).values())


OPTIONAL = ("behaviour_log_policy", "state")
NO_EXTRAS = Extras()


def column_names(extras: Extras | None = None) -> tuple[str, ...]:
    """The fields of a :class:`RowBatch`, which are the columns in storage; all, or those of a buffer."""
    names = tuple(field.name for field in dataclasses.fields(RowBatch))
    if extras is None:
        return names
    return tuple(name for name in names if name not in OPTIONAL or name in extras.names())


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    """The same type in numpy."""
    return typing.cast("np.dtype[np.generic]", torch.empty(0, dtype=dtype).numpy().dtype)


def on_host(values: Array | Tensor) -> Array:
    """Values as a numpy array; copies only from another device."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def off_host(values: Array | Tensor | None) -> bool:
    """Whether reading ``values`` would wait for a device."""
    return isinstance(values, Tensor) and values.device.type != "cpu"


def pack_flags(rows: RowBatch) -> npt.NDArray[np.uint8]:
    """The four flags of each row as bits [n]."""
    flags = tuple(on_host(getattr(rows, name)) for name in _BITS)
    return typing.cast("npt.NDArray[np.uint8]", np.packbits(flags, axis=0, bitorder="little")[0])


def unpack_flags(packed: Array) -> dict[str, Array]:
    """Flags by name, each [n] bool; inverse of :func:`pack_flags`."""
    return {name: packed & bit != 0 for name, bit in _BITS.items()}


def integer_block(rows: RowBatch, flags: Array, need: Array) -> npt.NDArray[np.int16]:
    """The int16 table's part of n rows, [n, INTEGERS]; device tensors and the future are left at zero."""
    block = np.zeros((len(need), INTEGERS), dtype=np.int16)
    if not off_host(rows.action):
        block[:, ACTION] = on_host(rows.action)
    block[:, FLAGS] = flags
    block[:, NEED] = need
    return block


def float_block(rows: RowBatch, num_actions: int) -> npt.NDArray[np.float32]:
    """The float32 table's part of n rows, [n, TEACHER + A]; device tensors are left at zero."""
    block = np.zeros((len(rows.reward), TEACHER + num_actions), dtype=np.float32)
    block[:, REWARD] = on_host(rows.reward)
    block[:, RAW_REWARD] = on_host(rows.raw_reward)
    block[:, EPSILON] = on_host(rows.epsilon)
    if not off_host(rows.behaviour_log_prob):
        block[:, LOG_PROB] = on_host(rows.behaviour_log_prob)
    if rows.teacher_outputs is not None and not off_host(rows.teacher_outputs):
        block[:, TEACHER:] = on_host(rows.teacher_outputs)
    return block
