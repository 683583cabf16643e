"""The ring against an oracle that keeps everything, and its documented corners in closed form."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.replay import Replay, RowBatch, memory, store, table
from reincarnate.replay.index import LaneIndex
from reincarnate.replay.memory import LaneSize
from reincarnate.replay.rows import EXECUTED, GAME_START
from reincarnate.replay.store import SegmentStore
from reincarnate.types import EnvSpec

from replay_oracle import Lane, Odds, Oracle, assert_same

PIXELS = EnvSpec("Breakout-v5", "atari", num_actions=3, obs_shape=(4, 2, 3))
NEEDS_LZ4 = pytest.mark.skipif(importlib.util.find_spec("lz4") is None, reason="lz4 is not installed")
VECTOR = EnvSpec("CartPole-v1", "vector", num_actions=2, obs_shape=(3,))


def make_oracle(
    spec: EnvSpec, num_lanes: int, capacity: int, n_step: int, seed: int, odds: Odds, **storage
) -> Oracle:
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
worlds = st.fixed_dictionaries(
    {
        "spec": st.one_of(
            st.just(VECTOR), st.integers(1, 5).map(lambda s: dataclasses.replace(PIXELS, obs_shape=(s, 2, 1)))
        ),
        "num_lanes": st.integers(1, 4),
        "capacity": st.integers(1, 40),
        "n_step": st.integers(1, 5),
        "seed": st.integers(0, 2**20),
        "odds": games,
    }
)


@pytest.mark.parametrize("shared", [True, False], ids=["host", "device"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60))
def test_every_transition_equals_the_oracle(shared, world, moves):
    with mock.patch.object(table, "shares_memory", return_value=shared):
        oracle = make_oracle(**world)
        for part in range(3):
            play(oracle, moves, seed=world["seed"] + part)
            oracle.check()


@contextlib.contextmanager
def oracle_on_disk(world: dict, tail_rows: int, segment_rows: int) -> Iterator[tuple[Oracle, SegmentStore]]:
    """An oracle whose replay has its frames in segments, and very few of them in memory."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(memory, "TAIL_ROWS", tail_rows):
        oracle, segments = make_oracle(**world, frames_on_disk=True), SegmentStore(Path(folder))
        marks = oracle.replay.marks

        def spill(replay: Replay) -> None:
            nonlocal marks
            with mock.patch.object(store, "SEGMENT_ROWS", segment_rows):
                marks = segments.append_new(replay, marks)
            segments.discard_before(replay.oldest)
            segments.sweep()

        oracle.replay.spill = spill
        yield oracle, segments


@settings(max_examples=40, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60), tail=st.integers(4, 30), segment=st.integers(1, 30))
def test_every_transition_on_disk_equals_the_oracle(world, moves, tail, segment):
    with oracle_on_disk(world, tail, segment) as (oracle, segments):
        for part in range(3):
            play(oracle, moves, seed=world["seed"] + part)
            oracle.check()
        frames = oracle.replay._frames
        assert frames.mapped_files <= len(segments.records)  # nothing that was overwritten is kept open


@settings(max_examples=20, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60), tail=st.integers(4, 30), segment=st.integers(1, 30))
def test_segments_are_mapped_again_and_never_rewritten(world, moves, tail, segment):
    with oracle_on_disk(world, tail, segment) as (oracle, segments):
        play(oracle, moves, seed=world["seed"])
        oracle.replay.spill(oracle.replay)
        files = {path: path.stat().st_mtime_ns for path in segments._folder.iterdir()}
        loaded, plain = make_oracle(**world, frames_on_disk=True).replay, make_oracle(**world).replay
        segments.load_into(loaded)
        segments.load_into(plain)
        assert_equal_replays(loaded, plain)
        assert {path: path.stat().st_mtime_ns for path in segments._folder.iterdir()} == files
        assert loaded._frames.room == tail  # no frame is in memory
        loaded.spill, oracle.replay = oracle.replay.spill, loaded
        play(oracle, moves, seed=world["seed"] + 1)
        oracle.check()


