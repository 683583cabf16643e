"""Memory that the host writes and the device reads; on the CPU both see the same bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from reincarnate.replay.rows import Array, numpy_dtype, on_host


def shares_memory(device: torch.device) -> bool:
    """Whether numpy and tensors of ``device`` can be two views of the same bytes."""
    return device.type == "cpu"


class Table:
    """Zeros [rows, *shape] on a device; ``tensor`` is never replaced, so a captured graph may read it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._array: Array | None = None
        if shares_memory(device):
            # numpy asks the system for zeroed pages: those never written take no memory.
            self._array = np.zeros(shape, dtype=numpy_dtype(dtype))
            self.tensor = torch.from_numpy(self._array)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    def place(self, rows: Array) -> Array | Tensor:
        """``rows`` [n] where :meth:`write` needs them: sent to the device once for several writes."""
        return rows if self._array is not None else _to(rows, self.tensor)

    def write(self, rows: Array | Tensor, values: Array | Tensor, columns: slice | None = None) -> None:
        """Overwrite ``rows`` [n] int64, distinct, or only these columns of them."""
        if self._array is not None:
            array = self._array if columns is None else self._array[:, columns]
            array[on_host(rows)] = on_host(values)
        else:
            tensor = self.tensor if columns is None else self.tensor[:, columns]
            tensor[_to(rows, tensor)] = _to(values, tensor).to(tensor.dtype)

    def take(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of ``rows`` [n] int64 on the device, in ``out`` [n, *shape] if that is given.

        On the CPU by numpy, which copies in one thread: torch would share out 2 MB among all threads, and
        where environments run on these the wait for the last one costs many times the copy.
        """
        if self._array is None:
            return torch.index_select(self.tensor, 0, rows, out=out)
        if out is None:
            return torch.from_numpy(self._array.take(rows.numpy(), axis=0))
        # Any mode but "raise", whose output would be buffered; the indices are right.
        self._array.take(rows.numpy(), axis=0, out=out.numpy(), mode="clip")
        return out

    def read(self, rows: Array) -> Array:
        """A host copy of ``rows`` [n] int64."""
        if self._array is not None:
            return self._array[rows]
        return on_host(self.tensor.index_select(0, _to(rows, self.tensor)))


class Mirror:
    """``tensor``: what draws read of an array that the host keeps; the array itself on the CPU."""

    def __init__(self, array: Array, device: torch.device) -> None:
        self._array, self._shared = array, shares_memory(device)
        tensor = torch.from_numpy(array)
        self.tensor = tensor if self._shared else tensor.to(device, copy=True)

    def update(self, rows: Array | slice) -> None:
        """Bring these rows of the array to the device."""
        if not self._shared:
            where = rows if isinstance(rows, slice) else _to(rows, self.tensor)
            self.tensor[where] = _to(self._array[rows], self.tensor)


def _to(values: Array | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(values).to(like.device)
