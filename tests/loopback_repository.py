"""What the loopback Hub holds: repositories, their commits, and the files of these."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

#: The one access token that the Hub takes.
TOKEN = "hf_loopback"


@dataclass(frozen=True)
class Blob:
    """One version of one file."""

    content: bytes
    large: bool  # stored apart from git, as the Hub does with binary files

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def in_git(self) -> bytes:
        """What git itself stores: the file, or the pointer to a large one."""
        if not self.large:
            return self.content
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}")
        return "\n".join((*lines, f"size {len(self.content)}", "")).encode()

    @cached_property
    def git_sha1(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.in_git) + self.in_git).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.git_sha1

    def listed(self, sha256_name: str) -> dict[str, Any]:
        """Size and, if large, the LFS entry; its hash is ``sha256`` in information and ``oid`` in a tree."""
        entry: dict[str, Any] = {"size": len(self.content)}
        if self.large:
            pointer = len(self.in_git)
            entry["lfs"] = {sha256_name: self.sha256, "size": len(self.content), "pointerSize": pointer}
        return entry


class Repository:
    """Commits of one repository; ``files`` is the first one, on branch main."""

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        moved_to: str | None = None,
        private: bool = False,
        gated: bool = False,
        large: bool | None = None,  # None: files with a NUL byte
    ) -> None:
        self.commits: dict[str, dict[str, Blob]] = {}
        self.refs: dict[str, str] = {}
        self.moved_to, self.private, self.gated, self._large = moved_to, private, gated, large
        if files is not None:
            self.push(files)

    def push(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit that holds exactly ``files`` and move a branch there; returns its hash."""
        contents = sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items())
        commit = hashlib.sha1(f"{len(self.commits)} {contents}".encode()).hexdigest()
        self.commits[commit] = {
            name: Blob(data, b"\0" in data if self._large is None else self._large)
            for name, data in files.items()
        }
        self.refs[branch] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        """Commit of a branch, tag or (abbreviated) commit."""
        found = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        return self.refs.get(revision) or (found[0] if found else None)
