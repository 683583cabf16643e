"""Reading a pickle as data: arrays are built, everything else becomes an inert record, nothing is imported.

Some checkpoints keep numbers in a pickle (running statistics, JAX parameters). Python's own unpickler runs
here with no way to a real class or function: every name in the file is looked up in a table of this module
(numpy's arrays, dtypes and scalars, plain containers) or, where its package is one that such files are
known to mention, stands for itself as a :class:`Record`. Any other name refuses the file.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from reincarnate.errors import UserError
from reincarnate.teachers.formats._text import reason

#: Packages whose objects may occur in a file; they are never imported from here, only recorded by name.
INERT_PACKAGES = frozenset(
    {
        *(
            "gym",
            "gymnasium",
            "stable_baselines3",
            "sb3_contrib",
            "rl_zoo3",
            "utils",
            "torch",
            "numpy",
            "cloudpickle",
        ),
        *("flax", "jax", "jaxlib", "optax", "dopamine", "chex", "collections", "typing", "types", "enum"),
    }
)
_MAX_PICKLE_BYTES = 2 << 30
#: What calls may make in all: a few bytes of a file can ask for the same megabyte again and again.
_MADE_PER_BYTE, _MADE_FREE = 16, 1 << 20
_MAX_KEY_DEPTH = 4  # of tuples that are hashed: each level can double the work
_MAX_DIMENSIONS = 8
_PLAIN_TYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c(8|16)|[SU]\d{1,6})")  # no objects


class Record:
    """An object of the file that is not rebuilt: its class's name, arguments, state and items."""

    module = name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.state: Any = None
        self.items: list[Any] = []

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        """NEWOBJ calls this alone, so everything is set here."""
        self = super().__new__(cls)
        Record.__init__(self, *args, **kwargs)
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """An item of a list."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """Items of a list."""
        self.items.extend(values)

    def field(self, name: str) -> Any:
        """An attribute in the recorded state; None where there is none."""
        state = (
            self.state[0] or self.state[1]
            if isinstance(self.state, tuple) and len(self.state) == 2
            else self.state
        )
        return state.get(name) if isinstance(state, dict) else None


class _Damaged(Exception):
    """The pickle contradicts itself; the text says how."""


class _DType:
    """A numpy dtype while it is being read."""

    def __init__(self, text: Any, *_: Any) -> None:
        if not isinstance(text, str) or not _PLAIN_TYPE.fullmatch(text):
            raise _Damaged(f"an array of type {str(text)[:40]!r}")
        self.dtype: np.dtype[Any] = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """A numpy array while it is being read: made empty, then given its state."""

    def __init__(self, *_: Any) -> None:
        self.value: npt.NDArray[Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 4:
            raise _Damaged("an array without its state")
        shape, dtype, fortran, content = state[-4:]
        self.value = _array(content, dtype, shape, bool(fortran))


def _array(content: Any, dtype: Any, shape: Any, fortran: bool) -> npt.NDArray[Any]:
    if not isinstance(dtype, _DType) or not isinstance(content, (bytes, bytearray, memoryview)):
        raise _Damaged("an array of objects")
    sizes = shape if isinstance(shape, tuple) else (shape,)
    if len(sizes) > _MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in sizes):
        raise _Damaged(f"an array of shape {str(shape)[:60]}")
    if math.prod(sizes) * dtype.dtype.itemsize != len(content):
        raise _Damaged(f"an array of shape {sizes} and type {dtype.dtype} in {len(content)} bytes")
    flat = np.frombuffer(content, dtype.dtype)  # a view: the same content may be named again and again
    return flat.reshape(sizes, order="F" if fortran else "C")


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> npt.NDArray[Any]:
    return _array(content, dtype, shape, order == "F")


def _scalar(dtype: Any, content: Any = None) -> Any:
    return _array(content, dtype, (), False)[()]


def _jax_array(maker: Any, _: Any, state: Any, *rest: Any) -> _Array:
    """How JAX spells an array: the three parts of numpy's own pickle, and a note on its type."""
    if maker is not _Array:
        raise _Damaged("a JAX array that is none")
    array = _Array()
    array.__setstate__(state)
    return array


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocols 0 to 2 spell bytes."""
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise _Damaged(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _object_of(cls: Any, *_: Any) -> Any:
    """How protocols 0 and 1 make an object: its class, and nothing of its base."""
    if not (isinstance(cls, type) and issubclass(cls, Record)):
        raise _Damaged("an object of a class that is none")
    return cls()


def _bytes(content: Any = b"", encoding: Any = "latin1") -> bytes:
    """Bytes of bytes, of small integers, of text; a number would mean so many zeros."""
    if isinstance(content, str):
        return _encode(content, encoding)
    if not isinstance(content, (bytes, bytearray, list, tuple)):
        raise _Damaged("bytes of something that holds none")
    return bytes(content)


def _container(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    """A plain container's own maker, for parts that are quick to hash."""

    def make(parts: Any = ()) -> Any:
        if not isinstance(parts, (list, tuple, dict, set, frozenset)):
            raise _Damaged("a container of something that has no parts")
        if kind is dict and not isinstance(parts, dict):
            return {_hashable(key): value for key, value in parts}
        return kind(parts if kind in (list, tuple, dict) else [_hashable(part) for part in parts])

    return make


