"""The columns of a buffer beside its frames, in tables on the device (see :mod:`reincarnate.replay.rows`)."""

from __future__ import annotations

import math

import numpy as np
import torch

from reincarnate.replay.index import Completed, Ints
from reincarnate.replay.rows import (
    ACTION,
    DISCOUNT,
    EPSILON,
    FLAGS,
    INTEGERS,
    LOG_PROB,
    NEXT_NEED,
    RAW_REWARD,
    RETURN,
    REWARD,
    STEPS,
    TEACHER,
    Array,
    Extras,
    RowBatch,
    float_block,
    integer_block,
    off_host,
    unpack_flags,
)
from reincarnate.replay.table import Table


class Columns:
    """Everything of a row but its frame; ``extras`` are there if the buffer has them.

    Attributes:
        integers: [rows, INTEGERS] int16.
        floats: [rows, TEACHER + A] float32.
        extra: [rows, numbers of a row's extras] float32.
        shapes: of each of the extras, in one row.
        places: where each of the extras is in its table.
    """

    def __init__(self, rows: int, num_actions: int, extras: Extras, device: torch.device) -> None:
        self._num_actions = num_actions
        self.shapes = extras.shapes(num_actions)
        self.places = _one_after_another(self.shapes)
        self.integers = Table((rows, INTEGERS), torch.int16, device)
        self.floats = Table((rows, TEACHER + num_actions), torch.float32, device)
        self.extra = Table((rows, extras.floats(num_actions)), torch.float32, device)

    def write(self, row: Ints, rows: RowBatch, flags: Array, need: Array) -> None:
        """New rows at the flat indices ``row`` [n]; what their future decides follows later."""
        at = self.integers.place(row)
        self.integers.write(at, integer_block(rows, flags, need))
        self.floats.write(at, float_block(rows, self._num_actions))
        if off_host(rows.action):
            self.integers.write(at, rows.action[:, None], slice(ACTION, ACTION + 1))
        if off_host(rows.behaviour_log_prob):
            self.floats.write(at, rows.behaviour_log_prob[:, None], slice(LOG_PROB, LOG_PROB + 1))
        if rows.teacher_outputs is not None and off_host(rows.teacher_outputs):
            self.floats.write(at, rows.teacher_outputs, slice(TEACHER, None))
        for name, where in self.places.items():
            self.extra.write(at, getattr(rows, name).reshape(len(row), -1), where)

    def finish(self, done: Completed) -> None:
        """What the future of completed rows is."""
        at = self.integers.place(done.row)
        floats = np.array((done.reward, done.discount)).T
        self.floats.write(at, floats, slice(RETURN, DISCOUNT + 1))
        integers = np.array((done.next_need, done.steps)).T
        self.integers.write(at, integers, slice(NEXT_NEED, STEPS + 1))

    def read(self, rows: Ints) -> dict[str, Array]:
        """Host copies of ``rows`` [n], by the names of :class:`~reincarnate.replay.rows.RowBatch`."""
        integers, floats, extra = self.integers.read(rows), self.floats.read(rows), self.extra.read(rows)
        columns: dict[str, Array] = {
            "action": integers[:, ACTION].copy(),
            "reward": floats[:, REWARD].copy(),
            "raw_reward": floats[:, RAW_REWARD].copy(),
            "teacher_outputs": floats[:, TEACHER:].copy(),
            "behaviour_log_prob": floats[:, LOG_PROB].copy(),
            "epsilon": floats[:, EPSILON].copy(),
        }
        for name, where in self.places.items():
            columns[name] = extra[:, where].reshape(len(rows), *self.shapes[name]).copy()
        return columns | unpack_flags(integers[:, FLAGS])


def _one_after_another(shapes: dict[str, tuple[int, ...]]) -> dict[str, slice]:
    places, end = {}, 0
    for name, shape in shapes.items():
        places[name] = slice(end, end + math.prod(shape))
        end = places[name].stop
    return places
