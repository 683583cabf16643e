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
_MARK, _SLICE = pickletools.markobject, pickletools.stackslice
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


_MAX_PICKLE_BYTES = 1 << 20  # names and shapes alone; a policy's take a few thousand
_MAX_TUPLE = 1000  # values in a tuple, nested ones included: hashing one takes a step for each
_MAX_ITEMS = 4096  # of the arguments
_MAX_TEXT = 65_536  # characters of one argument


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The state dict in ``path``, on the CPU.

    Raises:
        UserError: damaged, not written by ``torch.save``, wants to run code, or not a dict of tensors.
    """
    return _state_dict(path, _load(path))


def load_tensors_and_arguments(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict in ``path`` and the arguments of the script that wrote it, where it holds them.

    CleanRL's C51 scripts save ``{"model_weights": state_dict, "args": {...}}``; arguments are text, numbers,
    booleans, None and lists of these.

    Raises:
        UserError: as :func:`load_tensors`, or something else among the arguments.
    """
    loaded = _load(path)
    if isinstance(loaded, dict) and loaded.keys() == {"model_weights", "args"}:
        return _state_dict(path, loaded["model_weights"]), _arguments(path, loaded["args"])
    return _state_dict(path, loaded), {}


def _load(path: Path) -> Any:
    _check_pickle(path, _read_pickle(path))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere inside; nothing of it was executed
        raise UserError(f"{path} cannot be read by torch.load ({reason(error)})") from None


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
            f"{path} is a zip archive that torch.save did not write (no data.pkl in it), and no "
            "Stable-Baselines3 model either (no policy.pth)"
        )
    if any("/code/" in member.filename for member in members):
        raise UserError(
            f"{path} is not opened: it holds a TorchScript program (torch.jit.save), which is code; "
            "save torch.save(model.state_dict(), FILE)"
        )
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UserError(f"{path} is a compressed archive, which torch.save never writes; not opened")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise UserError(f"{path} claims more content than the file holds; not opened")
    if len(pickles) > 1:
        raise UserError(f"{path} has more than one data.pkl, which torch.save never writes; not opened")
    if pickles[0].file_size > _MAX_PICKLE_BYTES:
        raise UserError(f"{path} is not opened: a data.pkl of {pickles[0].file_size} bytes names no weights")
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


def _check_pickle(path: Path, pickled: bytes) -> None:
    """List what unpickling would import, call and hash, without doing it."""
    try:
        operations = [(opcode, argument) for opcode, argument, _ in pickletools.genops(pickled)]
        _check_imports(path, [(opcode.name, argument) for opcode, argument in operations])
        _check_tuples(path, operations)
    except UserError:
        raise
    except Exception as error:  # pickletools raises whatever the bytes lead it to
        raise UserError(f"{path} is damaged: its data.pkl is no pickle ({reason(error)})") from None


def _check_imports(path: Path, operations: list[tuple[str, Any]]) -> None:
    imports = [str(argument).replace(" ", ".") for name, argument in operations if name == "GLOBAL"]
    if any(name.startswith("torch.nn.modules.") for name in imports):
        raise UserError(
            f"{path} is not opened: it asks to import {imports[0]}, for it holds a whole module "
            "(torch.save(model)), which runs code when opened; save torch.save(model.state_dict(), FILE)"
        )
    for name, argument in operations:
        if name == "GLOBAL" and argument not in _IMPORTS:
            what = str(argument).replace(" ", ".")
            raise UserError(f"{path} is not opened: it asks to import {what}, which no plain weights need")
        if name in _OTHER_OBJECTS:
            raise UserError(f"{path} is not opened: it builds objects ({name}), which no plain weights need")


def _check_tuples(path: Path, operations: list[tuple[pickletools.OpcodeInfo, Any]]) -> None:
    """Refuse tuples that take for ever to hash, or too deep a recursion: tuples in tuples, shared or not.

    Follows the stack with the number of values in each tuple instead of the tuple (1 for all else).
    """
    stack: list[int | None] = []  # None is the mark
    memo: dict[Any, int | None] = {}
    for opcode, argument in operations:
        name = opcode.name
        if name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(None)
        else:
            taken = _taken(stack, opcode)
            size = 1 + sum(taken) if name.startswith("TUPLE") else 1
            if size > _MAX_TUPLE:
                raise UserError(f"{path} is not opened: tuples in tuples, {size} values in one")
            stack.extend([size] * len(opcode.stack_after))


def _taken(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> list[int]:
    """What an operation takes off the stack, down to the mark where it takes a slice."""
    fixed = [each for each in opcode.stack_before if each not in (_MARK, _SLICE)]
    taken: list[int | None] = []
    if _MARK in opcode.stack_before:
        while (value := stack.pop()) is not None:
            taken.append(value)
    taken += [stack.pop() for _ in fixed]
    return [value or 0 for value in taken]


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    if isinstance(loaded, (tuple, list)) and loaded and all(isinstance(part, dict) for part in loaded):
        raise UserError(
            f"{path} holds {len(loaded)} networks, as CleanRL's ddpg and td3 write them: a policy of "
            "continuous actions, which cannot be a teacher here"
        )
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    limit = path.stat().st_size
    for key, value in loaded.items():
        if not isinstance(key, str):
            raise UserError(f"{path} is not a state dict: a key is a {type(key).__name__}, not text")
        if not isinstance(value, Tensor):
            raise UserError(
                f"{path} is not a state dict: {key!r} holds a {type(value).__name__}, not weights"
            )
        if value.numel() * value.element_size() > limit:  # strides of 0 repeat a few bytes without end
            raise UserError(f"{path}: {key}: shape {list(value.shape)} needs more bytes than the file has")
    return dict(loaded)


def _arguments(path: Path, loaded: Any) -> dict[str, Any]:
    if not isinstance(loaded, dict) or len(loaded) > _MAX_ITEMS:
        raise UserError(f"{path}: args: expected a map of arguments, found a {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str):
            raise UserError(f"{path}: args: a name is a {type(name).__name__}, not text")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(each, (str, int, float, type(None))):
                raise UserError(f"{path}: args: {name!r} holds a {type(each).__name__}, no text or number")
            if isinstance(each, str) and len(each) > _MAX_TEXT:
                raise UserError(f"{path}: args: {name!r} is longer than {_MAX_TEXT} characters")
    return dict(loaded)
