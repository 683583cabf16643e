"""Batches from the host: the same draws as from the device, and copies that never overtake each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from test_replay_sampling import Census

from reincarnate.replay import Replay, Sampler, feed
from reincarnate.replay.feed import DirectFeed, HostFeed, make_feed
from reincarnate.types import Batch, EnvSpec

from replay_oracle import Lane, Odds, Oracle, assert_same

SPEC = EnvSpec("Breakout-v5", "atari", num_actions=3, obs_shape=(4, 2, 3))
CPU = torch.device("cpu")
B, UPDATES = 5, 40


def filled(**storage) -> Replay:
    replay = Replay(SPEC, 3, 90, n_step=3, discount=0.9, **storage)
    oracle = Oracle(replay, 30 + 4 + 7, [Lane(SPEC, random.Random(i), Odds()) for i in range(3)])
    for _ in range(60):
        oracle.add([2, 0, 1])
    return replay


@pytest.fixture(scope="module")
def replay() -> Replay:
    return filled()


def copy_of(batch: Batch) -> Batch:
    return Batch(**{name: value.clone() for name, value in vars(batch).items()})


def direct_batches(replay: Replay, count: int, seed: int = 3) -> list[Batch]:
    direct = DirectFeed(replay, B, Sampler(CPU, seed))
    return [direct.batch() for _ in range(count)]


# ---------------------------------------------------------------- queues that are as late as they may be


@dataclass
class LateEvent:
    queue: LateQueue
    position: int

    def synchronize(self) -> None:
        self.queue.execute(self.position)


@dataclass
class LateQueue:
    """Executes nothing before somebody waits for it: what reads memory too early or too late is found out."""

    broken: frozenset[str] = frozenset()
    work: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    def run(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def record(self) -> LateEvent:
        return LateEvent(self, len(self.work))

    def wait(self, event: LateEvent) -> None:
        if "wait" not in self.broken:
            self.work.append(event.synchronize)

    def execute(self, position: int) -> None:
        while self.done < position:
            self.done += 1  # first: two queues may wait for each other's past
            self.work[self.done - 1]()


class EagerQueue(LateQueue):
    """Executes at once, whatever the other queue has done: the other extreme of what a device may do."""

    def run(self, work: Callable[[], object]) -> None:
        super().run(work)
        self.execute(len(self.work))

    def wait(self, event: LateEvent) -> None:
        super().wait(event)
        self.execute(len(self.work))


def seen_by_learner(replay: Replay, learner: LateQueue, copies: LateQueue) -> list[Batch]:
    """What an update appended to the learner's queue reads, for each of the batches."""
    host, seen = HostFeed(replay, B, Sampler(CPU, 3), CPU, (learner, copies)), []
    host.expect(UPDATES)
    for _ in range(UPDATES):
        host.advance()
        batch = host.batch()
        learner.run(lambda batch=batch: seen.append(copy_of(batch)))
    learner.execute(len(learner.work))
    return seen


def correct(found: list[Batch], expected: list[Batch]) -> bool:
    return all(
        torch.equal(getattr(one, name), value)
        for one, other in zip(found, expected, strict=True)
        for name, value in vars(other).items()
    )


@pytest.mark.parametrize("learner", [LateQueue, EagerQueue])
@pytest.mark.parametrize("copies", [LateQueue, EagerQueue])
def test_every_update_reads_its_own_batch_however_late_the_device_is(replay, learner, copies):
    assert correct(seen_by_learner(replay, learner(), copies()), direct_batches(replay, UPDATES))


@pytest.mark.parametrize(
    ("learner", "copies"),
    [
        (LateQueue(frozenset({"wait"})), LateQueue()),  # the learner does not wait for the copy
        (LateQueue(), EagerQueue(frozenset({"wait"}))),  # the copy does not wait until its target was read
    ],
)
def test_a_missing_wait_is_noticed(replay, learner, copies):
    assert not correct(seen_by_learner(replay, learner, copies), direct_batches(replay, UPDATES))


def test_copies_wait_for_the_memory_that_they_write_to(replay):
    """It is cleared on the device, in the learner's order: a late clearing would wipe the first batches."""
    learner, cleared = LateQueue(), []
    learner.run(lambda: cleared.append(True))
    copies = LateQueue()
    host = HostFeed(replay, B, Sampler(CPU, 3), CPU, (learner, copies))
    host.expect(1)
    host.advance()
    copies.execute(len(copies.work))
    assert cleared


def test_a_slot_is_not_filled_again_before_its_copy_is_over(replay, monkeypatch):
    monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)
    monkeypatch.setattr(
        LateQueue, "wait", lambda self, event: self.run(lambda: event.queue.execute(event.position))
    )
    assert not correct(seen_by_learner(replay, LateQueue(), LateQueue()), direct_batches(replay, UPDATES))


