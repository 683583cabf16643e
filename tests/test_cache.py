"""A cache that cannot be written: refused before a run starts, where the run needs it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.prepare import Parts, prepare

from cli_calls import invoke, refused
from small_runs import TEACHER, small_config


def prepared(teacher: str | None = TEACHER, student: str = "qdagger-dqn", **changes: Any) -> Parts:
    return prepare(small_config(teacher, student, **changes), announce=lambda line: None)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache should be."""
    path = tmp_path / "cache"
    path.write_text("not a folder")
    monkeypatch.setenv("REINCARNATE_CACHE", str(path))
    return path


@pytest.mark.parametrize("below", ["", "mine"])
def test_a_file_in_its_place_is_one_line_and_nothing_is_written(
    below: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(file / below))
    run = file.parent / "run"
    line = refused(invoke("run", "--teacher", TEACHER, "--preset", "quick", "--out", str(run)))
    assert f"the cache cannot be in {file / below}, as {file} is not a folder; name another folder in" in line
    assert list(file.parent.iterdir()) == [file]


def test_a_link_that_leads_nowhere_is_no_folder(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent / "gone")
    with pytest.raises(UserError, match=r"cache is not a folder"):
        prepared()


def test_a_folder_of_the_cache_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "cache" / "teacher-data"
    data.mkdir(parents=True)

    def read_only(dir: Path) -> None:  # root may write anywhere, so no permission would do
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    with pytest.raises(UserError, match=rf"as {data} cannot be written \(Read-only file system\); name"):
        prepared()


def test_returns_that_runs_share_need_it_as_well(file: Path) -> None:
    scratch = {"teacher": None, "student": "dqn", "env__id": "CartPole-v1"}
    prepared(**scratch)  # keeps nothing
    with pytest.raises(UserError, match=r"cache is not a folder"):
        prepared(**scratch, teacher_seed=7)


def test_a_run_that_goes_on_may_have_no_more_need_of_it(file: Path) -> None:
    config = small_config()
    assert prepare(config, announce=lambda line: None, where="ram").storage.storage == "ram"
    with pytest.raises(UserError, match=r"cache is not a folder"):
        prepare(config, announce=lambda line: None)


def test_trying_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "not" / "yet"))
    prepared()
    assert list(tmp_path.iterdir()) == []
