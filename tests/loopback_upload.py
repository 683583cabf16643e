"""The upload half of the loopback Hub: what ``create_repo``, ``create_branch`` and ``create_commit`` use.

- ``POST /api/repos/create``, ``/api/models/{repo}/branch/{branch}``, ``/api/validate-yaml``.
- ``POST /api/models/{repo}/preupload/{rev}``: which files are large (here: with a NUL byte in their sample).
- ``POST /{repo}.git/info/lfs/objects/batch``: where to PUT each large file that is not there yet (the
  CDN), and where to have it verified.
- ``POST /api/models/{repo}/commit/{rev}``: lines of JSON (header, file, lfsFile, deletedFile).

A client that has ``hf_xet`` uses another protocol for large files, unless ``HF_HUB_DISABLE_XET`` is set.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import yaml

from loopback_repository import TOKEN, Blob, Repository

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

Answer = tuple[int, dict[str, Any]]


class Uploads:
    """Answers one request of ``hub``, made with ``token``."""

    def __init__(self, hub: LoopbackHub, token: str | None) -> None:
        self.hub, self.token = hub, token

    def answer(self, path: str, body: bytes) -> Answer:
        """Status and JSON."""
        if path.startswith("/upload/"):  # on the CDN, which asks for no token
            return self._put(path.removeprefix("/upload/"), body)
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if self.token is None:
            return 401, {"error": "Invalid username or password."}
        if self.token != TOKEN:
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if ".git/info/lfs/" in path:
            return self._lfs(path[1:].partition(".git/")[0], path, json.loads(body))
        owner, name, action, revision = path.removeprefix("/api/models/").split("/", 3)
        return self._change(f"{owner}/{name}", action, unquote(revision), body)

    def _validate(self, content: str) -> Answer:
        _, front, _ = content.split("---\n", 2)
        if not isinstance(yaml.safe_load(front), dict):
            return 400, {"errors": [{"message": "metadata is no map"}], "warnings": []}
        return 200, {"errors": [], "warnings": []}

    def _refused(self, repo: str) -> Answer | None:
        if repo.partition("/")[0] in self.hub.owners:
            return None
        return 403, {"error": "You don't have the rights to write to this namespace"}

    def _create(self, wanted: dict[str, Any]) -> Answer:
        repo = f"{wanted['organization']}/{wanted['name']}"
        if refused := self._refused(repo):
            return refused
        url = f"{self.hub.endpoint}/{repo}"
        if repo in self.hub.repositories:
            return 409, {"error": "You already created this model repo", "url": url}
        private = wanted.get("visibility") == "private"
        files = {".gitattributes": b"*.safetensors filter=lfs\n"}
        self.hub.repositories[repo] = Repository(files, private=private)
        return 200, {"url": url, "id": repo}

    def _change(self, repo: str, action: str, revision: str, body: bytes) -> Answer:
        repository = self.hub.repositories.get(repo)
        if repository is None:
            return 404, {"error": "Repository not found"}
        if refused := self._refused(repo):
            return refused
        if action == "branch":
            if revision in repository.refs:
                return 409, {"error": "Reference already exists"}
            repository.refs[revision] = repository.refs["main"]
            return 200, {}
        if revision not in repository.refs:
            return 404, {"error": f"Invalid rev id: {revision}"}
        if action == "preupload":
            return self._preupload(repository, revision, json.loads(body)["files"])
        return self._commit(repo, repository, revision, [json.loads(line) for line in body.splitlines()])

    def _preupload(self, repository: Repository, revision: str, files: list[dict[str, Any]]) -> Answer:
        there = repository.commits[repository.refs[revision]]
        modes = []
        for file in files:
            large = b"\0" in base64.b64decode(file["sample"])
            oid = there[file["path"]].git_sha1 if file["path"] in there and not large else None
            mode = "lfs" if large else "regular"
            modes.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": modes}

    def _lfs(self, repo: str, path: str, body: dict[str, Any]) -> Answer:
        if refused := self._refused(repo):
            return refused
        if path.endswith("/verify"):
            blob = self.hub.blobs.get(body["oid"])
            right = blob is not None and len(blob.content) == body["size"]
            return (200, {}) if right else (404, {"error": "no such object"})
        assert "basic" in body["transfers"]
        objects = [
            {"oid": each["oid"], "size": each["size"]}
            | ({} if each["oid"] in self.hub.blobs else {"actions": self._actions(repo, each["oid"])})
            for each in body["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def _actions(self, repo: str, oid: str) -> dict[str, Any]:
        verify = f"{self.hub.endpoint}/{repo}.git/info/lfs/objects/verify"
        return {"upload": {"href": f"{self.hub.cdn}/upload/{oid}"}, "verify": {"href": verify}}

    def _put(self, oid: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "the content has another hash"}
        self.hub.blobs[oid] = Blob(body, large=True)
        return 200, {}

    def _commit(
        self, repo: str, repository: Repository, revision: str, lines: list[dict[str, Any]]
    ) -> Answer:
        files = {name: blob.content for name, blob in repository.commits[repository.refs[revision]].items()}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]].content
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.push(files, revision)
        url = f"{self.hub.endpoint}/{repo}/commit/{commit}"
        return 200, {"success": True, "commitOid": commit, "commitUrl": url}