_BUILTINS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: _container(kind) for kind in (dict, list, tuple, set, frozenset)},
    "bytes": _bytes,
    "bytearray": _bytes,
    "slice": Record,
    "object": Record,
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _object_of,
    "copy_reg._reconstructor": _object_of,
    "collections.OrderedDict": _container(dict),
    **{
        f"{builtins}.{name}": maker
        for builtins in ("builtins", "__builtin__")
        for name, maker in _BUILTINS.items()
    },
    "numpy.dtype": _DType,
    "numpy.ndarray": _Array,
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    "jax._src.array._reconstruct_array": _jax_array,  # since 0.4
    "jax._src.device_array.reconstruct_device_array": _jax_array,  # 0.3; before, as numpy's
}


def _hashable(key: Any, depth: int = 0) -> Any:
    """A key that takes little time and stack to hash."""
    if isinstance(key, tuple):
        if depth == _MAX_KEY_DEPTH or len(key) > 64:
            raise _Damaged("tuples in tuples as a key")
        for part in key:
            _hashable(part, depth + 1)
    return key


def _checked(check: Callable[[list[Any]], None], opcode: bytes) -> dict[int, Callable[[Any], None]]:
    """An operation of the unpickler that looks at its stack first."""
    operation: Callable[[Any], None] = pickle._Unpickler.dispatch[opcode[0]]

    def checked(unpickler: Any) -> None:
        check(unpickler.stack)
        operation(unpickler)

    return {opcode[0]: checked}


def _check_target(stack: list[Any]) -> None:
    if not isinstance(stack[-2], (Record, _Array, _DType)):
        raise _Damaged("a state for something that has none")


def _check_key(stack: list[Any]) -> None:
    _hashable(stack[-2])


def _check_keys(stack: list[Any]) -> None:
    for key in stack[::2]:
        _hashable(key)


def _check_members(stack: list[Any]) -> None:
    for member in stack:
        _hashable(member)


class _Unpickler(pickle._Unpickler):  # the Python one: bounded by its input, and it can be followed
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        **_checked(_check_target, pickle.BUILD),
        **_checked(_check_key, pickle.SETITEM),
        **_checked(_check_keys, pickle.SETITEMS),
        **_checked(_check_keys, pickle.DICT),
        **_checked(_check_members, pickle.ADDITEMS),
        **_checked(_check_members, pickle.FROZENSET),
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._names: dict[str, Any] = {}
        self._room = _MADE_PER_BYTE * len(data) + _MADE_FREE

    def find_class(self, module: str, name: str) -> Any:
        """A maker of this module or a class of records; nothing is ever imported."""
        full = f"{module}.{name}"
        if full not in self._names:
            self._names[full] = self._stand_in(full, module, name)
        return self._names[full]

    def _stand_in(self, full: str, module: str, name: str) -> Any:
        if full in _MAKERS:
            maker = _MAKERS[full]
            ours = isinstance(maker, type) and issubclass(maker, (Record, _Array, _DType))
            return maker if ours else self._metered(maker)
        if module.partition(".")[0] not in INERT_PACKAGES:
            raise UserError(f"it asks to import {full[:120]}, which no weights need")
        return type("Record", (Record,), {"module": module, "name": name})

    def _metered(self, maker: Callable[..., Any]) -> Callable[..., Any]:
        """The maker while there is room for what it makes; a fresh function, which a pickle may spoil."""

        def make(*args: Any) -> Any:
            made = maker(*args)
            self._room -= sys.getsizeof(made)
            if self._room < 0:
                raise _Damaged("it makes far more than it holds")
            return made

        return make

    def persistent_load(self, pid: Any) -> Any:
        """Nothing lies outside of the file."""
        raise _Damaged("a reference to something outside of the file")

    def get_extension(self, code: int) -> Any:
        """Nothing is registered."""
        raise _Damaged("an extension code")


def read_pickle(path: Path, data: bytes | None = None, *, most_bytes: int = _MAX_PICKLE_BYTES) -> Any:
    """The object in a pickle: plain containers, numpy arrays and :class:`Record`.

    Args:
        path: The file, for messages, and to be read if there is no ``data``.
        data: The pickle itself, where it is a part of the file.
        most_bytes: A larger file is refused; reading takes some 100 bytes of memory for each of its bytes.

    Raises:
        UserError: truncated, damaged, or it names something that no weights need; nothing was executed.
    """
    if data is None:
        if path.stat().st_size > most_bytes:
            raise UserError(f"{path} is not opened: a pickle of more than {most_bytes >> 20} MiB")
        data = path.read_bytes()
    try:
        _check_lengths(data)
        return _finished(_Unpickler(data).load(), {})
    except UserError as error:
        raise UserError(f"{path} is not opened: {error}") from None
    except Exception as error:  # a damaged pickle can fail anywhere
        raise UserError(f"{path} is truncated or damaged ({reason(error)}); download it again") from None


def _check_lengths(data: bytes) -> None:
    """Every opcode is whole and no longer than the file, before anything is built."""
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return
    raise _Damaged("it has no end")


def _finished(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Arrays and types in their final form, also within containers and records; shared parts stay shared.

    ``done`` holds what was finished by identity, with the original, which must live on or its id is reused.
    """
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, _DType):
        return value.dtype
    if not isinstance(value, (dict, list, tuple, Record)):
        return value
    if id(value) in done:
        return done[id(value)][1]
    done[id(value)] = value, value
    if isinstance(value, dict):
        for key in value:
            value[key] = _finished(value[key], done)
    elif isinstance(value, list):
        value[:] = [_finished(item, done) for item in value]
    elif isinstance(value, Record):
        value.args = _finished(value.args, done)
        value.state, value.items = _finished(value.state, done), _finished(value.items, done)
    else:
        done[id(value)] = value, tuple(_finished(item, done) for item in value)
    return done[id(value)][1]
