"""The buffer's documented corners in closed form: rows written by hand, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reincarnate.replay import Replay, RowBatch, memory
from reincarnate.replay.index import LaneIndex
from reincarnate.replay.memory import LaneSize
from reincarnate.replay.rows import EXECUTED, GAME_START

from replay_oracle import PIXELS, VECTOR, Odds, make_oracle, play


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
