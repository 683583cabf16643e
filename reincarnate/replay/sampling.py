"""Drawing rows and rebuilding transitions: tensor functions without one read by the host.

Row indices are flat and int64: ``slot * N + lane`` in a ring of T slots and N lanes, so that k rows later
in the same lane is ``(row + k * N) % (T * N)``, across the wrap too. Shapes are static and sizes that change
are 0-d tensors, hence the same functions run on the CPU and inside a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    Extras,
)
from reincarnate.types import Batch, SequenceBatch

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


def gather_sequences(
    begin: Tensor,
    length: int,
    behaviour: Behaviour | None,
    *,
    frames: Frames,
    frame_shape: tuple[int, ...],
    integers: Tensor,
    floats: Tensor,
    extra: Tensor,
    extras: Extras,
    back: Tensor,
    num_lanes: int,
    num_rows: Tensor,
) -> SequenceBatch:
    """``length`` consecutive rows of one lane from each of ``begin`` [B] on.

    Where the next row opens a game though nothing ended (a game dropped by a stopped run), the outcome of the
    last action was never stored: that row counts as not executed. ``extra`` is the table of the optional
    columns ``extras``; the other arguments are those of :func:`gather`.
    """
    steps = torch.arange(length, device=begin.device)
    rows = ((begin[:, None] + steps * num_lanes) % num_rows).view(-1)
    shape, num_actions = (len(begin), length), floats.shape[1] - TEACHER
    small, values = integers.index_select(0, rows).long(), floats.index_select(0, rows)
    which = stack_rows(rows, small[:, NEED], back, num_lanes, num_rows)
    obs = frames.take(which.view(-1))
    flags = small[:, FLAGS].view(shape)
    start, executed = flags & GAME_START != 0, flags & EXECUTED != 0
    lost = torch.cat((start[:, 1:], torch.zeros_like(start[:, :1])), dim=1)
    outputs = values[:, TEACHER:]
    if extras.behaviour_log_policy:
        log_policy = extra.index_select(0, rows)[:, :num_actions]
    elif behaviour is not None:
        log_policy = behaviour(outputs, values[:, EPSILON])
    else:
        raise ValueError("the buffer does not hold the behaviour's policy")
    state = None
    if extras.state_shape is not None:
        first = num_actions if extras.behaviour_log_policy else 0
        state = extra.index_select(0, begin)[:, first:].view(len(begin), *extras.state_shape)
    return SequenceBatch(
        obs=obs.view(shape + (back.shape if len(frame_shape) == 2 else ()) + frame_shape),
        action=small[:, ACTION].view(shape),
        reward=values[:, REWARD].view(shape),
        terminal=flags & TERMINAL != 0,
        truncated=flags & TRUNCATED != 0,
        executed=executed & ~lost,
        game_start=start,
        behaviour_log_policy=log_policy.view(*shape, num_actions),
        state=state,
        teacher_outputs=outputs.view(*shape, num_actions),
    )
