"""Sequences of rows against an oracle that keeps everything: one lane, right masks, fresh ones used once."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.replay import (
    Extras,
    FreshRows,
    Replay,
    Sampler,
    SequenceDraws,
    SequenceFeed,
    sequences_stored,
    table,
)
from reincarnate.replay.store import SegmentStore
from reincarnate.types import EnvSpec, SequenceBatch

from replay_oracle import VECTOR, Lane, Odds, Oracle, Row, make_oracle, play, row_batch, worlds

EXTRAS = Extras(behaviour_log_policy=True, state_shape=(2, 3))
CPU = torch.device("cpu")


def log_policy_of(row: Row) -> np.ndarray:
    """A column made up from the row's identity."""
    return (row.teacher_outputs - row.epsilon).astype(np.float32)


def state_of(row: Row) -> np.ndarray:
    return (np.arange(6, dtype=np.float32) + np.float32(row.behaviour_log_prob)).reshape(2, 3)


class ExtraOracle(Oracle):
    """Adds rows with the optional columns."""

    def add(self, which: list[int]) -> None:
        real = Replay.add

        def add(replay, lanes, batch):
            rows = [self.lanes[i].rows[-1] for i in which]
            more = {
                "behaviour_log_policy": np.stack([log_policy_of(row) for row in rows]),
                "state": np.stack([state_of(row) for row in rows]),
            }
            real(replay, lanes, type(batch)(**(vars(batch) | more)))

        with mock.patch.object(Replay, "add", add):
            super().add(which)


def oracle_of(world: dict, extras: Extras = EXTRAS) -> ExtraOracle:
    plain = make_oracle(**world, extras=extras)
    return ExtraOracle(plain.replay, plain._longest, plain.lanes)


def starts(oracle: Oracle, length: int) -> list[tuple[int, int]]:
    """Every sequence to be drawn: lane and row number of its first row, whose stack is stored whole."""
    found = []
    for i, lane in enumerate(oracle.lanes):
        possible = range(oracle.oldest(lane), len(lane.rows) - length + 1)
        found += [(i, t) for t in possible if oracle._first_needed(lane, t) >= oracle.oldest(lane)]
    return found


def expected_batch(oracle: Oracle, which: list[tuple[int, int]], length: int) -> SequenceBatch:
    picked = [oracle.lanes[i].rows[t : t + length] for i, t in which]

    def column(get) -> np.ndarray:
        return np.stack([[get(row) for row in rows] for rows in picked])

    executed = column(lambda row: row.executed)
    starts_game = column(lambda row: row.game_start)
    executed[:, :-1] &= ~starts_game[:, 1:]
    shape = (len(which), length, *oracle.replay.spec.obs_shape)
    return SequenceBatch(
        obs=torch.from_numpy(column(lambda row: row.stack)).view(shape),
        action=torch.from_numpy(column(lambda row: row.action)),
        reward=torch.from_numpy(column(lambda row: np.float32(row.reward))),
        terminal=torch.from_numpy(column(lambda row: row.terminal)),
        truncated=torch.from_numpy(column(lambda row: row.truncated)),
        executed=torch.from_numpy(executed),
        game_start=torch.from_numpy(starts_game),
        behaviour_log_policy=torch.from_numpy(column(log_policy_of)),
        state=torch.from_numpy(np.stack([state_of(rows[0]) for rows in picked])),
        teacher_outputs=torch.from_numpy(column(lambda row: row.teacher_outputs)),
    )


def assert_equal(found: SequenceBatch, expected: SequenceBatch) -> None:
    for name, value in vars(expected).items():
        other = getattr(found, name)
        assert other.dtype == value.dtype, name
        assert other.shape == value.shape, name
        assert torch.equal(other, value), name


def check(oracle: Oracle, length: int) -> None:
    replay, found = oracle.replay, starts(oracle, length)
    assert sequences_stored(replay, length) == len(found)
    if not found:
        with pytest.raises(ValueError, match="rows of one environment"):
            SequenceDraws(replay, length).draw(1, None)
        return
    flat = {oracle.flat(i, t): (i, t) for i, t in found}
    drawn = SequenceDraws(replay, length).draw(300, torch.Generator().manual_seed(1)).tolist()
    assert set(drawn) <= set(flat)
    every = list(flat)
    which = [flat[row] for row in every]
    assert_equal(replay.gather_sequences(torch.tensor(every), length), expected_batch(oracle, which, length))


@pytest.mark.parametrize("shared", [True, False], ids=["host", "device"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 50), length=st.integers(2, 9))
def test_every_sequence_equals_the_oracle(shared, world, moves, length):
    with mock.patch.object(table, "shares_memory", return_value=shared):
        oracle = oracle_of(world)
        for part in range(3):
            play(oracle, moves, seed=world["seed"] + part)
            check(oracle, length)
            oracle.check()  # transitions of the same rows


@settings(max_examples=15, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60), length=st.integers(2, 6))
def test_sequences_survive_the_way_through_segments(world, moves, length):
    oracle = oracle_of(world)
    play(oracle, moves, seed=world["seed"])
    with tempfile.TemporaryDirectory() as folder:
        segments = SegmentStore(Path(folder))
        segments.append_new(oracle.replay, np.zeros(world["num_lanes"], dtype=np.int64))
        loaded = oracle_of(world).replay
        segments.load_into(loaded)
        oracle.replay = loaded
        check(oracle, length)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60), length=st.integers(2, 6), seed=st.integers(0, 99))
