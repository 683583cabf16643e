"""Drawing rows and rebuilding transitions: tensor functions without one read by the host.

Row indices are flat and int64: ``slot * N + lane`` in a ring of T slots and N lanes, so that k rows later
in the same lane is ``(row + k * N) % (T * N)``, across the wrap too. Shapes are static and sizes that change
are 0-d tensors, hence the same functions run on the CPU and inside a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reincarnate.replay.columns import Columns
from reincarnate.replay.frames import Frames
from reincarnate.replay.rows import (
    ACTION,
    DISCOUNT,
    EPSILON,
    EXECUTED,
    FLAGS,
    GAME_START,
    LOG_PROB,
    NEED,
    RETURN,
    REWARD,
    STEPS,
    TEACHER,
    TERMINAL,
    TRUNCATED,
)
from reincarnate.types import Batch, EnvSpec, SequenceBatch

#: Teacher's raw outputs [n, A] and epsilon [n] -> log-policy [n, A] of what acted.
Behaviour = Callable[[Tensor, Tensor], Tensor]

# A float of 24 bits would be uneven above a million rows; the modulo of 62 bits is even to 2^-32 and better.
_DRAW = 2**62


def draw_from_list(batch_size: int, generator: torch.Generator | None, rows: Tensor) -> Tensor:
    """Uniform draws [B] with replacement from ``rows`` [V] int64."""
    draws = torch.randint(0, _DRAW, (batch_size,), generator=generator, device=rows.device)
    return rows.index_select(0, draws % rows.shape[0])


def draw_from_lanes(
    batch_size: int, generator: torch.Generator | None, summary: Tensor, queue: Tensor, length: Tensor
) -> Tensor:
    """Uniform draws [B] with replacement from the queues of N lanes, exactly: nothing is rejected.

    ``queue`` [T * N] int64 holds them. ``summary`` [2, N] int64: how many rows there are in the queues up to
    and including each lane's, and the offset that puts the u-th of all at ``(u + offset[lane]) % T`` of its
    lane. ``length`` is T, 0-d.
    """
    cumulative, offset = summary
    draws = torch.randint(0, _DRAW, (batch_size,), generator=generator, device=cumulative.device)
    draws = draws % cumulative[-1]
    lane = torch.searchsorted(cumulative, draws, right=True)
    place = (draws + offset.index_select(0, lane)) % length
    return queue.index_select(0, place * summary.shape[1] + lane)


def stack_rows(row: Tensor, need: Tensor, back: Tensor, num_lanes: int, num_rows: Tensor) -> Tensor:
    """Rows [..., S] whose frames make the observation at ``row`` [...], oldest first.

    ``need`` [...] says how many earlier rows belong to the same game; frames before it are its first one.
    ``back`` [S] is S-1 .. 0; ``num_rows`` is T * N, 0-d.
    """
    earlier = torch.minimum(need[..., None], back)
    return (row[..., None] - earlier * num_lanes) % num_rows


def draw_sequences(
    batch_size: int, generator: torch.Generator | None, counts: Tensor, begin: Tensor, length: Tensor
) -> Tensor:
    """Flat indices [B] of first rows of sequences, uniform draws with replacement from N lanes.

    Lane l has ``counts[l]`` [N] int64 of them, from row number ``begin[l]`` [N] on; ``length`` is T, 0-d.
    """
    cumulative = counts.cumsum(0)
    draws = torch.randint(0, _DRAW, (batch_size,), generator=generator, device=counts.device)
    draws = draws % cumulative[-1]
    lane = torch.searchsorted(cumulative, draws, right=True)
    number = begin[lane] + draws - (cumulative - counts)[lane]
    return number % length * len(counts) + lane


class Gatherer:
    """Makes batches of rows: the tables of one buffer, on its device.

    Args:
        frames: [rows, *frame_shape].
        columns: everything else of a row.
        spec: the environment; its frame stack is S.
        num_lanes: N.
        num_rows: T * N, 0-d int64; read anew at every batch.
    """

    def __init__(
        self, frames: Frames, columns: Columns, spec: EnvSpec, num_lanes: int, num_rows: Tensor
    ) -> None:
        self._frames, self._columns, self._frame_shape = frames, columns, spec.frame_shape
        self._num_lanes, self._num_rows, self._num_actions = num_lanes, num_rows, spec.num_actions
        self._back = torch.arange(spec.frame_stack - 1, -1, -1, device=num_rows.device)

    def transitions(self, row: Tensor, out: Tensor | None = None) -> Batch:
        """The n-step transitions that start at ``row`` [B].

        ``out`` [2, B, *obs_shape], contiguous, receives obs and next_obs if it is given.
        """
        small = self._columns.integers.tensor.index_select(0, row).long()
        values = self._columns.floats.tensor.index_select(0, row)
        both = torch.stack((row, row + small[:, STEPS] * self._num_lanes))  # [2, B]; past the end wraps below
        obs = self._observations(both, small[:, NEED:STEPS].T, out)
        return Batch(
            obs=obs[0],
            action=small[:, ACTION],
            reward=values[:, RETURN],
            discount=values[:, DISCOUNT],
            next_obs=obs[1],
            teacher_outputs=values[:, TEACHER:],
            behaviour_log_prob=values[:, LOG_PROB],
        )

    def sequences(self, begin: Tensor, length: int, behaviour: Behaviour | None) -> SequenceBatch:
        """``length`` consecutive rows of one lane from each of ``begin`` [B] on.

        Where the next row opens a game though nothing ended (a game dropped by a stopped run), the outcome of
        the last action was never stored: that row counts as not executed.

        Raises:
            ValueError: the log-policy is no column, and there is no ``behaviour`` to make it.
        """
        steps = torch.arange(length, device=begin.device)
        rows = (begin[:, None] + steps * self._num_lanes) % self._num_rows  # [B, length]
        small = self._columns.integers.tensor.index_select(0, rows.view(-1)).long().view(*rows.shape, -1)
        values = self._columns.floats.tensor.index_select(0, rows.view(-1)).view(*rows.shape, -1)
        flags = small[..., FLAGS]
        start, executed = flags & GAME_START != 0, flags & EXECUTED != 0
        lost = torch.cat((start[:, 1:], torch.zeros_like(start[:, :1])), dim=1)
        return SequenceBatch(
            obs=self._observations(rows, small[..., NEED]),
            action=small[..., ACTION],
            reward=values[..., REWARD],
            terminal=flags & TERMINAL != 0,
            truncated=flags & TRUNCATED != 0,
            executed=executed & ~lost,
            game_start=start,
            behaviour_log_policy=self._log_policy(rows, values, behaviour),
            state=self._state(begin),
            teacher_outputs=values[..., TEACHER:],
        )

    def _observations(self, row: Tensor, need: Tensor, out: Tensor | None = None) -> Tensor:
        """Those at ``row`` [...], [..., *obs_shape]."""
        which = stack_rows(row, need, self._back, self._num_lanes, self._num_rows)  # [..., S]
        obs = self._frames.take(which.view(-1), out if out is None else out.view(-1, *self._frame_shape))
        stack = self._back.shape if len(self._frame_shape) == 2 else ()
        return obs.view(row.shape + stack + self._frame_shape)

    def _log_policy(self, rows: Tensor, values: Tensor, behaviour: Behaviour | None) -> Tensor:
        """[B, length, A] of what acted: as stored, or made of the teacher's outputs and epsilon."""
        held = self._columns.places.get("behaviour_log_policy")
        if held is not None:
            found = self._columns.extra.tensor.index_select(0, rows.view(-1))[:, held]
        elif behaviour is not None:
            values = values.view(-1, values.shape[-1])
            found = behaviour(values[:, TEACHER:], values[:, EPSILON])
        else:
            raise ValueError("the buffer does not hold the behaviour's policy")
        return found.view(*rows.shape, self._num_actions)

    def _state(self, begin: Tensor) -> Tensor | None:
        """[B, *state_shape] of the actor before the first rows, where that is stored."""
        held = self._columns.places.get("state")
        if held is None:
            return None
        found = self._columns.extra.tensor.index_select(0, begin)[:, held]
        return found.view(len(begin), *self._columns.shapes["state"])
