"""A slow replay that keeps everything, and lanes that play random games: the truth for the fast one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import strategies as st

from reincarnate.replay import Replay, RowBatch
from reincarnate.types import Batch, EnvSpec

PIXELS = EnvSpec("Breakout-v5", "atari", num_actions=3, obs_shape=(4, 2, 3))
VECTOR = EnvSpec("CartPole-v1", "vector", num_actions=2, obs_shape=(3,))


@dataclass
class Row:
    frame: np.ndarray
    stack: np.ndarray  # what the environment returned at this observation
    action: int
    reward: float
    raw_reward: float
    terminal: bool
    truncated: bool
    executed: bool
    game_start: bool
    teacher_outputs: np.ndarray
    behaviour_log_prob: float
    epsilon: float


@dataclass(frozen=True)
class Odds:
    """How a lane's episodes end, per executed action."""

    life: float = 0.1
    over: float = 0.05
    truncate: float = 0.05
    drop: float = 0.02  # the game is abandoned without a last observation, as by a stopped run
    blink: float = 0.02  # a life is lost, and the next action is executed all the same
    ignored: float = 0.02  # the next action is ignored though no episode ended
    late: bool = False  # the first observation seen is not the first of its game


@dataclass
class Lane:
    """One environment: makes its own rows and remembers them all with their true stacks."""

    spec: EnvSpec
    rng: random.Random
    odds: Odds
    rows: list[Row] = field(default_factory=list)
    _stack: list[np.ndarray] = field(default_factory=list)
    _next: str = "game"  # what the next observation is: game, life, last, step
    _after_last: str = "game"

    def __post_init__(self) -> None:
        if self.odds.late:
            self._stack = [self._frame() for _ in range(self.spec.frame_stack)]
            self._next = "step"

    def play(self) -> Row:
        row = self._observe()
        if row.executed:
            self._act(row)
        else:
            self._next = self._after_last
        self.rows.append(row)
        return row

    def _observe(self) -> Row:
        frame, size = self._frame(), self.spec.frame_stack
        restart = self._next == "game"
        self._stack = [frame] * size if restart else [*self._stack[1:], frame]
        stack = np.stack(self._stack) if self.spec.kind == "atari" else frame
        outputs = np.array([self.rng.gauss(0, 1) for _ in range(self.spec.num_actions)], dtype=np.float32)
        return Row(
            frame=frame,
            stack=stack,
            action=self.rng.randrange(self.spec.num_actions),
            reward=0.0,
            raw_reward=0.0,
            terminal=False,
            truncated=False,
            executed=self._next != "last",
            game_start=restart,
            teacher_outputs=outputs,
            behaviour_log_prob=-self.rng.random(),
            epsilon=self.rng.random(),
        )

    def _act(self, row: Row) -> None:
        row.raw_reward = float(np.float32(self.rng.uniform(-3, 3)))
        row.reward = float(np.float32(row.raw_reward / 2))
        chance = self.rng.random()
        self._next = "step"
        for name in ("life", "over", "truncate", "drop", "blink", "ignored"):
            chance -= getattr(self.odds, name)
            if chance < 0:
                self._end(row, name)
                return

    def _end(self, row: Row, name: str) -> None:
        row.terminal, row.truncated = name in ("life", "over", "blink"), name == "truncate"
        self._next = {"drop": "game", "blink": "step"}.get(name, "last")
        self._after_last = "life" if name in ("life", "ignored") else "game"

    def _frame(self) -> np.ndarray:
        size = int(np.prod(self.spec.frame_shape))
        if self.spec.kind == "atari":
            values = np.frombuffer(self.rng.randbytes(size), dtype=np.uint8)
        else:
            values = np.array([self.rng.gauss(0, 1) for _ in range(size)], dtype=np.float32)
        return values.reshape(self.spec.frame_shape)


