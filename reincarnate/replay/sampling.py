"""Drawing rows and rebuilding transitions: tensor functions without one read by the host.

Row indices are flat and int64: ``slot * N + lane`` in a ring of T slots and N lanes, so that k rows later
in the same lane is ``(row + k * N) % (T * N)``, across the wrap too. Shapes are static and sizes that change
are 0-d tensors, hence the same functions run on the CPU and inside a captured CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reincarnate.replay.frames import Frames
from reincarnate.replay.rows import ACTION, DISCOUNT, LOG_PROB, NEED, RETURN, STEPS, TEACHER
from reincarnate.types import Batch

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


def gather(
    row: Tensor,
    *,
    frames: Frames,
    frame_shape: tuple[int, ...],
    integers: Tensor,
    floats: Tensor,
    back: Tensor,
    num_lanes: int,
    num_rows: Tensor,
    out: Tensor | None = None,
) -> Batch:
    """The n-step transitions that start at ``row`` [B].

    Tables: ``frames`` [rows, *frame_shape], ``integers`` [rows, INTEGERS] int16, ``floats``
    [rows, TEACHER + A]; ``out`` [2, B, *obs_shape], contiguous, receives obs and next_obs if it is given;
    the other arguments are those of :func:`stack_rows`.
    """
    small = integers.index_select(0, row).long()
    values = floats.index_select(0, row)
    both = torch.stack((row, row + small[:, STEPS] * num_lanes))  # [2, B]; past the end wraps below
    which = stack_rows(both, small[:, NEED:STEPS].T, back, num_lanes, num_rows)  # [2, B, S]
    obs = frames.take(which.view(-1), out if out is None else out.view(-1, *frame_shape))
    obs = obs.view(both.shape + (back.shape if len(frame_shape) == 2 else ()) + frame_shape)
    return Batch(
        obs=obs[0],
        action=small[:, ACTION],
        reward=values[:, RETURN],
        discount=values[:, DISCOUNT],
        next_obs=obs[1],
        teacher_outputs=values[:, TEACHER:],
        behaviour_log_prob=values[:, LOG_PROB],
    )
