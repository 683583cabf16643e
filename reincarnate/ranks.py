"""What a process knows of the others that train the same student; alone, it is the only one.

All ranks run the same program, as torchrun starts them. They meet *in step*, at every update and vector
step, or *patiently*, where one may be minutes ahead of the others. How several do is :mod:`reincarnate.team`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from reincarnate.errors import UserError

T = TypeVar("T")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """A process that trains alone: it shares nothing, and nothing here costs anything."""

    rank = 0
    size = 1
    local_size = 1  # ranks on this machine
    device_index: int | None = None  # of the CUDA device that is this rank's; None: the usual one

    @property
    def first(self) -> bool:
        """Whether this rank writes the run directory, logs and prints."""
        return self.rank == 0

    def averaging(self) -> contextlib.AbstractContextManager[None]:
        """Inside, :func:`average_gradients` averages over ranks; it does nothing anywhere else."""
        return _NOTHING

    def all(self, flag: bool) -> bool:
        """Whether all ranks say so; in step."""
        return flag

    def agree(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Whether all stop now (one was asked to) and whether all save now (rank 0 says so); in step."""
        return stop, save

    def gather_rows(self, row: Sequence[float], width: int) -> list[list[float]]:
        """Every rank's row of at most ``width`` numbers, by rank; in step."""
        return [list(row)]

    def gather(self, value: T) -> list[T]:
        """Every rank's value (it is pickled), by rank; patiently."""
        return [value]

    def meet(self) -> None:
        """Wait until all are here; patiently."""

    def lead(self, work: Callable[[], T]) -> T:
        """What rank 0 gets from ``work``, which it alone does; its failure ends all; patiently."""
        return work()

    def from_first(self, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Rank 0's ``state`` (nested tensors and plain numbers), on ``device``; patiently."""
        return state

    def watch(self, stop_requested: Callable[[], bool]) -> None:
        """Ask ``stop_requested`` while waiting."""

    def told_to_stop(self) -> bool:
        """Whether another rank was asked to stop; for work that ranks do each at its own pace."""
        return False

    def tell_stop(self) -> None:
        """Tell those that ask :meth:`told_to_stop`."""


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
ALONE = Ranks()
_average: Callable[[list[Tensor]], None] | None = None  # what averages gradients just now


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each gradient by its mean over ranks; a student calls it between ``backward()`` and its step.

    Before gradients are clipped, so that K ranks do what one would with a batch K times as large. It does
    nothing in a run of one process, and in an update that is only tried.
    """
    if _average is not None:
        _average([each.grad for each in parameters if each.grad is not None])


@contextlib.contextmanager
def gradients_averaged_by(average: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Inside, :func:`average_gradients` has ``average`` replace the gradients by their means over ranks."""
    global _average
    _average = average
    try:
        yield
    finally:
        _average = None


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of their bytes: equal on all ranks whose students are equal to the last bit."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    size = os.environ.get("WORLD_SIZE", "")
    return all(name in os.environ for name in _VARIABLES) and size.isdecimal() and int(size) > 1


def refuse_several(what: str) -> None:
    """Refuse to do in each of several processes what is meant for one; ``what``: e.g. ``a comparison``.

    Raises:
        UserError: torchrun started this process as one of several.
    """
    if launched():
        size = os.environ["WORLD_SIZE"]
        raise UserError(
            f"{what} cannot run as {size} processes (WORLD_SIZE={size}), only `reincarnate run` can; "
            "start it without torchrun"
        )
