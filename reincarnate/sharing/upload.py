"""From a run directory to a commit of a Hub repository, through the Hub's own client."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from filelock import BaseFileLock
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, errors
from huggingface_hub.utils._validators import validate_repo_id

from reincarnate import runfiles
from reincarnate.errors import UserError
from reincarnate.sharing import events
from reincarnate.sharing.stage import OWNED, check_run, stage
from reincarnate.teachers.hub import HTTP_ERROR, LOGIN, WAITS_SECONDS, first_line, passing, relayed
from reincarnate.teachers.reference import RUN_STUDENT

T = TypeVar("T")
Announce = Callable[[str], None]
_WRITE = "with a token that may write"


@dataclass(frozen=True)
class Pushed:
    """What a push made."""

    repo: str  # owner/name; a teacher reference
    url: str
    commit: str  # 40 hex digits
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``push --json``: ``repo``, ``url``, ``commit``, ``files``."""
        return dataclasses.asdict(self) | {"files": list(self.files)}


def push(
    run: Path | str,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    force: bool = False,
    announce: Announce | None = None,
) -> Pushed:
    """Upload a run's student, card, documents, curves and lineage; the repository is made if need be.

    Nothing that names a folder of this machine is uploaded (docs/sharing.md). The repository then loads as a
    teacher under its name.

    Args:
        run: a run directory.
        repo: owner/name on the Hub.
        private: make the repository private, or refuse if it exists and is public.
        revision: branch to commit to, made if need be; the default branch unless given.
        message: of the commit.
        force: push a run that is not finished, or over a repository that holds something else.
        announce: told, a line at a time, what happens.

    Raises:
        UserError: no such run, an unfinished one; no token, no permission, no network; a repository that
            holds something else.
    """
    folder, say = Path(run), announce or (lambda line: None)
    _check_name(repo)
    result = check_run(folder, force)
    held = runfiles.lock(folder) if result["status"] != "done" else None  # it may still be running
    try:
        with tempfile.TemporaryDirectory(prefix="reincarnate-push-") as aside, relayed(say):
            paths = stage(folder, Path(aside), repo)
            text = message or f"{result['student']['name']} on {result['env']}"
            return _upload(paths, repo, private, revision, text, force, say)
    finally:
        _release(held)


def _release(held: BaseFileLock | None) -> None:
    if held is not None:
        held.release()


def _check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
        valid = repo.count("/") == 1
    except errors.HFValidationError:
        valid = False
    if not valid:
        raise UserError(f"{repo!r} is no name of a Hub repository; write it as owner/name")


def _upload(
    paths: list[Path],
    repo: str,
    private: bool,
    revision: str | None,
    message: str,
    force: bool,
    say: Announce,
) -> Pushed:
    api = HfApi()
    url = str(_ask(functools.partial(api.create_repo, repo, private=private or None, exist_ok=True), repo))
    if revision is not None:
        _ask(functools.partial(api.create_branch, repo, branch=revision, exist_ok=True), repo)
    info = _ask(functools.partial(api.model_info, repo, revision=revision), repo)
    if private and not info.private:
        raise UserError(f"{repo} exists and is public; make it private on the Hub first, or drop --private")
    there = [sibling.rfilename for sibling in info.siblings or ()]
    if not force:
        _refuse_foreign(repo, there)
    names = [path.name for path in paths]
    stale = [name for name in there if name not in names and _is_ours(name)]
    operations = [
        *(CommitOperationDelete(name) for name in stale),
        *(CommitOperationAdd(path.name, str(path)) for path in paths),
    ]
    size = sum(path.stat().st_size for path in paths)
    say(f"uploading {len(paths)} files ({size / 1e6:.1f} MB) to {repo}")
    commit = functools.partial(api.create_commit, repo, operations, commit_message=message, revision=revision)
    made = _ask(commit, repo)
    return Pushed(repo, url, str(made.oid), tuple(names))


def _is_ours(name: str) -> bool:
    return name in OWNED or fnmatch(name, events.PATTERN)


def _refuse_foreign(repo: str, names: list[str]) -> None:
    """Raise UserError where a repository holds files, and no student of ours among them."""
    foreign = [name for name in names if name != ".gitattributes"]
    if foreign and RUN_STUDENT not in names:
        raise UserError(
            f"{repo} already holds something else ({', '.join(sorted(foreign)[:4])}); choose another name, "
            "or pass --force to add the run to it"
        )


def _ask(call: Callable[[], T], repo: str) -> T:
    """Call the client, again while the Hub has passing trouble; whatever it raises becomes a UserError."""
    for wait in (*WAITS_SECONDS, None):
        try:
            return call()
        except Exception as error:  # the client raises errors of three libraries, and plain ones
            if wait is None or not passing(error, wait):
                raise _translated(error, repo) from error
        time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _translated(error: BaseException, repo: str) -> UserError:
    """One line for a user: what happened, and what to do."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__  # "Error while uploading X" hides why
    if isinstance(error, errors.HfHubHTTPError):
        return _status_error(error, repo)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"offline mode is on (HF_HUB_OFFLINE): {repo} cannot be pushed to; go online")
    if isinstance(error, HTTP_ERROR):
        why = "no answer in time" if "Timeout" in type(error).__name__ else first_line(error)
        return UserError(f"cannot reach the Hub at {constants.ENDPOINT} ({why}); check the network")
    what = first_line(error) if isinstance(error, Exception) else type(error).__name__
    return UserError(f"the push to {repo} failed ({what}); try again")


def _status_error(error: errors.HfHubHTTPError, repo: str) -> UserError:
    status, owner = error.response.status_code, repo.partition("/")[0]
    if status == 401:
        return UserError(
            f"the Hub does not know who pushes to {repo} (no access token, or a wrong one): {LOGIN}, {_WRITE}"
        )
    if status == 403:
        return UserError(f"no permission to write to {repo}: {LOGIN}, {_WRITE} for {owner}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo} has no such revision; give the name of a branch")
    if status == 404:
        return UserError(f"no Hub repository {repo}, or no permission to see it: {LOGIN}, {_WRITE}")
    if status == 429 or status >= 500:
        return UserError(f"the Hub has trouble taking {repo} (status {status}); try again later")
    return UserError(f"the Hub refuses the push to {repo} ({status}: {error.server_message or 'no reason'})")
