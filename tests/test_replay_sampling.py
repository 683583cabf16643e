"""Draws are uniform and exact, cost few operators, and never make the host wait for the device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import scipy.stats
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reincarnate.replay import Replay, RowBatch, sampling, table
from reincarnate.types import EnvSpec

from replay_oracle import Lane, Odds, Oracle

SPEC = EnvSpec("Breakout-v5", "atari", num_actions=3, obs_shape=(4, 2, 3))


def uneven_oracle() -> Oracle:
    """Three lanes of very different fill, wrapped, with many invalid rows."""
    replay = Replay(SPEC, 3, 90, n_step=3, discount=0.9)
    lanes = [Lane(SPEC, random.Random(i), Odds()) for i in range(3)]
    oracle = Oracle(replay, 30 + 4 + 7, lanes)
    for _ in range(90):
        oracle.add([2, 0])
    for _ in range(12):
        oracle.add([1])
    return oracle


@pytest.mark.parametrize("frozen", [False, True])
def test_every_transition_is_equally_likely(frozen):
    oracle = uneven_oracle()
    oracle.check()
    counts = np.diff([0, *oracle.replay._summary.tensor[0].tolist()])
    assert counts.min() < counts.max() / 3
    if frozen:
        oracle.replay.freeze()
    draws = oracle.replay.draw(100_000, torch.Generator().manual_seed(1)).numpy()
    rows, found = np.unique(draws, return_counts=True)
    assert sorted(rows) == sorted(oracle.flat(i, t) for i, t, _ in oracle.valid())
    assert scipy.stats.chisquare(found).pvalue > 0.01


def test_consecutive_batches_differ_and_a_seed_repeats_them():
    replay = uneven_oracle().replay
    generator = torch.Generator().manual_seed(4)
    first, second = replay.draw(32, generator), replay.draw(32, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, replay.draw(32, torch.Generator().manual_seed(4)))


def test_draws_from_lanes_in_closed_form():
    """Counts 2, 0, 3; every place of every queue is reached, none else, also across the wrap."""
    T, N = 4, 3
    queue = torch.arange(T * N) * 10
    head, counts = torch.tensor([3, 0, 2]), torch.tensor([2, 0, 3])
    cumulative = counts.cumsum(0)
    summary = torch.stack((cumulative, head - cumulative + counts))
    draws = sampling.draw_from_lanes(500, torch.Generator().manual_seed(0), summary, queue, torch.tensor(T))
    slots = [(3, 0), (4, 0), (2, 2), (3, 2), (4, 2)]
    assert set(draws.tolist()) == {(slot % T * N + lane) * 10 for slot, lane in slots}


class Census(TorchDispatchMode):
    """Notes every operator, and tensor arguments that are not on the device under test."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.names, self.foreign = device, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        self.names.append(name)
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if any(t.device.type != self.device or (name == "index" and t.dtype == torch.bool) for t in tensors):
            self.foreign.append(name)
        return func(*args, **(kwargs or {}))


READS = {"_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique"}
VIEWS = {"view", "select", "slice", "unsqueeze", "expand", "t", "transpose", "unbind", "_unsafe_view"}


@pytest.mark.parametrize("frozen", [False, True])
def test_sampling_reads_nothing_and_is_cheap(frozen, monkeypatch):
    monkeypatch.setattr(table, "shares_memory", lambda device: False)  # the path of other devices
    replay = uneven_oracle().replay
    if frozen:
        replay.freeze()
    with Census("cpu") as census:
        replay.sample(32, torch.Generator().manual_seed(0))
    assert not READS & set(census.names)
    assert not census.foreign
    assert len([name for name in census.names if name not in VIEWS]) <= 22


def filled_on(device: str) -> Replay:
    """A buffer on a device, with actions, teacher outputs and log-probabilities that are there already."""
    replay = Replay(SPEC, 2, 40, n_step=3, discount=0.9, device=device)
    zeros, false = np.zeros(2, dtype=np.float32), np.zeros(2, dtype=np.bool_)
    for step in range(60):
        rows = RowBatch(
            frame=np.zeros((2, 2, 3), dtype=np.uint8),
            action=torch.full((2,), step % 3, device=device),
            reward=zeros,
            raw_reward=zeros,
            terminal=false,
            truncated=false,
            executed=~false,
            game_start=np.full(2, step == 0),
            teacher_outputs=torch.full((2, 3), step, device=device, dtype=torch.float32),
            behaviour_log_prob=torch.full((2,), step, device=device, dtype=torch.float32),
            epsilon=zeros,
        )
        replay.add(np.array([1, 0]), rows)
    return replay


@pytest.mark.parametrize("frozen", [False, True])
def test_meta_device_has_nothing_to_read(frozen):
    """A host read of a meta tensor raises; an operand left on the CPU is noted."""
    replay = filled_on("meta")
    if frozen:
        replay.freeze()
    with Census("meta") as census:
        batch = replay.sample(32, None)
    assert not census.foreign
    assert batch.obs.shape == batch.next_obs.shape == (32, 4, 2, 3)
    assert (batch.obs.dtype, batch.action.dtype) == (torch.uint8, torch.int64)
    assert batch.teacher_outputs.shape == (32, 3)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
def test_device_buffer_equals_the_host_buffer(device):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    there, here = filled_on(device), filled_on("cpu")
    assert torch.equal(there.sampleable_rows().cpu(), here.sampleable_rows())
    rows = here.sampleable_rows()
    found, expected = there.gather(rows.to(device)), here.gather(rows)
    for name, value in vars(expected).items():
        assert torch.equal(getattr(found, name).cpu(), value), name
