"""flax's msgpack without JAX or flax: nested dicts whose leaves are numpy arrays and plain values.

Written from the format that ``flax.serialization`` documents: extension 1 is an array (shape, dtype name,
bytes in C order), 2 a complex number, 3 a numpy scalar; an array above 1 GiB is a dict of flat chunks.
A reader never allocates more than a small multiple of the file: lengths are checked before they are believed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from reincarnate.errors import UserError
from reincarnate.teachers.formats._text import reason

_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_MAX_FILE_BYTES = 2 << 30
_MAX_ENTRIES = 4096  # of one map or list; checkpoints have dozens
_MAX_TEXT = 65_536  # bytes of one key or text value
_MAX_DIMENSIONS = 8
_DTYPES = (
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
# Leading bytes: a non-empty map, a non-empty list, text; and how long the longer ones' counts make them.
_MAPS = frozenset((*range(0x81, 0x90), 0xDE, 0xDF))
_LISTS = frozenset((*range(0x91, 0xA0), 0xDC, 0xDD))
_TEXTS = frozenset((*range(0xA1, 0xC0), 0xD9, 0xDA, 0xDB))
_LEAD_BYTES = {0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}


class _Damaged(Exception):
    """The bytes contradict the format; the text says where."""


def looks_like_msgpack(head: bytes) -> bool:
    """Whether a file opens with a map whose first key is text, or with a list of maps or lists."""
    lead = head[0] if head else 0
    inner = head[_LEAD_BYTES.get(lead, 1) :][:1]  # empty where the file is cut there
    if lead in _MAPS:
        return not inner or inner[0] in _TEXTS
    return lead in _LISTS and (not inner or inner[0] in _MAPS | _LISTS)


def read_tree(path: Path) -> Any:
    """The object in the file, arrays as numpy arrays (bfloat16 widened to float32).

    Raises:
        UserError: truncated, corrupted, or not flax's msgpack.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise UserError(f"{path} is not opened: more than {_MAX_FILE_BYTES >> 20} MiB of msgpack")
    data = path.read_bytes()
    try:
        tree = msgpack.unpackb(
            data,
            ext_hook=_extension,
            raw=False,
            strict_map_key=False,
            max_array_len=_MAX_ENTRIES,
            max_map_len=_MAX_ENTRIES,
            max_str_len=_MAX_TEXT,
            max_bin_len=len(data),
            max_ext_len=len(data),
        )
        return _join_chunks(tree)
    except (_Damaged, ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise UserError(
            f"{path} is not a complete flax msgpack file ({reason(error)}); download it again"
        ) from None


def _extension(code: int, data: bytes) -> Any:
    if code == _NDARRAY:
        return _array(data)
    if code == _SCALAR:
        return _array(data)[()]
    if code == _COMPLEX:
        real, imaginary = _short_list(data, 2)
        return complex(float(real), float(imaginary))
    raise _Damaged(f"unknown extension type {code}")


def _short_list(data: bytes, length: int) -> list[Any]:
    limits = {"max_array_len": max(length, _MAX_DIMENSIONS), "max_map_len": 0, "max_ext_len": 0}
    values = msgpack.unpackb(data, raw=False, **limits)
    if not isinstance(values, list) or len(values) != length:
        raise _Damaged(f"an extension that should hold {length} values does not")
    return values


def _array(data: bytes) -> npt.NDArray[Any]:
    shape, dtype, content = _short_list(data, 3)
    name = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
    if not isinstance(content, bytes) or name not in (*_DTYPES, "bfloat16"):
        raise _Damaged(f"an array of type {name!r}")
    stored = np.dtype("<u2") if name == "bfloat16" else np.dtype(name).newbyteorder("<")
    expected = math.prod(_sizes(shape)) * stored.itemsize
    if expected != len(content):
        raise _Damaged(
            f"an array of shape {shape} and type {name} needs {expected} bytes, has {len(content)}"
        )
    array = np.frombuffer(content, stored).reshape(shape)
    if name == "bfloat16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(stored.newbyteorder("="))


def _sizes(shape: Any) -> list[int]:
    """``shape`` if it is one: Python integers, so that their product cannot overflow."""
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise _Damaged(f"an array of shape {shape!r}")
    return shape


def _join_chunks(tree: Any) -> Any:
    """Put chunked arrays together, anywhere in the tree."""
    if isinstance(tree, list):
        return [_join_chunks(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if _CHUNKED not in tree:
        return {key: _join_chunks(value) for key, value in tree.items()}
    shape, chunks = _sizes(_as_list(tree.get("shape"))), _as_list(tree.get("chunks"))
    if not chunks or not all(isinstance(chunk, np.ndarray) and chunk.ndim == 1 for chunk in chunks):
        raise _Damaged("a chunked array without flat chunks")
    if len({chunk.dtype for chunk in chunks}) > 1 or sum(map(len, chunks)) != math.prod(shape):
        raise _Damaged(f"the chunks of an array of shape {shape} do not fill it")
    return np.concatenate(chunks).reshape(shape)


def _as_list(values: Any) -> list[Any]:
    """flax writes a sequence as ``{"0": ..., "1": ...}``."""
    if isinstance(values, list):
        return values
    if not isinstance(values, dict) or set(values) != {str(index) for index in range(len(values))}:
        raise _Damaged("a sequence without its indices")
    return [values[str(index)] for index in range(len(values))]
