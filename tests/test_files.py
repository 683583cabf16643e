import errno
import json
from pathlib import Path

import pytest

from reincarnate import files
from reincarnate.errors import UserError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_failed_rename_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        files.write_bytes(tmp_path / "x", b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_by_the_file_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as told:
        files.write_bytes(tmp_path / "x", b"data")
    assert told.value.filename == str(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError) as told:
        files.write_bytes(tmp_path / "no" / "x", b"data")
    assert told.value.filename == str(tmp_path / "no" / "x")


def test_the_nearest_name_is_looked_for_where_the_first_part_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    for wrong, meant in (("runs/dmeo/x", "runs/demo"), ("run/demo", "runs")):
        assert files.did_you_mean(tmp_path / wrong) == f" (did you mean {str(tmp_path / meant)!r}?)"
    assert files.did_you_mean(tmp_path / "runs" / "zzzz") == ""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert files.did_you_mean(Path("runs/demo")) == ""


def test_a_cache_in_nobodys_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(UserError, match=r"cannot be in ~nobody-of-this-name/cache, .*REINCARNATE_CACHE"):
        files.cache_folder()


def test_reading_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.json does not exist"):
        files.read_json(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"bad.json cannot be read as JSON"):
        files.read_json(tmp_path / "bad.json")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "mine"))
    assert files.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("REINCARNATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / "reincarnate"
