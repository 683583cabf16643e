"""Segments on disk: what comes back is what was stored, and damage is one clear line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.replay import Replay, store
from reincarnate.replay.store import SegmentRecord, SegmentStore
from reincarnate.types import EnvSpec

from replay_oracle import Lane, Odds, Oracle, assert_same

SPEC = EnvSpec("Breakout-v5", "atari", num_actions=3, obs_shape=(4, 2, 3))
VECTOR = EnvSpec("CartPole-v1", "vector", num_actions=2, obs_shape=(3,))


def new_replay(spec: EnvSpec = SPEC, num_envs: int = 3, capacity: int = 60, n_step: int = 3) -> Replay:
    return Replay(spec, num_envs, capacity, n_step=n_step, discount=0.9)


def new_oracle(spec: EnvSpec = SPEC) -> Oracle:
    lanes = [Lane(spec, random.Random(i), Odds()) for i in range(3)]
    return Oracle(new_replay(spec), 20 + (3 if spec.kind == "atari" else 20) + spec.frame_stack + 3, lanes)


def play(oracle: Oracle, moves: int) -> None:
    for move in range(moves):
        oracle.add([2, 0, 1] if move % 3 else [1, 0])


def assert_samples_alike(one: Replay, other: Replay) -> None:
    seeds = [torch.Generator().manual_seed(7) for _ in range(2)]
    for _ in range(3):
        assert_same(one.sample(32, seeds[0]), other.sample(32, seeds[1]))
    assert torch.equal(one.sampleable_rows(), other.sampleable_rows())
    assert one.agent_steps == other.agent_steps


@pytest.fixture
def stored(tmp_path):
    """An oracle whose replay was stored in three segments."""
    oracle, segments = new_oracle(), SegmentStore(tmp_path)
    marks = oracle.replay.marks
    for _ in range(3):
        play(oracle, 8)
        arrays, marks = oracle.replay.rows_since(marks)
        segments.append(arrays)
    return oracle, segments, tmp_path


@pytest.mark.parametrize("spec", [SPEC, VECTOR], ids=["pixels", "vector"])
@pytest.mark.parametrize("moves", [8, 40, 100], ids=["part", "full", "wrapped"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_loaded_buffer_samples_the_same_batches(tmp_path, spec, moves, frozen):
    oracle, segments = new_oracle(spec), SegmentStore(tmp_path)
    marks = oracle.replay.marks
    for _ in range(5):
        play(oracle, moves // 4)
        marks = segments.append_new(oracle.replay, marks)
    again, loaded = SegmentStore(tmp_path), new_replay(spec)
    again.restore(through_json(segments.records))
    again.load_into(loaded)
    if frozen:
        oracle.replay.freeze()
        loaded.freeze()
    assert_samples_alike(loaded, oracle.replay)
    oracle.replay = loaded
    oracle.check()


def through_json(records: tuple[SegmentRecord, ...]) -> list[SegmentRecord]:
    text = json.dumps([dataclasses.asdict(record) for record in records])
    return [SegmentRecord(**values) for values in json.loads(text)]


def test_records_survive_json(stored):
    _, segments, _ = stored
    assert tuple(through_json(segments.records)) == segments.records
    assert segments.rows == sum(record.rows for record in segments.records)


def test_a_buffer_goes_on_after_loading(stored):
    oracle, segments, folder = stored
    loaded = new_replay()
    segments.load_into(loaded)
    marks, oracle.replay = loaded.marks, loaded
    play(oracle, 60)
    oracle.check()
    segments.append_new(loaded, marks)
    once_more = new_replay()
    segments.load_into(once_more)
    assert_samples_alike(once_more, loaded)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rows-{i:06d}.safetensors" for i in (1, 2, 3, 4)
    ]


def test_other_n_step_and_discount_are_computed_from_the_same_rows(stored):
    oracle, segments, _ = stored
    oracle.replay = Replay(SPEC, 3, 60, n_step=1, discount=0.5)
    segments.load_into(oracle.replay)
    oracle.check()


def test_a_longer_n_step_than_the_settled_lanes_allow_is_loaded_all_the_same(tmp_path):
    """A D_T does not depend on n: what was collected for 3 steps serves 20."""
    few = new_oracle(VECTOR)
    play(few, 200)
    assert few.replay.ring[1]  # the lanes have settled
    segments = SegmentStore(tmp_path)
    segments.append_new(few.replay, np.zeros(3, dtype=np.int64))
    longer = Replay(VECTOR, 3, 60, n_step=40, discount=0.9)
    segments.load_into(longer)
    assert longer.can_sample()


def test_old_segments_are_never_rewritten(stored):
    oracle, segments, folder = stored
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    play(oracle, 5)
    segments.append_new(oracle.replay, np.array(segments.records[-1].ends))
    for name, (changed, data) in before.items():
        path = folder / name
        assert (path.stat().st_mtime_ns, path.read_bytes()) == (changed, data)


def test_segments_are_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SEGMENT_ROWS", 10)
    oracle, segments = new_oracle(), SegmentStore(tmp_path)
    play(oracle, 20)
    marks = segments.append_new(oracle.replay, np.zeros(3, dtype=np.int64))
    assert marks.tolist() == oracle.replay.marks.tolist()
    assert max(record.rows for record in segments.records) == 9  # three for each lane
    assert segments.rows == oracle.replay.rows
    loaded = new_replay()
    segments.load_into(loaded)
    assert_samples_alike(loaded, oracle.replay)


def test_restore_drops_what_the_checkpoint_does_not_know(stored):
    _, segments, folder = stored
    (folder / "manifest.json").write_text("{}")
    (folder / ".rows-000009.safetensors.abc").write_text("half")
    known = segments.records[:2]
    again = SegmentStore(folder)
    again.restore(known)
    assert again.records == known
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "rows-000001.safetensors",
        "rows-000002.safetensors",
    ]


def test_segments_of_overwritten_rows_are_discarded(stored):
    oracle, segments, folder = stored
    marks = np.array(segments.records[-1].ends)
    for _ in range(6):
        play(oracle, 10)
        marks = segments.append_new(oracle.replay, marks)
    segments.discard_before(oracle.replay.oldest)
    kept = segments.records
    assert 0 < len(kept) < 9
    assert kept[0].file != "rows-000001.safetensors"
    assert (folder / "rows-000001.safetensors").exists()  # until the new list is on disk
    segments.sweep()
    assert sorted(path.name for path in folder.iterdir()) == [record.file for record in kept]
    loaded = new_replay()
    segments.load_into(loaded)
    assert_samples_alike(loaded, oracle.replay)
    oracle.replay = loaded
    play(oracle, 30)
    oracle.check()


def test_names_of_discarded_segments_are_not_used_again(stored):
    """The list on disk may still name them, so they must keep what they hold until it is replaced."""
    oracle, segments, folder = stored
    before = (folder / "rows-000001.safetensors").read_bytes()
    marks = np.array(segments.records[-1].ends)
    segments.discard_before(marks)
    assert segments.records == ()
    play(oracle, 3)
    segments.append_new(oracle.replay, marks)
    assert [record.file for record in segments.records] == ["rows-000004.safetensors"]
    assert (folder / "rows-000001.safetensors").read_bytes() == before


def test_a_reader_deletes_nothing(stored):
    _, segments, folder = stored
    names = sorted(os.listdir(folder))
    loaded = new_replay()
    SegmentStore(folder, segments.records[:1]).load_into(loaded)
    assert loaded.rows == segments.records[0].rows
    assert sorted(os.listdir(folder)) == names


def test_a_write_that_fails_leaves_the_store_as_it_was(stored, monkeypatch):
    oracle, segments, folder = stored
    before, names = segments.records, sorted(os.listdir(folder))

    def full(source, target):
        raise OSError(28, "No space left on device")

    play(oracle, 3)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        UserError, match=r"cannot write .*rows-000004.safetensors \(No space left on device\)"
    ):
        segments.append_new(oracle.replay, np.array(before[-1].ends))
    assert segments.records == before
    assert sorted(os.listdir(folder)) == names


def test_a_segment_is_on_disk_before_it_counts(stored, monkeypatch):
    oracle, segments, folder = stored
    calls = []
    flush, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("flush"), flush(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("rename"), rename(*names)))
    play(oracle, 3)
    segments.append_new(oracle.replay, np.array(segments.records[-1].ends))
    assert calls == ["flush", "rename", "flush"]  # the data, the name, the folder
    assert (folder / segments.records[-1].file).stat().st_size == segments.records[-1].bytes


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, r"rows-000002\.safetensors cannot be read \(No such file or directory\); put back"),
        (truncate, r"rows-000002\.safetensors has \d+ bytes instead of \d+; put back"),
        (flip_a_bit, r"rows-000002\.safetensors was altered after it was written \(sha256 differs\)"),
    ],
)
def test_damage_is_one_clear_line(stored, damage, message):
    _, segments, folder = stored
    damage(folder / "rows-000002.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        segments.load_into(new_replay())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "num_envs", "message"),
    [
        (SPEC, 2, "3 environments, not 2"),
        (VECTOR, 3, "frames of uint8"),
        (dataclasses.replace(SPEC, obs_shape=(4, 3, 2)), 3, r"shape \(21, 3, 2\), got \(21, 2, 3\)"),
        (dataclasses.replace(SPEC, num_actions=1), 3, r"teacher outputs must have shape \(21, 1\)"),
    ],
)
def test_rows_of_another_kind_of_environment_are_refused(stored, spec, num_envs, message):
    _, segments, folder = stored
    path = folder / "rows-000001.safetensors"
    with pytest.raises(UserError, match=message) as caught:
        segments.load_into(new_replay(spec, num_envs))
    assert str(caught.value).startswith(f"{path} does not fit this buffer")


def record_of(path: Path, **changes) -> SegmentRecord:
    data = path.read_bytes()
    values = {"file": path.name, "sha256": hashlib.sha256(data).hexdigest(), "rows": 1, "bytes": len(data)}
    return SegmentRecord(**(values | {"ends": (1,), "ring": (60, 0)} | changes))


def test_files_that_are_no_segments_are_refused(tmp_path):
    files.write_bytes(tmp_path / "rows-000001.safetensors", b"<html>not found</html>")
    files.write_bytes(tmp_path / "secret", b"x")
    segments = SegmentStore(tmp_path)
    segments.restore([record_of(tmp_path / "rows-000001.safetensors")])
    with pytest.raises(UserError, match="is no replay segment"):
        segments.load_into(new_replay())
    segments.restore([record_of(tmp_path / "secret", file="../secret")])
    with pytest.raises(UserError, match="is not the name of a replay segment"):
        segments.load_into(new_replay())


def test_a_segment_without_a_column_is_refused(stored):
    oracle, _, folder = stored
    arrays, _ = oracle.replay.rows_since(np.zeros(3, dtype=np.int64))
    del arrays["epsilon"]
    segments = SegmentStore(folder / "other")
    segments.append(arrays)
    with pytest.raises(UserError, match=r"does not fit this buffer \('epsilon'\)"):
        segments.load_into(new_replay())


def test_an_empty_store_loads_nothing(tmp_path):
    segments, replay = SegmentStore(tmp_path / "not yet"), new_replay()
    segments.restore([])
    segments.load_into(replay)
    assert replay.rows == 0
    assert not (tmp_path / "not yet").exists()
