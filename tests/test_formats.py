"""What a file is, told by its content; whatever it is instead gets one clear line."""

from __future__ import annotations

import gzip
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from reincarnate.envs import env_spec
from reincarnate.errors import UserError
from reincarnate.teachers.formats import FORMATS, Hints, _msgpack, detect_and_read, save_native
from reincarnate.teachers.teacher import TeacherSpec

import checkpoint_writers as writers
from hostile_files import bounded

CARTPOLE = Hints("CartPole-v1")


def packed_array(array: np.ndarray[Any, Any], shape: Any = None, dtype: Any = None) -> msgpack.ExtType:
    """flax's extension 1, also where shape and dtype lie."""
    content = (
        list(array.shape) if shape is None else shape,
        array.dtype.name if dtype is None else dtype,
        array.tobytes(),
    )
    return msgpack.ExtType(1, msgpack.packb(content))


def dense_tree(features: int = 4, actions: int = 2) -> dict[str, Any]:
    """CleanRL's dqn_jax, packed by hand: no flax needed."""
    rng = np.random.default_rng(0)
    sizes = (features, 120, 84, actions)
    return {
        f"Dense_{i}": {
            "kernel": packed_array(rng.standard_normal(sizes[i : i + 2]).astype(np.float32)),
            "bias": packed_array(rng.standard_normal(sizes[i + 1]).astype(np.float32)),
        }
        for i in range(3)
    }


def write(path: Path, tree: Any) -> Path:
    path.write_bytes(msgpack.packb(tree))
    return path


def test_a_format_is_known_by_its_content_whatever_the_name(tmp_path: Path) -> None:
    flax_file = write(tmp_path / "weights.zip", {"params": dense_tree()})
    torch_file = writers.save_dqn(tmp_path / "weights.msgpack", writers.torch_mlp(4, (120, 84), 2, nn.ReLU))
    assert detect_and_read(flax_file, CARTPOLE).format == "cleanrl_flax"
    assert detect_and_read(torch_file, CARTPOLE).format == "cleanrl_torch"


def test_every_format_has_a_name_and_a_summary() -> None:
    assert list(FORMATS) == ["native", "sb3", "cleanrl_torch", "cleanrl_flax", "dopamine"]
    assert all(name == reader.NAME and reader.SUMMARY for name, reader in FORMATS.items())


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 6748709\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"it is empty; download it again"),
        (b"\0" * 5000, r"it is all zeros"),
        (LFS, r"it is a Git LFS pointer; fetch the file itself with `git lfs pull`"),
        (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", r"it is an HTML page, perhaps a login"),
        (b"\xef\xbb\xbf\n  <HTML>", r"it is an HTML page"),
        (b"<?xml version='1.0'?><Error/>", r"it is an HTML page"),
        (b'{"error": "Repository not found"}', r"it is JSON text, .*\{\"error\": \"Repository not found\"\}"),
        (b"Not Found", r"it is text \(Not Found\)"),
        ("Entrée non trouvée ".encode() * 400, r"it is text \(Entrée"),
        (b"x" + "é".encode() * 4000, r"it is text \(xéé"),  # the 4096th byte is half a character
        (b"\x1f\x8b" + gzip.compress(b"x", mtime=0), r"it is a compressed or tar archive"),
    ],
)
def test_what_downloads_leave_instead_of_weights_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "dqn.cleanrl_model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"dqn\.cleanrl_model holds no weights: {message}") as got:
        detect_and_read(path, CARTPOLE)
    assert "\n" not in str(got.value)


def test_a_tar_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(write(tmp_path / "inner", {}), arcname="inner")
    with pytest.raises(UserError, match=r"compressed or tar archive; unpack it"):
        detect_and_read(path, CARTPOLE)


