"""The only file that reads from the Hugging Face Hub, always through its own client, ``huggingface_hub``.

The client reads its environment when it is imported: ``HF_ENDPOINT``, ``HF_HUB_CACHE`` (or ``HF_HOME``),
``HF_HUB_OFFLINE`` and its timeouts; ``HF_TOKEN`` when it is used. Nothing here overrides any of them.

A load asks for the repository once (name, commit, files and their hashes), then downloads from that commit
and no other, so that listing and file never mix. When the Hub cannot be asked, the cache answers, and the
announcement says so. Every error is one ``UserError`` line that names the repository.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import (
    HfApi,
    constants,
    errors,
    hf_hub_download,
    scan_cache_dir,
    snapshot_download,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import DatasetInfo, ModelInfo, RepoSibling

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.teachers.formats import Companions
from reincarnate.teachers.reference import (
    CARD,
    Reference,
    candidates,
    choose_file,
    is_in_folder,
    is_safe_name,
    nearest_here,
)

T = TypeVar("T")
Announce = Callable[[str], None]

_COMMIT = re.compile(r"[0-9a-f]{40}")
# The client repeats a failed download, but neither the first question nor a download that starts with 5xx.
WAITS_SECONDS = (1.0, 2.0, 4.0)
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_ELSEWHERE = "a local or a bundled teacher"
LOGIN = "log in with `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True)
class Downloaded:
    """A checkpoint of the Hub on this machine."""

    path: Path  # of the weights
    repo: str  # owner/name as the Hub calls it now
    revision: str  # commit, 40 hex digits
    file: str  # path inside the repository
    card_text: str | None  # README.md of the same commit
    companions: Companions  # the other files of the same commit
    offline: bool = False  # the cache answered because the Hub did not


@dataclass(frozen=True)
class Cached:
    """A repository in the local cache and the files of its newest snapshot."""

    repo: str
    files: tuple[str, ...]


class _MissingError(UserError):
    """The Hub shows no such repository: absent, or private and not ours."""


class _UnreachableError(UserError):
    """The Hub gave no usable answer; the cache may have one."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason, self.advice = reason, advice


def find_and_download(reference: Reference, *, announce: Announce | None = None) -> Downloaded:
    """Resolve a Hub reference and download its checkpoint and model card, once.

    Args:
        reference: of kind ``hub``; a short form is tried under CleanRL's names too.
        announce: told, a line at a time, what was resolved, downloaded, retried or taken from the cache.

    Raises:
        UserError: no such repository, revision or file; no known checkpoint in it; no permission; no network
            and nothing cached; a download that stays damaged.
    """
    say = announce or (lambda line: None)
    with relayed(say):
        try:
            repo, info = _find(reference)
        except _UnreachableError as unreachable:
            return _from_cache(reference, unreachable, say)
        if repo != reference.repo:
            say(f"{reference.repo} is {repo} on the Hub")
        return _download(reference, repo, info, say)


def cached_repositories() -> list[Cached]:
    """Model repositories in the local cache, by name; empty without a cache."""
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (errors.CacheNotFound, ValueError, OSError):  # none, or one that may not be read
        return []
    found = []
    for repo in repos:
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if repo.repo_type == "model" and newest is not None:
            names = (each.file_path.relative_to(newest.snapshot_path).as_posix() for each in newest.files)
            found.append(Cached(repo.repo_id, tuple(sorted(names))))
    return sorted(found, key=lambda each: each.repo)


def read_companion(repo: str, revision: str, name: str) -> str | None:
    """Text of a small file at a commit; None where there is none, or the Hub does not answer."""
    try:
        path = hf_hub_download(repo, name, revision=revision)
        return Path(path).read_text(encoding="utf-8")
    except Exception:  # whatever it is, what is asked for here is never needed
        return None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    return _digest(path, hashlib.sha256())


def _find(reference: Reference) -> tuple[str, ModelInfo]:
    """The first candidate that exists, and what it holds at the wanted revision."""
    names = candidates(reference)
    api = HfApi()
    for repo in names:
        question = functools.partial(
            api.model_info,
            repo,
            revision=reference.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,  # without one the client waits for ever
        )
        with contextlib.suppress(_MissingError):
            return repo, _ask(question, reference, repo)
    tried = f" (tried {', '.join(names[1:])} too)" if len(names) > 1 else ""
    here = f"no such file or folder here{nearest_here(reference.text)}"
    raise UserError(f"no Hub repository {names[0]}{tried}, and {here}; if it is private, {LOGIN}")