@pytest.mark.parametrize("compression", ["zlib", pytest.param("lz4", marks=NEEDS_LZ4)])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60))
def test_every_compressed_transition_equals_the_oracle(compression, world, moves):
    oracle = make_oracle(**world, compression=compression)
    for part in range(3):
        play(oracle, moves, seed=world["seed"] + part)
        oracle.check()


def test_a_full_tail_without_a_store_is_an_error(monkeypatch):
    monkeypatch.setattr(memory, "TAIL_ROWS", 3)
    replay = Replay(PIXELS, 1, 20, n_step=1, discount=0.9, frames_on_disk=True)
    feed(replay, START, GO, GO)
    with pytest.raises(RuntimeError, match="tail is full"):
        feed(replay, GO)


@pytest.mark.parametrize("changes", [{"compression": "zlib"}, {"device": "meta"}])
def test_frames_on_disk_are_the_hosts_and_not_compressed(changes):
    with pytest.raises(ValueError, match="in the host's memory only"):
        Replay(PIXELS, 1, 20, n_step=1, discount=0.9, frames_on_disk=True, **changes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60), limit=st.sampled_from([None, 1, 7]))
def test_loaded_rows_sample_as_the_original(world, moves, limit):
    oracle = make_oracle(**world)
    marks, segments = oracle.replay.marks, []
    for part in range(3):
        play(oracle, moves, seed=world["seed"] + part)
        while (marks < oracle.replay.marks).any():
            arrays, marks = oracle.replay.rows_since(marks, limit)
            segments.append(arrays)
    copy = make_oracle(**world).replay
    copy.follow(oracle.replay.ring)
    for arrays in segments:
        copy.append_rows(arrays)
    assert_equal_replays(copy, oracle.replay)
    oracle.replay = copy  # and it goes on as the original would have
    play(oracle, moves, seed=world["seed"] + 3)
    oracle.check()


