"""Where buffers live: the rule of ``--buffer auto``, and refusals in one line with the sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from reincarnate import api
from reincarnate.errors import UserError
from reincarnate.progress import Phase
from reincarnate.replay import Buffer, memory, storage
from reincarnate.replay.storage import Room, Sizes, choose
from reincarnate.runner import Run
from reincarnate.types import EnvSpec

from small_runs import quiet, read, small_config

GB = 10**9
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ATARI = EnvSpec("Breakout-v5", "atari", num_actions=18, obs_shape=(4, 84, 84))
SIZES = Sizes(memory=7 * GB, beside_disk=1 * GB, packed=2 * GB)
PLENTY = Room(device=100 * GB, memory=100 * GB, disk=100 * GB)


def test_auto_takes_the_fastest_place_with_enough_room():
    assert choose("auto", SIZES, PLENTY, CUDA, "none").storage == "cuda"
    assert choose("auto", SIZES, PLENTY, CPU, "none").storage == "ram"


@pytest.mark.parametrize(
    ("free_device", "free_memory", "place"),
    [
        (12 * GB, 100 * GB, "cuda"),  # 7 of 12 is 58 %
        (11 * GB, 100 * GB, "ram"),  # 64 %
        (11 * GB, 14 * GB, "ram"),  # 50 %
        (11 * GB, 13 * GB, "disk"),
        (None, None, "cuda"),  # nobody tells: nothing is refused
    ],
)
def test_sixty_percent_of_the_device_then_half_of_the_memory(free_device, free_memory, place):
    room = Room(free_device, free_memory, 0)
    assert choose("auto", SIZES, room, CUDA, "none").storage == place


def test_what_fits_nowhere_is_refused_with_all_sizes():
    with pytest.raises(UserError) as caught:
        choose("auto", SIZES, Room(None, 10 * GB, -3 * GB), CPU, "none")
    line = str(caught.value)
    assert "\n" not in line
    for part in (
        "7.00 GB",
        "10.00 GB in memory, of which 50 %",
        "on disk 3.00 GB are missing",
        "--collect-steps",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("asked", "room", "message"),
    [
        ("ram", Room(None, 6 * GB, 0), r"needs 7\.00 GB of memory but 6\.00 GB are free"),
        ("cuda", Room(6 * GB, 9 * GB, 0), r"needs 7\.00 GB of the CUDA device but 6\.00 GB are free"),
        ("disk", Room(None, 9 * GB, -2 * GB), r"do not fit on disk: 2\.00 GB are missing"),
        ("disk", Room(None, GB // 2, 0), r"on disk needs 1\.00 GB of memory but 0\.50 GB are free"),
        ("tape", PLENTY, "no buffer 'tape'"),
    ],
)
def test_an_explicit_choice_that_does_not_fit_is_refused(asked, room, message):
    with pytest.raises(UserError, match=message):
        choose(asked, SIZES, room, CUDA, "none")


def test_an_explicit_choice_may_take_all_that_is_free():
    assert choose("ram", SIZES, Room(None, 7 * GB, 0), CPU, "none").storage == "ram"
    assert choose("cuda", SIZES, Room(7 * GB, 1, 0), CUDA, "none").storage == "cuda"


def test_cuda_needs_a_cuda_learner():
    with pytest.raises(UserError, match="--buffer cuda needs a CUDA learner, and the device is cpu"):
        choose("cuda", SIZES, PLENTY, CPU, "none")


def test_compressed_buffers_are_in_memory_and_smaller():
    tight = Room(None, 3 * GB, 100 * GB)
    choice = choose("auto", SIZES, tight, CPU, "zlib")
    assert choice.storage == "ram"
    assert "2.00 GB in memory, zlib, 7.00 GB unpacked" in choice.line
    with pytest.raises(
        UserError, match=r"compressed with zlib, needs 2\.00 GB of memory but 1\.00 GB are free"
    ):
        choose("ram", SIZES, Room(None, GB, 0), CPU, "zlib")
    with pytest.raises(UserError, match="leave one of them out"):
        choose("disk", SIZES, tight, CPU, "lz4")


def test_the_line_says_where_and_how_much():
    lines = [
        choose("auto", SIZES, room, CUDA, "none").line
        for room in (PLENTY, Room(1, 15 * GB, 5), Room(1, 9 * GB, 5 * GB))
    ]
    assert lines == [
        "buffer: cuda (at most 7.00 GB on the device, 100.00 GB free)",
        "buffer: ram (at most 7.00 GB in memory, 15.00 GB free)",
        "buffer: disk (at most 7.00 GB, 1.00 GB of it in memory; 5.00 GB left on disk)",
    ]


def test_the_largest_buffer_counts_and_the_disk_holds_all(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "disk_available", lambda folder: 100 * GB)
    buffers = [Buffer(8, 1_000_000, tmp_path / "a"), Buffer(8, 500_000, tmp_path / "b")]
    sizes = storage.sizes_of(ATARI, buffers)
    assert sizes.memory == memory.memory_needed(ATARI, 8, 1_000_000)
    left = storage.disk_left(ATARI, buffers)
    both = memory.disk_needed(ATARI, 8, 1_000_000) + memory.disk_needed(ATARI, 8, 500_000)
    assert left == 90 * GB - both
    half = memory.disk_needed(ATARI, 8, 500_000)
    assert (
        storage.disk_left(ATARI, [dataclasses.replace(buffers[0], complete=True), buffers[1]])
        == 90 * GB - half
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rows-000001.safetensors").write_bytes(bytes(1000))
    assert storage.disk_left(ATARI, buffers[1:]) == 90 * GB - half + 1000


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run with its buffers in memory, on disk with a tiny tail, and compressed."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {"offline__evaluations": 0, "online__evaluations": 0, "evaluate__games": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "TAIL_ROWS", 64)
        for name, more in {
            "ram": {"system__buffer": "ram"},
            "disk": {"system__buffer": "disk"},
            "zlib": {"system__compress": "zlib"},
        }.items():
            patch.setenv("REINCARNATE_CACHE", str(folder / f"cache-{name}"))
            Run.start(small_config(**changes, **more), folder / name, quiet()).execute()
    return {name: folder / name for name in ("ram", "disk", "zlib")}


@pytest.mark.parametrize("name", ["disk", "zlib"])
def test_a_run_is_the_same_to_the_last_bit_wherever_its_buffers_are(runs, name):
    student = "student.safetensors"
    old, new = read(runs["ram"], "result.json"), read(runs[name], "result.json")
    assert old["student"]["final_return"] == new["student"]["final_return"]
    assert old["phases"]["online"]["updates"] == new["phases"]["online"]["updates"] > 0
    assert (runs["ram"] / student).read_bytes() == (runs[name] / student).read_bytes()


def test_teachers_collect_holds_few_rows_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "TAIL_ROWS", 40)
    collected = api.collect_teacher(
        "bundled/CartPole-dqn", tmp_path, agent_steps=300, num_envs=4, progress=quiet()
    )
    assert collected.replay.frames_on_disk
    assert collected.agent_steps >= 300
    assert len(list(tmp_path.glob("rows-*.safetensors"))) >= 7
    again = api.collect_teacher(
        "bundled/CartPole-dqn", tmp_path, agent_steps=300, num_envs=4, progress=quiet()
    )
    assert again.reused
    rows = again.replay.sampleable_rows()
    assert torch.equal(again.replay.gather(rows).obs, collected.replay.gather(rows).obs)


def test_a_collection_that_goes_on_tells_what_was_there(tmp_path, monkeypatch):
    def collect():
        return api.collect_teacher(
            "bundled/CartPole-dqn", tmp_path, agent_steps=300, num_envs=4, progress=quiet()
        )

    class Enough(Exception):
        pass

    def stop(phase, done, **numbers):
        if done >= 100:
            raise Enough

    told = []
    monkeypatch.setattr(Phase, "found", lambda phase, done: told.append(done))
    with monkeypatch.context() as patch:
        patch.setattr(Phase, "update", stop)
        with pytest.raises(Enough):
            collect()
    stored = read(tmp_path, "manifest.json")["agent_steps"]
    assert stored >= 100
    assert collect().agent_steps >= 300
    assert told == [0, stored]