def _download(reference: Reference, repo: str, info: ModelInfo, say: Announce) -> Downloaded:
    if info.id != repo:
        say(f"{repo} is called {info.id} now")
    commit = _commit_of(info, repo)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    for name in siblings:
        if not is_safe_name(name):
            raise UserError(f"{repo} lists a file with an unsafe name ({name!r}); refused")
    where = repo if reference.revision is None else f"{repo}@{reference.revision}"
    file = choose_file(list(siblings), where, reference.file)
    _announce_change(repo, reference.revision, commit, say)
    path = _fetch(reference, repo, siblings[file], commit, say)
    card = None
    if CARD in siblings:
        # From here on the repository is asked for under its old name, so that the cache answers to that one.
        call = functools.partial(hf_hub_download, repo, CARD, revision=commit)
        card = Path(_ask(call, reference, repo, CARD)).read_text(encoding="utf-8", errors="replace")
    _remember(repo, reference.revision, commit)
    return Downloaded(path, info.id, commit, file, card, _companions(reference, repo, siblings, commit, say))


def _companions(
    reference: Reference, repo: str, siblings: dict[str, RepoSibling], commit: str, say: Announce
) -> Companions:
    """The files of one commit; each is downloaded when it is asked for."""

    def path_of(name: str) -> Path:
        with relayed(say):
            return _fetch(reference, repo, siblings[name], commit, say)

    return Companions(tuple(siblings), path_of)


def _commit_of(info: ModelInfo | DatasetInfo, repo: str) -> str:
    if not _COMMIT.fullmatch(info.sha or ""):
        raise UserError(f"{constants.ENDPOINT} names no commit for {repo}; is HF_ENDPOINT really a Hub?")
    return str(info.sha)


def _fetch(
    reference: Reference, repo: str, sibling: RepoSibling, commit: str, say: Announce, kind: str = "model"
) -> Path:
    """Download one file, or find it in the cache, and check it; a damaged one is downloaded once more."""
    name = sibling.rfilename
    call = functools.partial(hf_hub_download, repo, name, revision=commit, repo_type=kind)
    if not (_repo_folder(repo, kind) / "snapshots" / commit / name).exists():
        say(f"downloading {name}{_size(sibling)} from {repo} at {commit[:12]}")
    path = Path(_ask(call, reference, repo, name))
    if _intact(path, sibling):
        return path
    say(f"{name} of {repo} is damaged in the cache; downloading it again")
    path = Path(_ask(functools.partial(call, force_download=True), reference, repo, name))
    if _intact(path, sibling):
        return path
    path.unlink(missing_ok=True)  # or the cache would serve it offline
    raise UserError(
        f"{name} of {repo} arrives damaged: its hash is not the one that the Hub lists; try again later"
    )


def _intact(path: Path, sibling: RepoSibling) -> bool:
    """Whether a file has the hash that the Hub lists: SHA-256 for large files, else that of git's blob."""
    if sibling.lfs is not None:
        return sha256_of(path) == sibling.lfs.sha256
    if sibling.blob_id is not None:
        return _digest(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size)) == sibling.blob_id
    return True


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def _size(sibling: RepoSibling) -> str:
    if sibling.size is None:
        return ""
    return f" ({sibling.size / 1e6:.1f} MB)" if sibling.size >= 1e6 else f" ({sibling.size / 1e3:.1f} kB)"


def _repo_folder(repo: str, kind: str = "model") -> Path:
    """The client's cache of a repository: ``refs/<revision>`` hold commits, ``snapshots/<commit>`` files."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type=kind)


def _remember(repo: str, revision: str | None, commit: str, kind: str = "model") -> None:
    """Note which commit a branch or tag was; the client does not where a download names the commit itself."""
    ref = _repo_folder(repo, kind) / "refs" / (revision or constants.DEFAULT_REVISION)
    if _COMMIT.fullmatch(ref.name):
        return
    with contextlib.suppress(OSError):  # a cache that is read-only still serves
        if not ref.is_file() or ref.read_text() != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            files.write_bytes(ref, commit.encode())


def _announce_change(repo: str, revision: str | None, commit: str, say: Announce) -> None:
    before = _snapshot(repo, revision)
    if before is not None and before.name != commit:
        say(f"{repo} has changed on the Hub: commit {commit[:12]} now, {before.name[:12]} in the cache")


def _snapshot(repo: str, revision: str | None, kind: str = "model") -> Path | None:
    """Folder of the cached commit of a revision, if it holds files; its name is the commit."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, repo_type=kind, local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)  # some of its files may be there all the same
        if partial is None:
            return None
        folder = Path(partial)
    return folder if any(each.is_file() for each in folder.rglob("*")) else None


