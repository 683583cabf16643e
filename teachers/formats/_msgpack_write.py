"""flax's msgpack, written without JAX or flax: what ``flax.serialization.to_bytes`` gives for the same tree.

Lists become maps with the keys "0", "1", ...; an array is extension 1 holding (shape, dtype name, bytes in
C order). flax cuts arrays above 1 GiB into chunks; no network that is written here comes near.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

_NDARRAY = 1
_CHUNKED_ABOVE_BYTES = 2**30


def to_bytes(tree: Any) -> bytes:
    """Nested dicts and lists whose leaves are numpy arrays and plain values, as flax writes them.

    Raises:
        ValueError: an array above 1 GiB.
        TypeError: a leaf of another kind.
    """
    return bytes(msgpack.packb(_as_maps(tree), default=_extension, strict_types=True))


def _as_maps(tree: Any) -> Any:
    if isinstance(tree, list):
        return {str(index): _as_maps(value) for index, value in enumerate(tree)}
    if isinstance(tree, dict):
        return {key: _as_maps(value) for key, value in tree.items()}
    return tree


def _extension(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot write a {type(value).__name__}")
    if value.nbytes > _CHUNKED_ABOVE_BYTES:
        raise ValueError(f"an array of {value.nbytes} bytes must be written in chunks")
    content = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    return msgpack.ExtType(_NDARRAY, msgpack.packb((list(value.shape), value.dtype.name, content)))
