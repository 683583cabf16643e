"""The ring against an oracle that keeps everything, with frames in memory, on disk and compressed."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.replay import Replay, memory, store, table
from reincarnate.replay.store import SegmentStore

from replay_oracle import Oracle, assert_same, make_oracle, play, worlds

NEEDS_LZ4 = pytest.mark.skipif(importlib.util.find_spec("lz4") is None, reason="lz4 is not installed")


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