@pytest.mark.parametrize(
    "magic", [b"\x89HDF\r\n\x1a\n", b"\x89PNG\r\n\x1a\n", b"\x93NUMPY\x01\x00", b"\x81\x01"]
)
def test_unknown_bytes_list_what_can_be_read(tmp_path: Path, magic: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(magic + bytes(range(256)))
    with pytest.raises(UserError, match=r"x is in no format that can be read \(.*flax msgpack; .*\)$"):
        detect_and_read(path, CARTPOLE)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist$"):
        detect_and_read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is a folder, not a checkpoint; name a file in it"):
        detect_and_read(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read: Not a directory"):
        detect_and_read(write(tmp_path / "file", {}) / "below")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    with pytest.raises(UserError, match=r"pipe is not a regular file"):
        detect_and_read(tmp_path / "pipe")


def test_a_truncation_of_a_msgpack_file_is_told(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", {"params": dense_tree()}).read_bytes()
    path = tmp_path / "part"
    for length in (1, 2, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"part is not a complete flax msgpack file .*download it again"):
            detect_and_read(path, CARTPOLE)
    path.write_bytes(whole + b"\x00")
    with pytest.raises(UserError, match=r"not a complete flax msgpack file .*extra data"):
        detect_and_read(path, CARTPOLE)


ZEROS = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (packed_array(ZEROS, shape=[5]), r"shape \[5\] and type float32 needs 20 bytes, has 16"),
        (packed_array(ZEROS, shape=[2**40]), r"needs 4398046511104 bytes, has 16"),
        (packed_array(ZEROS, shape=[2**62, 2**62]), r"type float32 needs 850705917302"),
        (packed_array(ZEROS, shape=[-4]), r"an array of shape \[-4\]"),
        (packed_array(ZEROS, shape=[1] * 9), r"max_array_len|an array of shape"),
        (packed_array(ZEROS, shape="four"), r"an array of shape 'four'"),
        (packed_array(ZEROS, dtype="object"), r"an array of type 'object'"),
        (packed_array(ZEROS, dtype="V16"), r"an array of type 'V16'"),
        (msgpack.ExtType(1, b"\x01"), r"should hold 3 values does not"),
        (msgpack.ExtType(1, b""), r"incomplete input"),
        (msgpack.ExtType(2, msgpack.packb([1.0])), r"should hold 2 values does not"),
        (msgpack.ExtType(9, b"abc"), r"unknown extension type 9"),
    ],
)
def test_an_array_that_lies_is_told(tmp_path: Path, leaf: msgpack.ExtType, message: str) -> None:
    path = write(tmp_path / "x", {"params": dense_tree() | {"Dense_1": {"kernel": leaf}}})
    with pytest.raises(UserError, match=rf"x is not a complete flax msgpack file .*{message}"):
        detect_and_read(path, CARTPOLE)


@pytest.mark.parametrize(
    "content",
    [
        b"\xdf" + struct.pack(">I", 2**32 - 1),  # a map of 4 billion
        b"\xdd" + struct.pack(">I", 2**32 - 1),  # a list of 4 billion
        (b"\xdd" + struct.pack(">I", 10**6)) * 200_000,  # lists of a million in lists of a million
        b"\x91" * 100_000,  # nested without end
        b"\x81\xa1x\xc6" + struct.pack(">I", 2**31),  # 2 GiB of bytes
        b"\x81\xa1x\xc9" + struct.pack(">I", 2**31) + b"\x01",  # an array of 2 GiB
        b"\x81\xa1x\xdb" + struct.pack(">I", 2**31),  # text of 2 GiB
        b"\x81\xa1x\x81\x91\x01\x02",  # a list as a key
        b"\x81\xa2\xff\xff\x01",  # a key that is no UTF-8
    ],
)
def test_absurd_sizes_are_refused_before_they_are_allocated(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with bounded(), pytest.raises(UserError, match=r"x is not a complete flax msgpack file"):
        detect_and_read(path, CARTPOLE)


def chunked(shape: Any, chunks: Any) -> dict[str, Any]:
    return {"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}


def test_chunks_are_joined_in_order(tmp_path: Path) -> None:
    parts = [np.arange(4, dtype=np.float32), np.arange(4, 6, dtype=np.float32)]
    leaf = chunked({"0": 2, "1": 3}, {str(i): packed_array(part) for i, part in enumerate(parts)})
    tree = _msgpack.read_tree(write(tmp_path / "x", {"kernel": leaf}))
    np.testing.assert_array_equal(tree["kernel"], np.arange(6, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (chunked({"0": 10**9}, {"0": packed_array(ZEROS)}), r"do not fill it"),
        (chunked({"0": 4}, {}), r"without flat chunks"),
        (chunked({"0": 4}, {"0": 1}), r"without flat chunks"),
        (chunked({"0": 4}, {"1": packed_array(ZEROS)}), r"a sequence without its indices"),
        (chunked(None, {"0": packed_array(ZEROS)}), r"a sequence without its indices"),
    ],
)
def test_chunks_that_lie_are_told(tmp_path: Path, leaf: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        detect_and_read(write(tmp_path / "x", {"params": leaf}), CARTPOLE)


def test_scalars_and_complex_numbers_are_read_as_flax_writes_them(tmp_path: Path) -> None:
    serialization = pytest.importorskip("flax.serialization")
    tree = {"a": np.float32(1.5), "b": 1 + 2j, "c": np.int64(3), "d": np.array(2.5), "e": None, "f": True}
    path = tmp_path / "x"
    path.write_bytes(serialization.msgpack_serialize(tree))
    assert _msgpack.read_tree(path) == tree


def test_keys_of_a_file_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"\x1b[2Jcleared\nand a line": 1, "long" * 10_000: 2})
    with pytest.raises(UserError, match=r"x: \?\[2Jcleared and a line: expected an array") as got:
        detect_and_read(path, CARTPOLE)
    assert str(got.value).isprintable()
    path.write_bytes(msgpack.packb({"long" * 10_000: 2}))
    with pytest.raises(UserError, match=r"\.\.\.$") as got:
        detect_and_read(path, CARTPOLE)
    assert len(str(got.value)) < 700


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
def test_damage_anywhere_is_read_or_told_in_one_line(tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    """Flipped bits may hit a weight (another number) or the structure (an error), never a traceback."""
    tree = {"params": {"Dense_0": {"kernel": packed_array(ZEROS), "bias": packed_array(ZEROS)}}}
    content = bytearray(msgpack.packb(tree))
    for where, change in damage:
        content[where % len(content)] ^= change
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UserError) as got:  # two arrays are no checkpoint, even undamaged
        detect_and_read(path, CARTPOLE)
    assert str(got.value).isprintable()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_torch_files_are_read_or_told_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x"
    torch.save({"network.0.weight": torch.zeros(2, 2)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(UserError) as got:
        detect_and_read(path, CARTPOLE)
    assert str(got.value).isprintable()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), min_size=1, max_size=4))
def test_damaged_safetensors_are_read_or_told_in_one_line(
    tmp_path: Path, damage: list[tuple[int, int]]
) -> None:
    """The format has no checksum: a flipped bit in a weight is another weight."""
    spec = TeacherSpec(env_spec("CartPole-v1"), "q_values", "mlp", {"hidden": [2]}, "dqn")
    path = save_native(tmp_path / "x.safetensors", spec.build(), spec)
    content = bytearray(path.read_bytes())
    for where, change in damage:
        content[where % len(content)] ^= change
    path.write_bytes(content)
    message = ""
    try:
        assert detect_and_read(path).spec.network == "mlp"
    except UserError as error:
        message = str(error)
    assert message.isprintable()  # as is the empty one


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_random_bytes_are_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UserError) as got:
        detect_and_read(path, CARTPOLE)
    assert str(got.value).isprintable()
