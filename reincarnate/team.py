"""The torchrun side of :mod:`reincarnate.ranks`; only this file knows torch.distributed.

Ranks meet in two ways: *in step*, at every update and vector step, by plain collectives; and *patiently*,
where one may be minutes ahead of the others (evaluations, the collection of D_T, checkpoints), by looking
into the launcher's store. A rank that waits patiently still hears signals and notices that another one has
failed; no timeout of a collective runs meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from reincarnate.device import beside_capture, has_cuda
from reincarnate.errors import UserError
from reincarnate.ranks import ALONE, Ranks, gradients_averaged_by, launched

T = TypeVar("T")
#: Once asked to stop, a rank waits so long for one that does not come; torchrun kills after 30 s.
PATIENCE_SECONDS = 25.0
#: A rank that plays or collects alone asks so often whether another one was told to stop.
ASK_SECONDS = 0.5
#: Ranks agree on stopping and saving about so often.
AGREE_SECONDS = 0.2
_TIMEOUT = datetime.timedelta(minutes=30)  # of a collective in step: all ranks come within moments
_SHORTEST_NAP, _LONGEST_NAP = 0.001, 0.1
_FAILED, _STOP = "failed", "stop"
_connections = 0  # teams that this process has been in: each has names of its own in the store


class PeerEnded(UserError):
    """Another rank is gone, so this one cannot go on; its own message says why."""


@contextlib.contextmanager
def connect() -> Iterator[Ranks]:
    """The ranks of this process's run: all that torchrun started, or :data:`ALONE`.

    A rank that leaves it by an exception takes the others with it.

    Raises:
        UserError: the other ranks cannot be reached.
    """
    if not launched():
        yield ALONE
        return
    team = _join()
    try:
        yield team
        team.meet()  # nobody leaves while another still needs it
    except BaseException:
        team.tell_failed()
        team.close(failed=True)
        raise
    team.close(failed=False)


def _join() -> Team:
    global _connections
    if dist.is_initialized():
        raise UserError("torch.distributed is in use in this process already; let reincarnate set it up")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        value = os.environ.get(name, "1")
        if not value.isdecimal():
            raise UserError(f"{name}={value!r} is no number; start with torchrun, or unset WORLD_SIZE")
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _connections += 1
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
        named = PrefixStore(f"reincarnate{_connections}", store)
        backend = "cpu:gloo,cuda:nccl" if has_cuda() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=_TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"the other ranks cannot be reached: {_first_line(error)}") from None
    _share_cores(here)
    return Team(rank, size, local, here, named)


def _share_cores(processes: int) -> None:
    """Environments of one rank leave the cores of the others alone, unless the user has said otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("REINCARNATE_CORES", str(max(1, cores // processes)))


class Team(Ranks):
    """One of several ranks."""

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int, store: Store) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self.device_index = local_rank
        self._store = store
        self._counts: dict[str, int] = {}  # of meetings so far
        self._averaged = False
        self._stop_requested: Callable[[], bool] = lambda: False
        self._runs = 0  # one after the other
        self._asked_at: float | None = None  # when this rank was first seen to have been asked to stop
        self._told, self._ask_again_at = False, 0.0
        self._votes = [False, False]
        self._calls_left, self._interval, self._agreed_at = 0, 1, time.monotonic()

    # ------------------------------------------------------------ in step

    @contextlib.contextmanager
    def averaging(self) -> Iterator[None]:
        """See :meth:`Ranks.averaging`.

        Raises:
            UserError: nothing was averaged: each rank would train a student of its own.
        """
        self._averaged = False
        with gradients_averaged_by(self._average):
            yield
        if not self._averaged:
            raise UserError(
                "this student does not share its gradients, so it cannot train on several ranks (its "
                "update() has to call reincarnate.ranks.average_gradients); run it without torchrun"
            )

    def _average(self, gradients: list[Tensor]) -> None:
        """Replace ``gradients`` by their means over ranks, by one collective.

        On CUDA everything but the collective is captured with the update. The collective is not: it is
        called on the host between two graphs, in the order of the stream, so that a rank that is gone is an
        error and not a graph that never ends.
        """
        flat = torch.cat([each.reshape(-1) for each in gradients])
        beside_capture(lambda: _reduce(flat, dist.ReduceOp.SUM))
        flat.div_(self.size)
        parts = torch.split(flat, [each.numel() for each in gradients])
        means = [part.view(each.shape) for part, each in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(gradients, means)
        self._averaged = True

    def all(self, flag: bool) -> bool:
        """See :meth:`Ranks.all`."""
        vote = torch.tensor([int(flag)])
        _reduce(vote, dist.ReduceOp.MIN)
        return bool(vote)

    def agree(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """See :meth:`Ranks.agree`; most calls only count, and what is asked then waits for the next round."""
        self._votes = [self._votes[0] or stop, self._votes[1] or (save and self.first)]
        self._calls_left -= 1
        if self._calls_left > 0:
            return False, False
        votes = torch.tensor([*map(int, self._votes), self._next_interval() if self.first else 0])
        _reduce(votes, dist.ReduceOp.MAX)
        self._votes = [False, False]
        stop_now, save_now, self._interval = votes.tolist()
        self._calls_left = self._interval
        return bool(stop_now), bool(save_now)

    def _next_interval(self) -> int:
        """Calls in :data:`AGREE_SECONDS`, as it went since the last time; rank 0 sets it for all."""
        now = time.monotonic()
        per_call = max(now - self._agreed_at, 1e-6) / self._interval
        self._agreed_at = now
        return max(1, min(int(AGREE_SECONDS / per_call), 2 * self._interval))

    def gather_rows(self, row: Sequence[float], width: int) -> list[list[float]]:
        """See :meth:`Ranks.gather_rows`."""
        mine = torch.zeros(1 + width, dtype=torch.float64)
        mine[: 1 + len(row)] = torch.tensor([len(row), *row], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with _peers():
            dist.all_gather(found, mine)
        return [each[1 : 1 + int(each[0])].tolist() for each in found]

    # ------------------------------------------------------------ patiently

    def gather(self, value: T) -> list[T]:
        """See :meth:`Ranks.gather`."""
        self.meet()
        found: list[Any] = [None] * self.size
        with _peers():
            dist.all_gather_object(found, value)
        return found

    def meet(self) -> None:
        """See :meth:`Ranks.meet`.

        Raises:
            PeerEnded: a rank has failed, or does not come though all were asked to stop.
        """
        key = self._key("meeting")
        with _peers():
            self._store.add(key, 1)
            self._wait(lambda: self._store.add(key, 0) == self.size)

    def lead(self, work: Callable[[], T]) -> T:
        """See :meth:`Ranks.lead`."""
        key = self._key("lead")
        if self.first:
            result = work()
            self._store.set(key, pickle.dumps(result).hex())
            return result
        with _peers():
            self._wait(lambda: self._store.check([key]))
            found: T = pickle.loads(bytes.fromhex(self._store.get(key).decode()))
        return found

    def from_first(self, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """See :meth:`Ranks.from_first`."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        sent = [buffer.getvalue() if self.first else b""]
        self.meet()
        with _peers():
            dist.broadcast_object_list(sent, src=0)
        found: dict[str, Any] = torch.load(io.BytesIO(sent[0]), map_location=device, weights_only=True)
        return found

    def watch(self, stop_requested: Callable[[], bool]) -> None:
        """See :meth:`Ranks.watch`."""
        self._stop_requested = stop_requested
        self._runs += 1
        # What was said, asked and voted in the run before is not meant for this one.
        self._told, self._asked_at, self._votes = False, None, [False, False]

    def told_to_stop(self) -> bool:
        """See :meth:`Ranks.told_to_stop`; asks the store every :data:`ASK_SECONDS`."""
        now = time.monotonic()
        if not self._told and now >= self._ask_again_at:
            self._ask_again_at = now + ASK_SECONDS
            with _peers():
                self._told = self._store.check([self._stop_key])
        return self._told

    def tell_stop(self) -> None:
        """See :meth:`Ranks.tell_stop`."""
        with _peers():
            self._store.set(self._stop_key, "1")

    def tell_failed(self) -> None:
        """Whoever waits patiently for this rank waits no more."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILED, "1")

    def close(self, failed: bool) -> None:
        """Leave the group; one of CUDA devices is left to the end of the process if work may hang in it."""
        if not (failed and has_cuda()):
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    @property
    def _stop_key(self) -> str:
        return f"{_STOP}{self._runs}"

    def _key(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}{self._counts[kind]}"

    def _wait(self, over: Callable[[], bool]) -> None:
        nap = _SHORTEST_NAP
        while True:
            failed = self._store.check([_FAILED])  # first: a rank may come, and fail afterwards
            if over():
                return
            if failed:
                raise PeerEnded(f"rank {self.rank} ends because another rank did, which says why")
            self._hear()
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _hear(self) -> None:
        """Tell the others if this rank was asked to stop; who does not come then is not waited for long."""
        if not self._stop_requested():
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._store.set(self._stop_key, "1")
        if now - self._asked_at > PATIENCE_SECONDS:
            raise PeerEnded(f"rank {self.rank} ends: another rank does not answer; resume the run")


def _reduce(tensor: Tensor, operation: Any) -> None:
    with _peers():
        dist.all_reduce(tensor, operation)


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """A collective or store that fails does so because a rank, or the launcher, is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerEnded(
            f"another rank of this run is gone; resume the run with as many ranks ({_first_line(error)})"
        ) from None


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\] ", "", line)[:200]  # without the place in the library's source
