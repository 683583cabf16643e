"""What a buffer costs, and that it is refused before it does not fit."""

from __future__ import annotations

import numpy as np
import torch

from reincarnate.replay import Replay, RowBatch, memory, memory_needed
from reincarnate.types import EnvSpec

ATARI = EnvSpec("Breakout-v5", "atari", num_actions=18, obs_shape=(4, 84, 84))


def long_game(replay: Replay, steps: int) -> None:
    n, A = replay.num_envs, replay.spec.num_actions
    false, zeros = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.float32)
    for step in range(steps):
        rows = RowBatch(
            frame=np.zeros((n, 84, 84), dtype=np.uint8),
            action=np.zeros(n, dtype=np.int64),
            reward=zeros,
            raw_reward=zeros,
            terminal=false,
            truncated=false,
            executed=~false,
            game_start=np.full(n, step == 0),
            teacher_outputs=np.zeros((n, A), dtype=np.float32),
            behaviour_log_prob=zeros,
            epsilon=zeros,
        )
        replay.add(np.arange(n), rows)


def test_beside_a_disk_little_memory_is_needed():
    """Ten million transitions: 72 GB on disk, 1.2 GB of other columns and the tail in memory."""
    beside = memory.memory_beside_disk(ATARI, 8, 10_000_000)
    assert 1.1e9 < beside < 1.7e9
    assert memory.disk_needed(ATARI, 8, 10_000_000) > 70e9
    assert memory.memory_packed(ATARI, 8, 10_000_000, 400.0) < 6e9


def test_the_room_of_a_folder_that_is_not_there_yet(tmp_path):
    free = memory.disk_available(tmp_path / "runs" / "new")
    assert free is not None
    assert free > 1e6
    assert memory.disk_of(tmp_path / "runs") == tmp_path.stat().st_dev


def held_bytes(replay: Replay, rows: int) -> int:
    """Bytes of every array and tensor that hangs on the replay, for one row of its tables."""
    found = {}
    index = vars(replay._index)
    tables = [replay._frames, replay._columns.integers, replay._columns.floats]
    for tensor in [table.tensor for table in tables]:
        found[tensor.data_ptr()] = tensor.nbytes
    for array in index.values():
        if isinstance(array, np.ndarray) and array.shape[:1] == (rows,):
            found[array.ctypes.data] = array.nbytes
    return sum(found.values()) // rows


def test_an_atari_transition_costs_at_most_7200_bytes():
    replay = Replay(ATARI, 8, 800, n_step=3, discount=0.99)
    allocated = len(replay._frames.tensor)
    assert replay.bytes_per_transition == held_bytes(replay, allocated) <= 7200
    long_game(replay, 300)
    assert replay.agent_steps >= 800
    assert replay.nbytes == replay.rows * replay.bytes_per_transition
    million = memory.row_bytes(ATARI) * 1_000_000
    assert million <= 7.2e9


def test_memory_needed_is_what_is_allocated():
    replay = Replay(ATARI, 8, 800, n_step=3, discount=0.99)
    allocated = len(replay._frames.tensor) * replay.bytes_per_transition
    assert memory_needed(ATARI, 8, 800, n_step=3) == allocated
    assert memory_needed(ATARI, 8, 1_000_000) < 1.13 * 7200 * 1_000_000


def test_free_memory_of_this_machine_is_plausible():
    free = memory.memory_available(torch.device("cpu"))
    assert free is None or 1e6 < free < 1e15


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\nactive_file 7\n")
    assert memory._container_free(tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_free(tmp_path) is None


def test_free_memory_is_read_in_kibibytes(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert memory._system_free(path) == 2048 * 1024
    assert memory._system_free(tmp_path / "nothing") is None
