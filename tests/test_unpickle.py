"""Pickles read as data: arrays exact, everything else inert, nothing imported."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reincarnate.errors import UserError
from reincarnate.teachers.formats._unpickle import Record, read_pickle

from hostile_files import Planted

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_of_every_kind_come_back_exactly(tmp_path: Path, protocol: int) -> None:
    shared = np.arange(4.0)
    value = {
        "rows": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "big endian": np.arange(3, dtype=">f4"),
        "scalar": np.float64(3.5),
        "nested": (1, [np.int32(4), {"empty": np.zeros((0, 2))}], "text", b"bytes", True, None),
        "ordered": collections.OrderedDict(a=shared, b=shared),
    }
    path = tmp_path / "statistics.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    read = read_pickle(path)
    for name in ("rows", "columns", "big endian"):
        np.testing.assert_array_equal(read[name], value[name])
    assert read["scalar"] == 3.5
    one, (four, empty), *rest = read["nested"]
    assert (one, four, rest) == (1, 4, ["text", b"bytes", True, None])
    assert empty["empty"].shape == (0, 2)
    assert read["ordered"]["a"] is read["ordered"]["b"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bomb_is_named_and_does_not_go_off(tmp_path: Path, protocol: int) -> None:
    path, marker = tmp_path / "bomb.pkl", tmp_path / "exploded"
    path.write_bytes(pickle.dumps({"mean": np.zeros(2), "x": Planted(marker)}, protocol=protocol))
    with pytest.raises(UserError, match=r"bomb.pkl is not opened: it asks to import \w+\.system"):
        read_pickle(path)
    assert not marker.exists()


def test_objects_of_known_packages_are_records(tmp_path: Path) -> None:
    path = tmp_path / "random.pkl"
    path.write_bytes(pickle.dumps(np.random.RandomState(0)))
    read = read_pickle(path)
    assert isinstance(read, Record)
    assert (read.module, read.name) == ("numpy.random._pickle", "__randomstate_ctor")


def _copies(call: bytes) -> bytes:
    """A list of 100,000 Nones, copied 20,000 times by ``call``: 16 GB from 500 kB."""
    return b"\x80\x02(" + b"]q\x00(" + b"N" * 100_000 + b"e" + call * 20_000 + b"t."


def test_jax_arrays_are_arrays(tmp_path: Path) -> None:
    """JAX pickles a call with the three parts of numpy's own pickle and a note on the type."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)

    class Array:
        def __reduce__(self) -> Any:
            function, arguments, state = values.__reduce__()
            return collections.ChainMap, (function, arguments, state, {"weak_type": False})

    for module, name in (
        ("jax._src.array", "_reconstruct_array"),
        ("jax._src.device_array", "reconstruct_device_array"),
    ):
        data = pickle.dumps({"x": Array()}, protocol=2)
        path = tmp_path / "jax.pkl"
        path.write_bytes(data.replace(b"ccollections\nChainMap\n", f"c{module}\n{name}\n".encode()))
        np.testing.assert_array_equal(read_pickle(path)["x"], values)
        path.write_bytes(path.read_bytes().replace(b"_reconstruct\n", b"_oddly_named\n"))
        with pytest.raises(UserError, match="a JAX array that is none"):
            read_pickle(path)


@pytest.mark.parametrize(
    "data",
    [
        _copies(b"c__builtin__\nlist\nh\x00\x85R"),
        _copies(b"c__builtin__\ntuple\nh\x00\x85\x81"),
        _copies(b"(c__builtin__\ntuple\nh\x00o"),
        b"\x80\x02c__builtin__\nbytes\n\x8a\x08" + (1 << 40).to_bytes(8, "little") + b"\x85R.",
        b"\x80\x02c_codecs\nencode\n}b.",  # a state for a function
        b"\x80\x04c__builtin__\ntuple\n)}\x92.",
        b"",
        b"\x80\x04",
        pickle.dumps(np.arange(100.0))[:-40],
        pickle.dumps(np.zeros(4)).replace(b"K\x04\x85", b"K\x05\x85"),  # one more than the bytes hold
        pickle.dumps(np.array([{}], dtype=object)),
        b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",  # a string of an exabyte
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02P1\n.",
        b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",  # tuples in tuples
    ],
)
def test_damaged_and_absurd_ones_are_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.pkl"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_pickle(path)
    assert "bad.pkl is truncated or damaged" in str(caught.value)
    assert "\n" not in str(caught.value)


def nested(levels: int, shared: bool) -> bytes:
    """A tuple of tuples, as opcodes: each holds one other, or the same one twice."""
    if shared:
        return b")" + b"2\x86" * levels
    return b"(" * levels + b"t" * levels


@pytest.mark.parametrize("key", [nested(60, True), nested(10_000, False)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"}", b"K\x01s."),
        (b"}(", b"K\x01u."),
        (b"(", b"K\x01d."),
        (b"\x8f(", b"\x90."),
        (b"(", b"\x91."),
        (b"cbuiltins\nset\n](", b"e\x85R."),
        (b"ccollections\nOrderedDict\n]](", b"K\x01ea\x85R."),
    ],
)
def test_keys_that_take_for_ever_to_hash_are_refused(
    tmp_path: Path, key: bytes, before: bytes, after: bytes
) -> None:
    path = tmp_path / "keys.pkl"
    path.write_bytes(b"\x80\x04" + before + key + after)
    with pytest.raises(UserError, match=r"keys.pkl is truncated or damaged \(.*tuples in tuples as a key"):
        read_pickle(path)


@pytest.mark.parametrize("maker", [b"cbuiltins\nbytes\n", b"c__builtin__\nbytearray\n"])
def test_a_number_of_bytes_is_no_bytes(tmp_path: Path, maker: bytes) -> None:
    path = tmp_path / "zeros.pkl"
    path.write_bytes(b"\x80\x04" + maker + b"\x8a\x05\x00\x00\x00\x00\x40\x85R.")  # 256 GiB
    with pytest.raises(UserError, match=r"zeros.pkl is truncated or damaged \(bytes of something"):
        read_pickle(path)


@pytest.mark.parametrize(
    ("maker", "value"),
    [
        (b"c_codecs\nencode\n", b"\x8cX" + (1 << 20).to_bytes(4, "little")),
        (b"cbuiltins\nbytes\n", b"\x96" + (1 << 20).to_bytes(8, "little")),
    ],
)
def test_copies_without_end_are_refused(tmp_path: Path, maker: bytes, value: bytes) -> None:
    """A megabyte that is kept once and copied 100,000 times."""
    path = tmp_path / "copies.pkl"
    value = value[1:] if value[:1] == b"\x8c" else value
    big = value + b"a" * (1 << 20)
    path.write_bytes(b"\x80\x05" + maker + b"\x940" + big + b"\x940](" + b"h\x00h\x01\x85R" * 100_000 + b"e.")
    with pytest.raises(UserError, match=r"copies.pkl is truncated or damaged \(it makes far more"):
        read_pickle(path)


def test_a_state_never_reaches_a_function_of_this_module(tmp_path: Path) -> None:
    path = tmp_path / "state.pkl"
    path.write_bytes(b"\x80\x04c_codecs\nencode\n}\x8c\x01xK\x01sb.")
    with pytest.raises(UserError, match=r"a state for something that has none"):
        read_pickle(path)


def test_a_file_above_its_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.pkl"
    path.write_bytes(pickle.dumps(b"\0" * (1 << 20)))
    with pytest.raises(UserError, match=r"large.pkl is not opened: a pickle of more than 1 MiB"):
        read_pickle(path, most_bytes=1 << 20)