def test_every_fresh_action_is_used_once_in_order_and_resumes(world, moves, length, seed):
    oracle = oracle_of(world | {"capacity": 4_000})
    fresh = FreshRows(oracle.replay, length)
    used: dict[int, list[int]] = {i: [] for i in range(world["num_lanes"])}
    for part in range(4):
        play(oracle, moves, seed=seed + part)
        numbers = {
            oracle.flat(i, t): (i, t) for i, lane in enumerate(oracle.lanes) for t in range(len(lane.rows))
        }
        for row in fresh.take(fresh.waiting).tolist():
            lane, number = numbers[row]
            used[lane] += range(number, number + length - 1)
        fresh = FreshRows(oracle.replay, length, fresh.next_rows)
        assert fresh.waiting == 0
    with pytest.raises(ValueError, match="fresh sequences"):
        fresh.take(1)
    first, _ = oracle.replay.sequence_bounds(length)
    for lane, rows in used.items():
        total = len(oracle.lanes[lane].rows)
        assert rows == list(range(first[lane], first[lane] + len(rows)))  # all of them, once, in order
        assert total - 1 - (first[lane] + len(rows)) < length - 1 or total < first[lane] + length


@settings(max_examples=15, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60), length=st.integers(2, 6))
def test_fresh_rows_that_were_overwritten_are_passed_over(world, moves, length):
    oracle = oracle_of(world)  # a buffer of 40 agent steps at most
    fresh, used = FreshRows(oracle.replay, length), dict.fromkeys(range(world["num_lanes"]), -1)
    for part in range(3):
        play(oracle, moves, seed=part)
        numbers = {oracle.flat(i, t): (i, t) for i, t in starts(oracle, length)}
        for row in fresh.take(fresh.waiting).tolist():
            lane, number = numbers[row]  # stored whole
            assert number > used[lane]  # and every action of it for the first time
            used[lane] = number + length - 2


def test_a_batch_mixes_fresh_and_replayed_sequences_of_one_store():
    world = {"spec": VECTOR, "num_lanes": 3, "capacity": 300, "n_step": 1, "seed": 5}
    oracle = oracle_of(world | {"odds": Odds(drop=0.0)})
    play(oracle, 40, seed=1, uneven=False)
    fresh = FreshRows(oracle.replay, 6)
    before = fresh.waiting
    feed = SequenceFeed(oracle.replay, 8, 6, Sampler(CPU, 0), CPU, fresh=fresh, fresh_count=2)
    feed.advance()
    batch = feed.batch()
    assert fresh.waiting == before - 2
    assert batch.obs.shape == (8, 6, 3)
    first = expected_batch(oracle, [(0, 0), (1, 0)], 6)
    assert torch.equal(batch.obs[:2], first.obs)
    feed.advance()
    assert torch.equal(feed.batch().obs[:2], expected_batch(oracle, [(2, 0), (0, 5)], 6).obs)


def test_draws_are_uniform_over_all_sequences():
    oracle = oracle_of(
        {"spec": VECTOR, "num_lanes": 2, "capacity": 60, "n_step": 1, "seed": 5, "odds": Odds()}
    )
    play(oracle, 20, seed=1)
    rows = SequenceDraws(oracle.replay, 5).draw(40_000, torch.Generator().manual_seed(0))
    found, counts = rows.unique(return_counts=True)
    expected = len(rows) / sequences_stored(oracle.replay, 5)
    assert len(found) == sequences_stored(oracle.replay, 5)
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


def test_draws_follow_the_rows_that_are_added_and_look_at_them_once(monkeypatch):
    oracle = oracle_of(
        {"spec": VECTOR, "num_lanes": 2, "capacity": 60, "n_step": 1, "seed": 5, "odds": Odds()}
    )
    play(oracle, 10, seed=1)
    replay, looked = oracle.replay, []
    bounds = replay.sequence_bounds
    monkeypatch.setattr(replay, "sequence_bounds", lambda length: (looked.append(length), bounds(length))[1])
    draws = SequenceDraws(replay, 5)
    for _ in range(3):  # a device would be waited for at every look
        draws.draw(8, None)
    assert looked == [5]
    play(oracle, 40, seed=2)
    fresh, same = SequenceDraws(replay, 5), [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(draws.draw(500, same[0]), fresh.draw(500, same[1]))
    assert looked == [5, 5, 5]


def test_rows_without_extras_are_as_small_as_ever_and_need_the_behaviour():
    spec = EnvSpec("Breakout-v5", "atari", num_actions=4, obs_shape=(4, 84, 84))
    plain = Replay(spec, 1, 10, n_step=3, discount=0.99)
    assert plain.bytes_per_transition <= 7200
    extra = Replay(spec, 1, 10, n_step=3, discount=0.99, extras=EXTRAS)
    assert extra.bytes_per_transition == plain.bytes_per_transition + 4 * (4 + 6)
    with pytest.raises(ValueError, match="does not hold the behaviour's policy"):
        plain.gather_sequences(torch.tensor([0]), 2)


def test_extra_columns_must_be_there():
    replay = Replay(VECTOR, 1, 10, n_step=1, discount=0.9, extras=EXTRAS)
    with pytest.raises(ValueError, match=r"behaviour_log_policy must have shape \(1, 2\)"):
        replay.add(np.zeros(1, dtype=np.int64), row_batch([Lane(VECTOR, random.Random(0), Odds()).play()]))
