"""The zip of a Stable-Baselines3 model, opened without trusting it.

A model is ``data`` (JSON, some values of it pickled as text beside their readable fields), ``policy.pth``
(``torch.save`` of a state dict) and more that no policy needs. Two members are read, each of a known size;
nothing is unpacked by its name, and what is pickled stays text.
"""

from __future__ import annotations

import json
import stat
import struct
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.teachers.formats._probe import head_of
from reincarnate.teachers.formats._text import one_line, reason
from reincarnate.teachers.formats._torch_zip import load_tensors

POLICY, DATA = "policy.pth", "data"
#: Any of these makes a zip one of Stable-Baselines', 2 or 3, whole or not.
_MARKS = frozenset({POLICY, "_stable_baselines3_version", "parameter_list"})
_ZIP = b"PK\x03\x04"
_END, _END_BYTES = b"PK\x05\x06", 22
_MAX_DIRECTORY_BYTES = 1 << 20  # a model has six members
_MAX_DATA_BYTES = 16 << 20  # JSON takes many times its size when it is read
_MAX_POLICY_BYTES = 1 << 30
_MAX_RATIO = 100  # what deflate makes of weights is near 1, of JSON about 10


@dataclass(frozen=True)
class Archive:
    """What a model says of itself."""

    tensors: dict[str, Tensor]  # the state dict of the policy, as stored
    data: dict[str, Any]  # the JSON; pickled values are dicts with ``:serialized:``, never decoded


def is_archive(path: Path) -> bool:
    """Whether a file is a zip of Stable-Baselines: by the names of its members, whatever they hold."""
    if not head_of(path).startswith(_ZIP):
        return False
    try:
        if _directory_bytes(path) > _MAX_DIRECTORY_BYTES:
            return True  # to be refused by name
        with zipfile.ZipFile(path) as archive:
            names = {PurePosixPath(name).name for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError, struct.error):
        return False  # damaged: another reader says so
    return bool(names & _MARKS)


def read_archive(path: Path) -> Archive:
    """Weights and JSON of the model in a zip.

    Raises:
        UserError: damaged, unsafe, too large, or of another library or version.
    """
    if _directory_bytes(path) > _MAX_DIRECTORY_BYTES:
        raise UserError(f"{path} is not opened: its zip directory lists far more than a model has")
    try:
        with zipfile.ZipFile(path) as archive:
            members = _checked_members(path, archive.infolist())
            data = _content(archive, members[DATA], path)
            policy = _content(archive, members[POLICY], path)
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, NotImplementedError) as error:
        raise UserError(f"{path} is truncated or damaged ({reason(error)}); download it again") from None
    except RuntimeError as error:  # zipfile's word for a password
        raise UserError(f"{path} is not opened: {reason(error)}") from None
    return Archive(_tensors(path, policy), parse_data(path, data))


def parse_data(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON of ``data``.

    Raises:
        UserError: it is none, or no object.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: data is no JSON ({reason(error)}); the file is damaged") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: data: expected an object, found a {type(data).__name__}")
    return data


def read_data_file(path: Path) -> dict[str, Any]:
    """The JSON of a ``data`` file that was unpacked.

    Raises:
        UserError: as :func:`parse_data`, or too large.
    """
    with path.open("rb") as file:
        content = file.read(_MAX_DATA_BYTES + 1)
    if len(content) > _MAX_DATA_BYTES:
        raise UserError(f"{path} is not read: more than {_MAX_DATA_BYTES >> 20} MiB of JSON")
    return parse_data(path, content)


def _directory_bytes(path: Path) -> int:
    """Size of the directory at a zip's end as the file states it; 0 where there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES - 0xFFFF))
        tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_BYTES:
        return 0
    return int(struct.unpack("<L", tail[at + 12 : at + 16])[0])


def _checked_members(path: Path, members: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """The two members that are read, by their plain names.

    They may lie in a folder of the zip, where somebody zipped the unpacked model again.
    """
    for member in members:
        _check_name(path, member)
    policies = [member for member in members if PurePosixPath(member.filename).name == POLICY]
    if not policies:
        raise UserError(f"{path}: {_without_policy(members)}")
    folder = min((PurePosixPath(member.filename).parent for member in policies), key=lambda at: len(at.parts))
    chosen = {}
    for name, most in ((POLICY, _MAX_POLICY_BYTES), (DATA, _MAX_DATA_BYTES)):
        found = [member for member in members if PurePosixPath(member.filename) == folder / name]
        if len(found) != 1:
            count = "no member" if not found else f"{len(found)} members"
            raise UserError(f"{path} is not opened: {count} named {str(folder / name)!r}, expected one")
        _check_size(path, found[0], most)
        chosen[name] = found[0]
    return chosen


def _check_name(path: Path, member: zipfile.ZipInfo) -> None:
    name = member.filename
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if name.startswith(("/", "\\")) or ".." in parts or ":" in (parts[0] if parts else ""):
        raise UserError(f"{path} is not opened: a member is named {one_line(name, 60)!r}, outside of the zip")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise UserError(f"{path} is not opened: its member {one_line(name, 60)!r} is a link")


def _check_size(path: Path, member: zipfile.ZipInfo, most: int) -> None:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(
            f"{path} is not opened: {member.filename} is compressed in a way that models never are"
        )
    if member.file_size > most:
        raise UserError(
            f"{path} is not opened: {member.filename} claims {member.file_size:,} bytes, more than {most:,}"
        )
    if member.file_size > _MAX_RATIO * member.compress_size + 4096:
        raise UserError(
            f"{path} is not opened: {member.filename} claims to inflate {member.compress_size:,} bytes to "
            f"{member.file_size:,}"
        )


def _without_policy(members: list[zipfile.ZipInfo]) -> str:
    names = {PurePosixPath(member.filename).name for member in members}
    if "parameter_list" in names:
        return "a model of Stable-Baselines 2 (TensorFlow); only those of Stable-Baselines3 can be read"
    return "a Stable-Baselines3 archive without policy.pth; the file is not complete"


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    """A member's bytes, no more of them than it states; its checksum is compared."""
    with archive.open(member) as file:
        content = file.read(member.file_size + 1)
    if len(content) != member.file_size:
        raise UserError(
            f"{path} is damaged: {member.filename} has {len(content)} bytes, not {member.file_size}"
        )
    return content


def _tensors(path: Path, policy: bytes) -> dict[str, Tensor]:
    """The state dict in the bytes of ``policy.pth``, which PyTorch's reader wants in a file."""
    if not policy.startswith(_ZIP):
        raise UserError(
            f"{path}: policy.pth is in a format that PyTorch wrote before 1.6 (a bare pickle); not opened: "
            "load and save it again with Stable-Baselines3"
        )
    with tempfile.TemporaryDirectory(prefix="reincarnate-") as folder:
        file = Path(folder) / POLICY
        file.write_bytes(policy)
        try:
            return {name: value.clone() for name, value in load_tensors(file).items()}
        except UserError as error:
            raise UserError(str(error).replace(str(file), f"{path}: {POLICY}")) from None
