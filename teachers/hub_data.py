"""Datasets of the Hugging Face Hub that hold a teacher buffer; the client and the care are those of hub.py.

A dataset repository holds what ``teachers collect`` wrote: ``manifest.json`` and the segments that it lists.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoSibling

from reincarnate.errors import UserError
from reincarnate.teachers.hub import (
    LOGIN,
    Announce,
    _ask,
    _commit_of,
    _fetch,
    _MissingError,
    _remember,
    _repo_folder,
    _snapshot,
    _UnreachableError,
    relayed,
)
from reincarnate.teachers.reference import Reference, is_safe_name

_DATASET = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?", re.ASCII)
_KIND = "dataset"


@dataclass(frozen=True)
class Dataset:
    """One commit of a dataset repository."""

    repo: str
    revision: str  # commit, 40 hex digits
    folder: Path  # where its files are, or will be
    _listed: Mapping[str, RepoSibling] | None  # None: the cache answered because the Hub did not
    _reference: Reference
    _say: Announce

    @property
    def exact(self) -> str:
        """A reference to this commit."""
        return f"{self.repo}@{self.revision}"

    def fetch(self, name: str, sha256: str | None = None) -> Path:
        """One of its files, downloaded if it is not in the cache, and checked against the Hub's hash.

        ``sha256``: what the file must be; where the Hub lists another hash, nothing is downloaded.

        Raises:
            UserError: no such file; another one than was asked for; a download that fails or stays damaged.
        """
        if self._listed is None:
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"{name} of {self.repo} is not in the cache; go online to download it")
            return path
        if name not in self._listed:
            raise UserError(
                f"dataset {self.repo} has no {name} at {self.revision[:12]}; it holds no teacher data"
            )
        sibling = self._listed[name]
        if sha256 is not None and sibling.lfs is not None and sibling.lfs.sha256 != sha256:
            raise UserError(
                f"{name} of dataset {self.repo} is not the one that its manifest lists (sha256 "
                f"{sibling.lfs.sha256[:12]}..., not {sha256[:12]}...); ask its owner to upload it again"
            )
        with relayed(self._say):
            return _fetch(self._reference, self.repo, sibling, self.revision, self._say, _KIND)


def is_dataset(text: str) -> bool:
    """Whether ``text`` can be ``owner/name[@revision]``; a folder of that name comes first."""
    return _DATASET.fullmatch(text) is not None and not text.startswith(".")


def find_dataset(text: str, announce: Announce | None = None) -> Dataset:
    """The dataset ``owner/name[@revision]``: one question to the Hub, no file is downloaded yet.

    When the Hub cannot be asked, the cache answers, and the announcement says so.

    Raises:
        UserError: no such dataset or revision, no permission, no network and nothing cached.
    """
    match = _DATASET.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is neither a folder nor a dataset owner/name[@revision] of the Hub")
    repo, revision = match["repo"], match["revision"]
    reference, say = Reference(text, "hub", repo, revision), announce or (lambda line: None)
    question = functools.partial(
        HfApi().dataset_info,
        repo,
        revision=revision,
        files_metadata=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )
    try:
        with relayed(say):
            info = _ask(question, reference, repo)
    except _MissingError:
        raise UserError(f"there is no dataset {repo} (if it is private, {LOGIN})") from None
    except _UnreachableError as unreachable:
        folder = _snapshot(repo, revision, _KIND)
        if folder is None:
            raise UserError(f"{unreachable.reason}, and dataset {text} is not in the cache") from None
        say(f"{unreachable.reason}: using the cached copy of dataset {repo}, commit {folder.name[:12]}")
        return Dataset(repo, folder.name, folder, None, reference, say)
    commit = _commit_of(info, repo)
    listed = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    for name in listed:
        if not is_safe_name(name):
            raise UserError(f"dataset {repo} lists a file with an unsafe name ({name!r}); refused")
    _remember(repo, revision, commit, _KIND)
    folder = _repo_folder(repo, _KIND) / "snapshots" / commit
    return Dataset(repo, commit, folder, listed, reference, say)
