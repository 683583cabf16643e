"""Opening what ``torch.save`` wrote without running anything in it.

``torch.load(weights_only=True)`` is the guard; before it, the zip is checked (stored, whole, no more in it
than the file holds) and the pickle's imports are listed, so that a file that wants to run code or to
allocate without bound is refused by name. Everything but dense CPU-loadable tensors is refused.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.teachers.formats._text import reason

_LOCAL_HEADER_BYTES = 30
#: All that a state dict of plain tensors imports.
_STORAGES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_IMPORTS = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(f"torch {kind}Storage" for kind in _STORAGES),
    }
)
#: Opcodes that make objects otherwise than by calling an import that GLOBAL named.
_OTHER_OBJECTS = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The state dict in ``path``, on the CPU.

    Raises:
        UserError: damaged, not written by ``torch.save``, wants to run code, or not a dict of tensors.
    """
    _check_imports(path, _read_pickle(path))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere inside; nothing of it was executed
        raise UserError(f"{path} cannot be read by torch.load ({reason(error)})") from None
    return _state_dict(path, loaded)


def _read_pickle(path: Path) -> bytes:
    """The archive's pickle, after all of its members were checked."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError) as error:
        raise UserError(f"{path} is truncated or damaged ({reason(error)}); download it again") from None
    pickles = [member for member in members if member.filename.endswith("/data.pkl")]
    if not pickles:
        raise UserError(
            f"{path} is a zip archive that torch.save did not write (no data.pkl in it); "
            "Stable-Baselines3 archives are not read yet"
        )
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UserError(f"{path} is a compressed archive, which torch.save never writes; not opened")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise UserError(f"{path} claims more content than the file holds; not opened")
    if len(pickles) > 1:
        raise UserError(f"{path} has more than one data.pkl, which torch.save never writes; not opened")
    for member in members:
        _member(path, member)
    return _member(path, pickles[0])


def _member(path: Path, member: zipfile.ZipInfo) -> bytes:
    """Bytes of a stored member, compared with its checksum (0 where torch was told to compute none)."""
    with path.open("rb") as file:
        file.seek(max(0, member.header_offset))  # a damaged directory can point before the file
        header = file.read(_LOCAL_HEADER_BYTES)
        if len(header) == _LOCAL_HEADER_BYTES:
            file.seek(sum(struct.unpack("<HH", header[26:])), 1)  # file name, extra field
        content = file.read(member.file_size)
    if len(content) != member.file_size or (member.CRC and zlib.crc32(content) != member.CRC):
        raise UserError(f"{path} is damaged: {member.filename} fails its checksum; download it again")
    return content


def _check_imports(path: Path, pickled: bytes) -> None:
    """List what unpickling would import and call, without doing it."""
    try:
        operations = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(pickled)]
    except Exception as error:  # pickletools raises whatever the bytes lead it to
        raise UserError(f"{path} is damaged: its data.pkl is no pickle ({reason(error)})") from None
    for name, argument in operations:
        if name == "GLOBAL" and argument not in _IMPORTS:
            what = str(argument).replace(" ", ".")
            raise UserError(f"{path} is not opened: it asks to import {what}, which no plain weights need")
        if name in _OTHER_OBJECTS:
            raise UserError(f"{path} is not opened: it builds objects ({name}), which no plain weights need")


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    limit = path.stat().st_size
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise UserError(
                f"{path} is not a state dict: {key!r} holds a {type(value).__name__}, not weights"
            )
        if value.numel() * value.element_size() > limit:  # strides of 0 repeat a few bytes without end
            raise UserError(f"{path}: {key}: shape {list(value.shape)} needs more bytes than the file has")
    return dict(loaded)
