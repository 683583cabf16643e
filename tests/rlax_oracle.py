"""rlax in float64, for the tests that use it as an oracle; skipped where it is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest


@contextlib.contextmanager
def float64() -> Iterator[Any]:
    """The rlax module, with jax in float64 inside the block alone."""
    rlax = pytest.importorskip("rlax", reason="rlax is not installed (extra: rlax)")
    import jax

    with jax.enable_x64(True):
        yield rlax


def batched(function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    """``function`` of single examples over the first axis of arrays, whose dtypes are kept."""
    import jax

    return np.asarray(jax.vmap(function)(*arrays))