class Oracle:
    """Lanes and what a replay must hold of them, said as plainly as possible."""

    def __init__(self, replay: Replay, longest: int, lanes: list[Lane]) -> None:
        self.replay, self.lanes = replay, lanes
        self._longest = longest  # rows per lane until the capacity is reached
        self._length: int | None = None

    def add(self, which: list[int]) -> None:
        """Each of these lanes moves once; the replay gets the rows in this order."""
        rows = [self.lanes[i].play() for i in which]
        self.replay.add(np.array(which, dtype=np.int64), row_batch(rows))
        if self._length is None and self.executed_rows() >= self.replay.capacity:
            reach = self.replay.spec.frame_stack + self.replay.n_step
            self._length = min(self._longest, max(len(lane.rows) for lane in self.lanes) + reach)

    @property
    def length(self) -> int:
        return self._length or self._longest

    def oldest(self, lane: Lane) -> int:
        return max(0, len(lane.rows) - self.length)

    def executed_rows(self) -> int:
        return sum(row.executed for lane in self.lanes for row in lane.rows[self.oldest(lane) :])

    def valid(self) -> list[tuple[int, int, int]]:
        """Every transition to be sampled: lane, row number, k; lane by lane, oldest first."""
        found = []
        for i, lane in enumerate(self.lanes):
            for t in range(self.oldest(lane), len(lane.rows)):
                k = self._steps(lane, t)
                if k and self._first_needed(lane, t) >= self.oldest(lane):
                    found.append((i, t, k))
        return found

    def flat(self, lane: int, number: int) -> int:
        return number % self.length * len(self.lanes) + lane

    def batch(self, valid: list[tuple[int, int, int]]) -> Batch:
        """The transitions, computed from the whole history."""
        picked = [(self.lanes[i].rows, t, k) for i, t, k in valid]
        firsts = [rows[t] for rows, t, _ in picked]
        gamma, shape = self.replay.discount, (len(valid), *self.replay.spec.obs_shape)
        return Batch(
            obs=_tensor([row.stack for row in firsts]).view(shape),
            action=torch.tensor([row.action for row in firsts], dtype=torch.int64),
            reward=_float([_return(rows[t : t + k], gamma) for rows, t, k in picked]),
            discount=_float([0.0 if rows[t + k - 1].terminal else gamma**k for rows, t, k in picked]),
            next_obs=_tensor([rows[t + k].stack for rows, t, k in picked]).view(shape),
            teacher_outputs=_tensor([row.teacher_outputs for row in firsts]),
            behaviour_log_prob=_float([row.behaviour_log_prob for row in firsts]),
        )

    def check(self) -> None:
        """The replay holds exactly these transitions, bit for bit, and draws no others."""
        valid = self.valid()
        assert self.replay.agent_steps == self.executed_rows()
        assert self.replay.sampleable == len(valid)
        rows = self.replay.sampleable_rows()
        assert rows.tolist() == [self.flat(i, t) for i, t, _ in valid]
        if valid:
            assert set(self.replay.draw(200, torch.Generator().manual_seed(0)).tolist()) <= set(rows.tolist())
            assert_same(self.replay.gather(rows), self.batch(valid))

    def _steps(self, lane: Lane, t: int) -> int:
        """k of the transition at t; 0 if it cannot be sampled yet, or ever."""
        for k in range(1, self.replay.n_step + 1):
            if t + k >= len(lane.rows) or not lane.rows[t + k - 1].executed:
                return 0
            if lane.rows[t + k].game_start:  # its own last observation would stand here
                return 0
            if lane.rows[t + k - 1].terminal or lane.rows[t + k - 1].truncated:
                return k
        return self.replay.n_step

    def _first_needed(self, lane: Lane, t: int) -> int:
        number = t
        while number > t - self.replay.spec.frame_stack + 1 and not lane.rows[number].game_start:
            number -= 1
            if number < 0:
                return -1
        return number


def make_oracle(
    spec: EnvSpec, num_lanes: int, capacity: int, n_step: int, seed: int, odds: Odds, **storage
) -> Oracle:
    """Lanes of random games, and an empty replay for them."""
    replay = Replay(spec, num_lanes, capacity, n_step=n_step, discount=0.9, **storage)
    share = -(-capacity // num_lanes)
    spare = -(-share // 8) if spec.kind == "atari" else share
    longest = share + spare + spec.frame_stack + n_step
    lanes = [Lane(spec, random.Random(seed * 100 + i), odds) for i in range(num_lanes)]
    return Oracle(replay, longest, lanes)


def play(oracle: Oracle, moves: int, seed: int, uneven: bool = True) -> None:
    """Random subsets of the lanes move, in random order, some lanes more often than others."""
    rng = random.Random(seed)
    count = len(oracle.lanes)
    pace = [rng.uniform(0.2, 1.0) if uneven else 1.0 for _ in range(count)]
    for _ in range(moves):
        which = [i for i in range(count) if rng.random() < pace[i]]
        rng.shuffle(which)
        if which:
            oracle.add(which)


games = st.builds(
    Odds,
    life=st.sampled_from([0.0, 0.1, 0.4]),
    over=st.sampled_from([0.0, 0.05, 0.4]),
    truncate=st.sampled_from([0.0, 0.1]),
    drop=st.sampled_from([0.0, 0.05]),
    blink=st.sampled_from([0.0, 0.1]),
    ignored=st.sampled_from([0.0, 0.1]),
    late=st.booleans(),
)
#: What :func:`make_oracle` takes.
worlds = st.fixed_dictionaries(
    {
        "spec": st.one_of(
            st.just(VECTOR), st.integers(1, 5).map(lambda s: replace(PIXELS, obs_shape=(s, 2, 1)))
        ),
        "num_lanes": st.integers(1, 4),
        "capacity": st.integers(1, 40),
        "n_step": st.integers(1, 5),
        "seed": st.integers(0, 2**20),
        "odds": games,
    }
)


def row_batch(rows: list[Row]) -> RowBatch:
    """Rows of several lanes as one batch."""
    names = ("reward", "raw_reward", "behaviour_log_prob", "epsilon")
    flags = ("terminal", "truncated", "executed", "game_start")
    return RowBatch(
        frame=np.stack([row.frame for row in rows]),
        action=np.array([row.action for row in rows]),
        teacher_outputs=np.stack([row.teacher_outputs for row in rows]),
        **{name: np.array([getattr(row, name) for row in rows], dtype=np.float32) for name in names},
        **{name: np.array([getattr(row, name) for row in rows], dtype=np.bool_) for name in flags},
    )


def assert_same(found: Batch, expected: Batch) -> None:
    """All fields equal in value, shape and type."""
    for name, value in vars(expected).items():
        other = getattr(found, name)
        assert other.dtype == value.dtype, name
        assert other.shape == value.shape, name
        assert torch.equal(other, value), name


def _return(rows: list[Row], gamma: float) -> float:
    total = 0.0
    for i, row in enumerate(rows):
        total += gamma**i * row.reward
    return total


def _tensor(values: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(values))


def _float(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(torch.float32)
