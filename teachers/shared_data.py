"""A teacher buffer that somebody made, as a folder or a Hub dataset: checked before anything large moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.replay.store import SegmentRecord, is_segment_name
from reincarnate.teachers.collect import Collection, read_teacher_data
from reincarnate.teachers.hub_data import Dataset, find_dataset, is_dataset
from reincarnate.teachers.teacher import Teacher
from reincarnate.types import EnvSpec


@dataclass(frozen=True)
class TeacherData:
    """A D_T whose manifest fits the run."""

    exact: str  # finds the same data again: a folder, or owner/name@commit
    folder: Path
    collection: Collection
    complete: bool  # its segments are on this machine
    fetch: Callable[[], None]  # brings its segments into ``folder``; raises UserError


def exact_text(text: str) -> str:
    """What ``--teacher-data`` was given, so that it means the same from any folder; ``none`` stays that."""
    if text.lower() == "none":
        return text
    path = Path(text).expanduser()
    return text if is_dataset(text) and not path.exists() else str(path.absolute())


def find_teacher_data(
    text: str, teacher: Teacher, env: EnvSpec, announce: Callable[[str], None]
) -> TeacherData:
    """The D_T that ``text`` names, if ``teacher`` made it in ``env``; of a dataset only the manifest is read.

    Raises:
        UserError: no D_T there, an unfinished or damaged one, another teacher's or another environment's;
            or, for a dataset, whatever keeps it from being downloaded.
    """
    folder = Path(text).expanduser()
    if folder.exists() or not is_dataset(text):
        _refuse_no_data(folder)
        collection = read_teacher_data(folder, teacher, env)
        return TeacherData(text, folder, collection, True, lambda: None)
    dataset = _found_on_hub(text, announce)
    manifest = dataset.fetch("manifest.json")
    collection = read_teacher_data(manifest.parent, teacher, env, name=f"dataset {dataset.exact}")
    return TeacherData(
        dataset.exact, manifest.parent, collection, False, lambda: _fetch(dataset, manifest, announce)
    )


def _found_on_hub(text: str, announce: Callable[[str], None]) -> Dataset:
    """A mistyped folder may look like a dataset, so what went wrong is said of both readings."""
    try:
        return find_dataset(text, announce)
    except UserError as error:
        near = files.did_you_mean(Path(text))
        raise UserError(
            f"{text!r} is no folder here{near}, and read as a dataset of the Hub: {error}; name the folder "
            "of a `teachers collect`, or a dataset as owner/name[@revision]"
        ) from None


def _refuse_no_data(folder: Path) -> None:
    if not folder.exists():
        near = files.did_you_mean(folder)
        raise UserError(
            f"no folder with teacher data: {str(folder)!r}{near}; `teachers collect` makes one, and a "
            "dataset of the Hub is owner/name[@revision]"
        )
    if not (folder / "manifest.json").exists():
        raise UserError(
            f"{folder} holds no teacher data (no manifest.json); name the folder of a `teachers collect`"
        )


def _fetch(dataset: Dataset, manifest: Path, announce: Callable[[str], None]) -> None:
    """Download the segments that are not in the cache; each is checked against the manifest and the Hub."""
    try:
        records = [SegmentRecord(**record) for record in files.read_json(manifest)["segments"]]
    except (KeyError, TypeError):
        raise UserError(f"the manifest of dataset {dataset.exact} is damaged; collect it again") from None
    missing = [record for record in records if not (manifest.parent / record.file).exists()]
    if missing:
        size = sum(record.bytes for record in missing) / 1e9
        announce(
            f"dataset {dataset.exact}: {len(missing)} of {len(records)} segments to download, {size:.2f} GB"
        )
    for record in records:
        if not is_segment_name(record.file):
            raise UserError(f"dataset {dataset.exact} lists {record.file!r}, no name of a segment; refused")
        dataset.fetch(record.file, record.sha256)
