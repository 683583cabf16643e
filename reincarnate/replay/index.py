"""Which rows can be sampled: host-side bookkeeping of the lanes of a ring, exact at every moment.

Rows of a lane are counted from 0 for ever ("row number"); row number b lives in slot ``b % T`` and has
the flat index ``slot * N + lane``. A row can be sampled from the moment when its n-step future is stored
until the first row that its stack needs is overwritten. Each lane keeps a queue of such rows, oldest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reincarnate.replay.memory import LaneSize
from reincarnate.replay.rows import EXECUTED, GAME_START, TERMINAL, TRUNCATED, Array

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Completed:
    """c rows whose future has just become known."""

    row: Ints  # [c] flat index
    position: Ints  # [c] place of the row in the flat queue table
    reward: npt.NDArray[np.float64]  # [c] sum over i < k of discount^i r_{t+i}
    discount: npt.NDArray[np.float64]  # [c] discount^k, 0 after a terminal
    steps: Ints  # [c] k
    next_need: Array  # [c] the need of the row k later


@dataclass(frozen=True)
class Pushed:
    """Where n new rows go, and what they completed."""

    row: Ints  # [n] flat index
    need: Ints  # [n] earlier rows that the stack reaches back to, at most stack - 1
    completed: Completed


class LaneIndex:
    """Bookkeeping for N lanes of T rows; knows flags and rewards, never frames.

    ``queue`` [T * N] holds the sampleable rows as flat indices; those of lane l are at
    ``(head[l] + i) % T * N + l``. ``summary`` [2, N] is what drawing needs: how many rows there are in the
    queues up to and including each lane's, and what turns a count over all into a place in a lane's queue.
    ``sizes`` [2] is T and T * N. T is the longest that a lane may be until ``capacity`` executed rows are
    stored; then it settles at what that took, so the ring is no longer than it must be.
    """

    def __init__(
        self, num_lanes: int, capacity: int, size: LaneSize, *, stack: int, n_step: int, discount: float
    ) -> None:
        self._lanes, self._capacity, self._size = num_lanes, capacity, size
        self._stack, self._n = stack, n_step
        self._powers = np.array([discount**k for k in range(n_step + 1)])
        rows = size.longest * num_lanes
        self.sizes: Ints = np.array((size.longest, rows), dtype=np.int64)
        self.settled = False
        self.total: Ints = np.zeros(num_lanes, dtype=np.int64)  # rows ever pushed
        self.first: Ints = np.zeros(num_lanes, dtype=np.int64)  # first row number that was not skipped
        self.head: Ints = np.zeros(num_lanes, dtype=np.int64)
        self.tail: Ints = np.zeros(num_lanes, dtype=np.int64)
        self.queue: Ints = np.zeros(rows, dtype=np.int64)
        self.summary: Ints = np.zeros((2, num_lanes), dtype=np.int64)
        self.executed_rows = 0
        self._executed: npt.NDArray[np.bool_] = np.zeros(rows, dtype=np.bool_)
        self._need: npt.NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        # How many sampleable rows lose their stack when this row is overwritten.
        self._leaving: npt.NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        # Of the newest row of each lane: its flags, rows since the game began (stack - 1 also stands for
        # "unknown"), how many of the newest rows have an open future, and the newest n rewards.
        self._last: npt.NDArray[np.uint8] = np.zeros(num_lanes, dtype=np.uint8)
        self._since: Ints = np.full(num_lanes, stack - 1, dtype=np.int64)
        self._open: Ints = np.zeros(num_lanes, dtype=np.int64)
        self._recent: npt.NDArray[np.float64] = np.zeros((n_step, num_lanes), dtype=np.float64)
        self._ahead = np.arange(n_step)[:, None]

    @property
    def length(self) -> int:
        """T, rows per lane."""
        return int(self.sizes[0])

    @property
    def oldest(self) -> Ints:
        """Row number of the oldest stored row of each lane, [N]; equals ``total`` for an empty lane."""
        return np.maximum(self.first, self.total - self.length)

    @property
    def sampleable(self) -> int:
        """How many rows can be sampled."""
        return int((self.tail - self.head).sum())

    @property
    def longest_run(self) -> int:
        """Rows that :meth:`push_run` takes at once: none is overwritten, nor needed, within a run."""
        return self._size.shortest - self._size.reach

    def flat(self, number: Ints, lanes: Ints | int) -> Ints:
        """Flat index of row ``number`` of each lane."""
        return number % self.length * self._lanes + lanes

    def sampleable_rows(self) -> Ints:
        """Flat indices of all sampleable rows, lane by lane, oldest first."""
        lanes = [
            self.queue[self.flat(np.arange(self.head[lane], self.tail[lane]), lane)]
            for lane in range(self._lanes)
        ]
        return np.concatenate(lanes)

    def sequence_bounds(self, length: int) -> tuple[Ints, Ints]:
        """Where sequences of ``length`` rows may begin: the first row number [N] and how many there are [N].

        The stack of the first row must be stored whole; those of the rows after it then are.
        """
        oldest = self.oldest
        begin, lanes = oldest.copy(), np.arange(self._lanes)
        for _ in range(self._stack - 1):
            cut = begin - self._need[self.flat(begin, lanes)] < oldest
            begin += cut & (begin < self.total)
        return begin, np.maximum(0, self.total - length + 1 - begin)

    def can_settle(self, length: int) -> bool:
        """Whether lanes of ``length`` rows are possible here."""
        return self._size.shortest <= length <= self._size.longest

    def settle(self, length: int) -> None:
        """Make the lanes ``length`` rows long beforehand, as those of another index were.

        Raises:
            ValueError: the index is not empty, or the length is out of bounds.
        """
        if self.total.any() or not self.can_settle(length):
            raise ValueError(f"lanes cannot settle at {length} rows")
        self._settle(length)

    def skip(self, lane: int, number: int) -> None:
        """Continue ``lane`` at a later row number; what the lane held is dropped.

        Raises:
            ValueError: that number is not after the rows already there.
        """
        if number <= self.total[lane]:
            raise ValueError(f"lane {lane} is at row {self.total[lane]}, cannot continue at row {number}")
        column = slice(lane, None, self._lanes)
        self.executed_rows -= int(np.count_nonzero(self._executed[column]))
        self._executed[column] = False
        self._leaving[column] = 0
        self.head[lane] = self.tail[lane]
        self.total[lane] = self.first[lane] = number
        self._open[lane] = 0
        self._since[lane] = self._stack - 1
        self._account()

    def push(self, lanes: Ints, reward: Array, flags: Array) -> Pushed:
        """Append one row to each of n distinct ``lanes`` [n]; ``reward`` and packed ``flags`` are [n]."""
        number = self.total[lanes]
        row = self.flat(number, lanes)
        game_start, executed = flags & GAME_START != 0, flags & EXECUTED != 0
        need = np.minimum(self._since[lanes] + 1, self._stack - 1)
        need[game_start] = 0
        self.head[lanes] += self._overwrite(row, need, executed)
        completed, still_open = self._complete(lanes, number, game_start)
        self._since[lanes] = need
        # A row whose stack begins before the first row is never sampled; such rows come before all others.
        whole = executed & (number - need >= self.first[lanes])
        self._open[lanes] = np.where(whole, still_open + 1, 0)
        self._recent[number % self._n, lanes] = reward
        self._last[lanes] = flags
        self.total[lanes] = number + 1
        self._account()
        return Pushed(row, need, completed)

    def push_run(self, lane: int, reward: Array, flags: Array) -> Pushed:
        """Append 1 to :attr:`longest_run` rows to one lane; equal to that many calls of :meth:`push`."""
        rows, start = len(flags), int(self.total[lane])
        number = np.arange(start, start + rows)
        row = self.flat(number, lane)
        opened = np.where(flags & GAME_START, number, start - 1 - self._since[lane])
        need = np.minimum(number - np.maximum.accumulate(opened), self._stack - 1)
        self.head[lane] += int(self._overwrite(row, need, flags & EXECUTED != 0).sum())
        completed, self._open[lane] = self._complete_run(lane, start, reward, flags)
        self._since[lane] = need[-1]
        newest = slice(-self._n, None)
        self._recent[number[newest] % self._n, lane] = reward[newest]
        self._last[lane] = flags[-1]
        self.total[lane] += rows
        self._account()
        return Pushed(row, need, completed)

    def _overwrite(self, row: Ints, need: Ints, executed: Array) -> Array:
        """Note rows [n] in place of older ones; how many rows of the queue each costs."""
        leaving = self._leaving[row]
        self._leaving[row] = 0
        self.executed_rows += int(np.count_nonzero(executed)) - int(np.count_nonzero(self._executed[row]))
        self._executed[row] = executed
        self._need[row] = need
        return leaving

    def _complete(self, lanes: Ints, number: Ints, game_start: Array) -> tuple[Completed, Ints]:
        """Queue the open rows whose future the new rows complete; also, how many older ones stay open."""
        opened, last = self._open[lanes], self._last[lanes]
        # A game that starts right after a played action: the game before was dropped (a resumed run), and
        # the observation that followed its last action was never stored.
        opened[game_start & (last & EXECUTED != 0)] = 0
        ended = last & (TERMINAL | TRUNCATED) != 0
        which = np.flatnonzero(opened == self._n)
        steps = np.full(len(which), self._n)
        if ended.any():  # every open row of such a lane, the oldest first
            left = np.where(ended, opened, 0)
            shorter = [np.flatnonzero(left >= k) for k in range(self._n - 1, 0, -1)]
            which = np.concatenate((which, *shorter))
            steps = np.repeat(np.arange(self._n, 0, -1), [len(steps), *map(len, shorter)])
        lane, rank = lanes[which], opened[which] - steps
        opened[ended] = 0
        begin = number[which] - steps
        reward = self._recent[(begin + self._ahead) % self._n, lane]
        completed = self._enqueue(lane, begin, steps, rank, reward, last[which])
        return completed, np.minimum(opened, self._n - 1)

    def _complete_run(self, lane: int, start: int, reward: Array, flags: Array) -> tuple[Completed, int]:
        """The same for a run of rows from number ``start`` on, and how many rows are open after it."""
        opened = int(self._open[lane])
        begin = np.arange(start - opened, start + len(flags))
        flags = np.concatenate((np.full(opened, EXECUTED, dtype=np.uint8), flags))
        if opened:
            flags[opened - 1] = self._last[lane]
        reward = np.concatenate((self._recent[begin[:opened] % self._n, lane], reward))
        stored = begin - self._need[self.flat(begin, lane)] >= self.first[lane]
        steps, still_open = _futures(flags, stored, self._n)
        which = np.flatnonzero(steps)
        ahead = np.minimum(which + self._ahead, len(reward) - 1)
        steps = steps[which]
        completed = self._enqueue(
            np.full(len(which), lane),
            begin[which],
            steps,
            np.arange(len(which)),
            reward[ahead],
            flags[which + steps - 1],
        )
        return completed, still_open

    def _enqueue(
        self, lane: Ints, number: Ints, steps: Ints, rank: Ints, reward: Array, last: Array
    ) -> Completed:
        """Queue rows ``number`` [c] of ``lane`` [c], each ``rank`` places after the lane's last one.

        ``steps`` [c] is k; ``reward`` [n, c] begins with the row's own, and what lies beyond k is ignored;
        ``last`` [c] are the flags of the row k - 1 later.
        """
        row, next_row = self.flat(number, lane), self.flat(number + steps, lane)
        position = self.flat(self.tail[lane] + rank, lane)
        self.queue[position] = row
        np.add.at(self.tail, lane, 1)
        np.add.at(self._leaving, self.flat(number - self._need[row], lane), 1)
        returns = reward[0].astype(np.float64)
        for i in range(1, self._n):
            np.add(returns, self._powers[i] * reward[i], out=returns, where=steps > i)
        discount = np.where(last & TERMINAL, 0.0, self._powers[steps])
        return Completed(row, position, returns, discount, steps, self._need[next_row])

    def _settle(self, length: int) -> None:
        self.sizes[:] = length, length * self._lanes
        self.settled = True

    def _account(self) -> None:
        counts = self.tail - self.head
        cumulative, offset = self.summary
        np.cumsum(counts, out=cumulative)
        np.add(self.head, counts - cumulative, out=offset)
        if not self.settled and self.executed_rows >= self._capacity:
            self._settle(min(int(self.total.max()) + self._size.reach, self._size.longest))


def _futures(flags: Array, stored: Array, n_step: int) -> tuple[Ints, int]:
    """For consecutive rows [m] of a lane: k where the future of a row is known, else 0, and how many wait.

    A row ``stored`` False is not to be sampled. A future is k <= n actions in a row that were executed, in
    one game, up to the first that ended the episode, and the row after them.
    """
    rows = len(flags)
    executed, ended = flags & EXECUTED != 0, flags & (TERMINAL | TRUNCATED) != 0
    follows = np.ones(rows, dtype=np.bool_)
    follows[1:] = ~((flags[1:] & GAME_START != 0) & executed[:-1])
    steps, going, waiting = np.zeros(rows, dtype=np.int64), executed & stored, 0
    for k in range(1, n_step + 1):
        inside = max(rows - k, 0)
        waiting += int(np.count_nonzero(going[inside:]))
        going[inside:] = False
        here = going[:inside]
        here &= follows[k:]
        known = here & (ended[k - 1 : rows - 1] | (k == n_step))
        steps[:inside][known] = k
        here &= ~known & executed[k:]
    return steps, waiting