def test_the_learner_reads_fixed_addresses(replay):
    host = HostFeed(replay, B, Sampler(CPU, 3), CPU, (EagerQueue(), EagerQueue()))
    host.expect(10)
    addresses = set()
    for _ in range(10):
        host.advance()
        addresses.add(tuple(value.data_ptr() for value in vars(host.batch()).values()))
    assert len(addresses) == 1


def test_an_update_touches_nothing_on_the_host(replay):
    """On the meta device a host operand inside the update would be noted."""
    host = HostFeed(replay, B, Sampler(CPU, 3), torch.device("meta"))
    host.expect(3)
    for _ in range(3):
        host.advance()
        with Census("meta") as census:
            batch = host.batch()
            loss = (batch.obs.float().mean() + batch.reward * batch.discount).sum()
        assert not census.foreign
        assert loss.device.type == "meta"
    assert batch.obs.shape == batch.next_obs.shape == (B, 4, 2, 3)
    assert (batch.action.dtype, batch.obs.dtype) == (torch.int64, torch.uint8)


# ---------------------------------------------------------------- the same batches for one seed


@pytest.mark.parametrize("storage", [{}, {"compression": "zlib"}, {"frames_on_disk": True}])
def test_every_storage_gives_the_same_batches(storage, replay):
    host = HostFeed(filled(**storage), B, Sampler(CPU, 3), CPU)
    host.expect(20)
    for expected in direct_batches(replay, 20):
        host.advance()
        assert_same(copy_of(host.batch()), expected)


def test_a_changing_buffer_is_drawn_from_as_it_is(replay):
    """Bursts of updates between rows that are added: nothing is drawn before the rows are there."""
    pairs = []
    for make in (DirectFeed, lambda *a: HostFeed(*a, CPU)):
        buffer, found = filled(), []
        lanes = [Lane(SPEC, random.Random(9 + i), Odds()) for i in range(3)]
        oracle = Oracle(buffer, 41, lanes)
        source = make(buffer, B, Sampler(CPU, 1))
        for burst in (1, 3, 0, 2, 7):
            source.expect(burst)
            for _ in range(burst):
                source.advance()
                found.append(copy_of(source.batch()))
            oracle.add([0, 1, 2])
        pairs.append(found)
    for one, other in zip(*pairs, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("used", [0, 1, 4])
def test_what_was_drawn_in_advance_is_drawn_again_after_a_resume(replay, used):
    sampler = Sampler(CPU, 3)
    host = HostFeed(replay, B, sampler, CPU)
    host.expect(10)
    for _ in range(used):
        host.advance()
    resumed = Sampler(CPU, 99)
    resumed.set_state(sampler.get_state())
    again = HostFeed(replay, B, resumed, CPU)
    again.expect(10 - used)
    for expected in direct_batches(replay, 10)[used:]:
        again.advance()
        assert_same(copy_of(again.batch()), expected)
    assert torch.equal(resumed.get_state(), resumed.generator.get_state())  # nothing is left over


def test_more_than_was_announced_is_an_error(replay):
    host = HostFeed(replay, B, Sampler(CPU, 3), CPU)
    with pytest.raises(RuntimeError, match="before advance"):
        host.batch()
    host.expect(1)
    host.advance()
    with pytest.raises(RuntimeError, match="beyond what"):
        host.advance()


def test_an_error_while_gathering_reaches_the_learner(replay, monkeypatch):
    def fail(rows, out=None):
        raise OSError("the disk is gone")

    broken = filled()
    monkeypatch.setattr(broken, "gather", fail)
    host = HostFeed(broken, B, Sampler(CPU, 3), CPU)
    host.expect(2)
    with pytest.raises(OSError, match="the disk is gone"):
        host.advance()


def test_the_feed_fits_the_storage(replay):
    assert isinstance(make_feed(replay, B, Sampler(CPU, 0), CPU), DirectFeed)
    assert isinstance(make_feed(filled(compression="zlib"), B, Sampler(CPU, 0), CPU), HostFeed)
    assert isinstance(make_feed(replay, B, Sampler(CPU, 0), torch.device("meta")), HostFeed)


def test_fields_of_a_packed_batch_do_not_overlap():
    layout = feed._Layout.of(SPEC, 3)
    packed = layout.batch(torch.zeros(layout.size_bytes, dtype=torch.uint8))
    for number, value in enumerate(vars(packed.batch).values(), start=1):
        value.fill_(number)
    for number, value in enumerate(vars(packed.batch).values(), start=1):
        assert np.all(value.numpy() == number)


@pytest.mark.cuda
@pytest.mark.parametrize("late", [False, True])
def test_batches_on_cuda_equal_those_of_the_host(replay, late):
    """Also where the device has not yet done what came before."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if late:
        torch.cuda._sleep(100_000_000)
    host = make_feed(replay, B, Sampler(CPU, 3), torch.device("cuda"))
    host.expect(UPDATES)
    for expected in direct_batches(replay, UPDATES):
        host.advance()
        found = {name: value.cpu() for name, value in vars(host.batch()).items()}
        assert_same(Batch(**found), expected)