def assert_equal_replays(one: Replay, other: Replay) -> None:
    assert one.marks.tolist() == other.marks.tolist()
    assert one.agent_steps == other.agent_steps
    assert torch.equal(one.sampleable_rows(), other.sampleable_rows())
    if one.can_sample():
        assert_same(one.gather(one.sampleable_rows()), other.gather(other.sampleable_rows()))
        seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
        assert_same(one.sample(64, seeds[0]), other.sample(64, seeds[1]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(world=worlds, moves=st.integers(1, 60), lost=st.integers(20, 100))
def test_rows_lost_between_two_marks_are_skipped(world, moves, lost):
    """Long between two checkpoints of a small ring: what was overwritten meanwhile is gone for both."""
    oracle = make_oracle(**world)
    play(oracle, moves, 1)
    first, marks = oracle.replay.rows_since(oracle.replay.marks * 0)
    play(oracle, lost, 2)
    second, _ = oracle.replay.rows_since(marks)
    assert (second["starts"] == np.maximum(marks, oracle.replay.oldest)).all()
    copy = make_oracle(**world).replay
    copy.follow(oracle.replay.ring)
    copy.append_rows(first)
    copy.append_rows(second)
    assert_equal_replays(copy, oracle.replay)
    oracle.replay = copy
    play(oracle, moves, 3)
    oracle.check()


def test_a_lane_that_skips_has_no_open_rows():
    index = LaneIndex(1, 20, LaneSize(27, 40, 7), stack=4, n_step=3, discount=0.5)
    flags = np.array([EXECUTED], dtype=np.uint8)
    index.push(np.array([0]), np.ones(1), flags | GAME_START)
    for _ in range(2):
        index.push(np.array([0]), np.ones(1), flags)
    index.skip(0, 50)
    sampleable = []
    for _ in range(8):
        index.push(np.array([0]), np.ones(1), flags)
        sampleable.append(index.sampleable)
    assert sampleable == [0, 0, 0, 0, 0, 0, 1, 2]  # row 53 is the first with four frames, 56 its future
    assert index.executed_rows == 8


def steady_rows(lanes: int, **changes) -> RowBatch:
    """Rows of a game that goes on, reward 1."""
    values = {
        "frame": np.zeros((lanes, 2, 3), dtype=np.uint8),
        "action": np.zeros(lanes, dtype=np.int64),
        "reward": np.ones(lanes, dtype=np.float32),
        "raw_reward": np.ones(lanes, dtype=np.float32),
        "terminal": np.zeros(lanes, dtype=np.bool_),
        "truncated": np.zeros(lanes, dtype=np.bool_),
        "executed": np.ones(lanes, dtype=np.bool_),
        "game_start": np.zeros(lanes, dtype=np.bool_),
        "teacher_outputs": None,
        "behaviour_log_prob": np.zeros(lanes, dtype=np.float32),
        "epsilon": np.zeros(lanes, dtype=np.float32),
    }
    return RowBatch(**(values | {name: np.asarray(value) for name, value in changes.items()}))


def one_lane(n_step: int = 3, capacity: int = 20) -> Replay:
    return Replay(PIXELS, 1, capacity, n_step=n_step, discount=0.5)


def feed(replay: Replay, *changes: dict, first: int = 0) -> None:
    """One row per argument; its frame is filled with the row's number."""
    for number, change in enumerate(changes, start=first):
        frame = np.full((1, 2, 3), number, dtype=np.uint8)
        replay.add(np.array([0]), steady_rows(1, **({"frame": frame} | change)))


GO: dict = {}
START = {"game_start": [True]}
DIE = {"terminal": [True]}
LIMIT = {"truncated": [True]}
LAST = {"executed": [False], "reward": [0.0]}


def batch_of(replay: Replay):
    return replay.gather(replay.sampleable_rows())


def numbers(obs: torch.Tensor) -> list[list[int]]:
    return obs[:, :, 0, 0].tolist()


def test_returns_and_discounts_in_closed_form():
    replay = one_lane()
    feed(replay, START, GO, GO, GO)
    batch = batch_of(replay)
    assert batch.reward.tolist() == [1.75]  # 1 + 1/2 + 1/4
    assert batch.discount.tolist() == [0.125]
    assert numbers(batch.obs) == [[0, 0, 0, 0]]
    assert numbers(batch.next_obs) == [[0, 1, 2, 3]]


def test_terminal_ends_the_sum_and_the_bootstrap():
    replay = one_lane()
    feed(replay, START, GO, DIE)
    assert not replay.can_sample()  # the last observation is not there yet
    feed(replay, LAST, first=3)
    batch = batch_of(replay)
    assert batch.reward.tolist() == [1.75, 1.5, 1.0]
    assert batch.discount.tolist() == [0.0, 0.0, 0.0]


def test_truncation_bootstraps_from_the_last_observation():
    replay = one_lane()
    feed(replay, START, GO, LIMIT, LAST, START)
    batch = batch_of(replay)
    assert batch.reward.tolist() == [1.75, 1.5, 1.0]
    assert batch.discount.tolist() == [0.125, 0.25, 0.5]
    assert numbers(batch.next_obs) == [[0, 1, 2, 3]] * 3


def test_stack_shifts_across_a_lost_life_and_restarts_with_a_game():
    replay = one_lane(n_step=1)
    feed(replay, START, GO, DIE, LAST, GO, GO, DIE, LAST, START, GO, GO)
    obs = numbers(batch_of(replay).obs)
    after_life, after_game = obs[3:5], obs[6:]
    assert after_life == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert after_game == [[8, 8, 8, 8], [8, 8, 8, 9]]


def test_a_dropped_game_leaves_no_transition_into_the_next():
    replay = one_lane(n_step=1)
    feed(replay, START, GO, START, GO)  # row 1 was played, but nobody saw what came of it
    assert numbers(batch_of(replay).obs) == [[0, 0, 0, 0], [2, 2, 2, 2]]


def test_an_outcome_of_an_ignored_action_is_not_believed():
    replay = one_lane(n_step=1)
    feed(replay, START, DIE, LAST | DIE, GO, GO)
    assert batch_of(replay).discount.tolist() == [0.5, 0.0, 0.5]


def test_a_stack_is_sampled_only_while_its_oldest_frame_is_stored():
    replay = one_lane(n_step=1, capacity=8)
    feed(replay, START, *[GO] * 39)
    held = numbers(batch_of(replay).obs)
    oldest = int(replay.oldest[0])
    assert held[0] == [oldest, oldest + 1, oldest + 2, oldest + 3]
    assert held[-1] == [35, 36, 37, 38]


@pytest.mark.parametrize(("spec", "episode"), [(PIXELS, 8), (VECTOR, 1)])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_capacity_counts_actions_not_rows(spec, episode, num_envs):
    """Short episodes: a lane must outgrow its share of rows, or collecting would never be done."""
    replay = Replay(spec, num_envs, 200, n_step=3, discount=0.9)
    lanes, zero = np.arange(num_envs), np.zeros((num_envs, *spec.frame_shape))
    for step in range(4000 // num_envs):
        place = step % (episode + 1)
        row = steady_rows(
            num_envs,
            frame=zero.astype(np.uint8 if spec.kind == "atari" else np.float32),
            terminal=np.full(num_envs, place == episode - 1),
            executed=np.full(num_envs, place != episode),
            game_start=np.full(num_envs, place == 0),
        )
        replay.add(lanes, row)
        if step * num_envs > 500:
            assert 200 <= replay.agent_steps <= 200 + 10 * num_envs


def test_empty_and_unfinished_buffers_say_so():
    replay = one_lane()
    feed(replay, START, GO, GO)
    assert not replay.can_sample()
    with pytest.raises(ValueError, match="no whole 3-step transition among 3 rows"):
        replay.sample(4, torch.Generator())
    feed(replay, GO, first=3)
    assert replay.can_sample(1)
    assert not replay.can_sample(2)


def test_frozen_buffer_draws_the_same_set_and_takes_no_rows():
    oracle = make_oracle(PIXELS, 3, 30, 3, 5, Odds())
    play(oracle, 80, 5)
    rows = oracle.replay.sampleable_rows()
    oracle.replay.freeze()
    drawn = oracle.replay.draw(4000, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == set(rows.tolist())
    with pytest.raises(ValueError, match="frozen"):
        oracle.add([0])


@pytest.mark.parametrize(
    ("lanes", "changes", "message"),
    [
        ([0, 0], {}, "distinct"),
        ([0, 2], {}, "below 2"),
        ([-1, 0], {}, "below 2"),
        ([0, 1], {"frame": np.zeros((2, 3, 2), dtype=np.uint8)}, r"shape \(2, 2, 3\), got \(2, 3, 2\)"),
        ([0, 1], {"teacher_outputs": np.zeros((2, 1))}, r"teacher outputs .* \(2, 3\), got \(2, 1\)"),
    ],
)
def test_wrong_rows_are_refused(lanes, changes, message):
    replay = Replay(PIXELS, 2, 10, n_step=1, discount=0.9)
    with pytest.raises(ValueError, match=message):
        replay.add(np.array(lanes), steady_rows(2, **changes))
    assert replay.rows == 0


@pytest.mark.parametrize("change", [{"num_envs": 0}, {"capacity_agent_steps": 0}, {"n_step": 0}])
def test_sizes_must_be_positive(change):
    values = {"num_envs": 1, "capacity_agent_steps": 1, "n_step": 1} | change
    with pytest.raises(ValueError, match="at least 1"):
        Replay(PIXELS, discount=0.9, **values)


def test_segments_out_of_order_are_refused():
    oracle = make_oracle(PIXELS, 2, 20, 1, 3, Odds())
    play(oracle, 5, 3, uneven=False)
    arrays, _ = oracle.replay.rows_since(oracle.replay.marks * 0)
    with pytest.raises(ValueError, match="cannot continue at row 0"):
        oracle.replay.append_rows(arrays)
    with pytest.raises(ValueError, match="2 environments, not 3"):
        Replay(PIXELS, 3, 20, n_step=1, discount=0.9).append_rows(arrays)
    with pytest.raises(ValueError, match="float64"):
        Replay(PIXELS, 2, 20, n_step=1, discount=0.9).append_rows(arrays | {"frame": arrays["frame"] * 1.0})


def test_raw_reward_and_epsilon_are_kept_for_storage():
    replay = one_lane()
    feed(replay, START | {"raw_reward": [7.0], "epsilon": [0.25], "action": [2]})
    arrays, marks = replay.rows_since(np.zeros(1, dtype=np.int64))
    assert (arrays["raw_reward"], arrays["epsilon"], arrays["action"]) == (7.0, 0.25, 2)
    assert marks.tolist() == [1]