def _from_cache(reference: Reference, why: _UnreachableError, say: Announce) -> Downloaded:
    for repo in candidates(reference):
        folder = _snapshot(repo, reference.revision)
        if folder is None:
            continue
        names = [each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()]
        file = choose_file(names, f"the cached copy of {repo}", reference.file)
        say(f"{why.reason}: using the cached copy of {repo}, commit {folder.name[:12]}")
        card = folder / CARD
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
        companions = Companions(tuple(names), folder.joinpath)
        return Downloaded(folder / file, repo, folder.name, file, text, companions, offline=True)
    wanted = f"{reference.repo}@{reference.revision}" if reference.revision else reference.repo
    meant = nearest_here(reference.text)
    here = (
        f", nor is there such a file or folder here{meant}" if meant or is_in_folder(reference.text) else ""
    )
    raise UserError(f"{why.reason}, and {wanted} is not in the cache{here}; {why.advice}")


class _Relay(logging.Handler):
    """Turns the client's warnings (retries, waiting) into announcements."""

    def __init__(self, say: Announce) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"Hub: {record.getMessage().splitlines()[0]}")


@contextlib.contextmanager
def relayed(say: Announce) -> Iterator[None]:
    """Keep the client's warnings off stderr, where an error must stand alone."""
    logger = logging.getLogger("huggingface_hub")
    before, logger.handlers = logger.handlers, [_Relay(say)]
    try:
        yield
    finally:
        logger.handlers = before


def _ask(call: Callable[[], T], reference: Reference, repo: str, file: str | None = None) -> T:
    """Call the client, again while the Hub has passing trouble; whatever it raises becomes a UserError."""
    for wait in (*WAITS_SECONDS, None):
        try:
            return call()
        except Exception as error:  # the client raises errors of three libraries, and plain ones
            if wait is None or not passing(error, wait):
                raise _translated(error, reference, repo, file) from error
        time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def passing(error: Exception, wait: float) -> bool:
    """Whether it makes sense to ask again after ``wait`` seconds."""
    if not isinstance(error, errors.HfHubHTTPError) or error.response.status_code not in _TRANSIENT:
        return False
    after = error.response.headers.get("Retry-After", "0")
    return not after.isdigit() or int(after) <= wait


def _translated(error: Exception, reference: Reference, repo: str, file: str | None) -> UserError:
    """One line for a user: what happened to which repository, and what to do."""
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # "not cached either" hides why the Hub did not answer
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{repo} is gated: accept its terms on the Hub, then {LOGIN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo} has no revision {reference.revision!r}; give a branch, tag or commit of it")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return UserError(f"{repo} lists {file!r} but does not serve it; try again later")
    if isinstance(error, errors.RepositoryNotFoundError):
        return _MissingError(f"no Hub repository {repo}")
    if isinstance(error, errors.HfHubHTTPError):
        return _status_error(error, repo)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _UnreachableError("offline mode is on (HF_HUB_OFFLINE)", f"go online, or use {_ELSEWHERE}")
    if isinstance(error, OSError) and error.errno is not None:
        what = f"{file} of {repo}" if file else repo
        return UserError(
            f"cannot store {what} in {constants.HF_HUB_CACHE} ({error.strerror}); check its room and rights"
        )
    why = "no answer in time" if "Timeout" in type(error).__name__ else first_line(error)
    if file is not None:
        return UserError(f"the download of {file} from {repo} failed ({why}); try again")
    if isinstance(error, HTTP_ERROR):
        at = f"cannot reach the Hub at {constants.ENDPOINT} ({why})"
        return _UnreachableError(at, f"check the network, or use {_ELSEWHERE}")
    return UserError(
        f"{constants.ENDPOINT} does not answer like a Hub when asked for {repo} ({why}); "
        "check HF_ENDPOINT and the proxy"
    )


#: Base of all errors of the client's HTTP library (its name differs between versions of the client).
HTTP_ERROR: type[Exception] = next(
    base for base in errors.HfHubHTTPError.__mro__[1:] if base.__name__ == "HTTPError"
)


def _status_error(error: errors.HfHubHTTPError, repo: str) -> UserError:
    status = error.response.status_code
    if status == 401 and "Invalid credentials" in str(error):
        return UserError(f"the Hub refuses the access token when asked for {repo}; {LOGIN} anew")
    if status in (401, 404):  # 401 is also what the Hub says of a repository that does not exist
        return _MissingError(f"no Hub repository {repo}")
    if status == 403:
        return UserError(f"the Hub denies access to {repo} ({error.server_message or 403}); {LOGIN}")
    if status == 429:
        after = error.response.headers.get("Retry-After")
        when = f"in {after} seconds" if after else "later"
        return _UnreachableError(f"the Hub limits requests for {repo} (429)", f"try again {when}, or {LOGIN}")
    if status in _TRANSIENT or status >= 500:
        return _UnreachableError(f"the Hub has trouble serving {repo} (status {status})", "try again later")
    return UserError(f"the Hub answered {status} when asked for {repo} ({first_line(error)})")


def first_line(error: Exception) -> str:
    """What an error says, shortly."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
