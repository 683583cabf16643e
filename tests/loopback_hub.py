"""A small Hub on the loopback interface, for tests of code that uses the real ``huggingface_hub``.

It speaks the part of the Hub's HTTP protocol that the client's downloads use:

- ``GET /api/models/{repo}[/revision/{rev}][?blobs=true]``: commit, files, sizes and hashes;
  ``GET /api/models/{repo}/tree/{rev}``: the same as a listing.
- ``HEAD | GET /{repo}/resolve/{rev}/{file}``: small text files directly, with ``ETag`` (git's blob hash),
  ``X-Repo-Commit`` and ``Content-Length``; large or binary files as a 302 to a second server on another port,
  as the Hub sends clients to its CDN, with ``X-Linked-Etag`` (SHA-256) and ``X-Linked-Size``. Ranges work.
- The same of a dataset: ``/api/datasets/...``, ``/datasets/{repo}/resolve/...``; ``datasets/owner/name`` is
  its key among the repositories.
- 307 for renamed repositories; 404 with ``X-Error-Code``; 401 for repositories that are absent or private
  (the Hub does not tell them apart), 403 for gated ones.
- Uploads, by plain LFS (``loopback_upload``): creating repositories and branches, and commits.
- Faults on demand: any status for the first k requests, bodies cut short, delays.

Use in another process (the client reads its environment when it is imported)::

    with LoopbackHub({"cleanrl/x": Repository({"a.cleanrl_model": data})}) as hub:
        subprocess.run([...], env=os.environ | hub.env(tmp_path))

or in this one, with pytest's fixture: ``with hub.used(monkeypatch, tmp_path): ...``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from loopback_repository import TOKEN, Blob, Repository
from loopback_upload import Uploads


@dataclass
class Fault:
    """What happens to the next ``times`` requests whose method and path match."""

    match: str  # part of the path
    method: str = "GET"
    times: int = 1_000_000
    status: int | None = None  # answer this instead
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    keep_bytes: int | None = None  # send this much of the body, then hang up
    replace: bytes | None = None  # send this body instead, of the same length
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class Request:
    """One request that was answered."""

    method: str
    path: str
    cdn: bool
    range: str | None
    token: str | None


class LoopbackHub:
    """A Hub and its CDN, serving ``repositories`` while the context is open."""

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        self.repositories = dict(repositories)
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.absent_status = 401  # what the Hub answers without a token; 404 with one
        self.names_absence = True  # X-Error-Code on that answer
        self.blobs: dict[str, Blob] = {}
        self.owners = {"me"}  # namespaces that the token may write to
        self.messages: list[str] = []  # of the commits
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def __enter__(self) -> LoopbackHub:
        self._servers = [_Server(self, cdn=False), _Server(self, cdn=True)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering; the port then refuses connections."""
        self._closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
            server.hang_up()

    def env(self, home: Path) -> dict[str, str]:
        """Environment variables that point a new process's client here, with its caches below ``home``."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_CACHE": str(home / "hf" / "hub"),
            "HF_TOKEN": "",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    @contextlib.contextmanager
    def used(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[None]:
        """Inside, this process's client comes here, as if ``env`` had been there at its import."""
        from huggingface_hub import close_session, constants

        for name, value in self.env(home).items():
            monkeypatch.setenv(name, value)
        patched = {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home / "hf"),
            "HF_HUB_CACHE": str(home / "hf" / "hub"),
            "HF_TOKEN_PATH": str(home / "hf" / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "hf" / "stored_tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }
        for name, value in patched.items():
            monkeypatch.setattr(constants, name, value)
        close_session()  # its proxies and connections are another test's
        try:
            yield
        finally:
            close_session()

    def inject(self, match: str, **fault: Any) -> None:
        """Break the next requests whose path contains ``match``; see ``Fault``."""
        self.faults.append(Fault(match, **fault))

    def heal(self) -> None:
        """Forget all faults and all requests."""
        self.faults.clear()
        self.requests.clear()

    def paths(self, method: str | None = None) -> list[str]:
        """Paths of the requests so far, the CDN's included."""
        return [each.path for each in self.requests if method in (None, each.method)]

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault for this request, if one is left."""
        with self._lock:
            for fault in self.faults:
                if fault.match in path and fault.method in (method, "*") and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the end of the server (``time.sleep`` may be patched away)."""
        self._closing.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LoopbackHub, cdn: bool) -> None:
        self.hub, self.cdn = hub, cdn
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def hang_up(self) -> None:
        """End the connections that clients keep open; their threads would go on answering."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Answer(Exception):
    """Status, headers and body of an answer."""

    def __init__(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        super().__init__(status)
        self.status, self.headers, self.body = status, dict(headers or {}), body


def _error(status: int, code: str | None, message: str) -> _Answer:
    headers = {"Content-Type": "application/json", "X-Error-Message": message}
    if code is not None:
        headers["X-Error-Code"] = code
    return _Answer(status, headers, json.dumps({"error": message}).encode())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        self.server.connections.append(self.request)
        super().setup()

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the tests' output is not an access log."""

    @property
    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _answer(self) -> None:
        hub, self._url = self.server.hub, urlsplit(self.path)
        self.body = self._read_body()  # also where the answer is a fault: the next request follows it
        path = unquote(self._url.path)
        hub.requests.append(
            Request(self.command, path, self.server.cdn, self.headers.get("Range"), self._token)
        )
        fault = hub.take_fault(self.command, path)
        if fault is not None and fault.delay_seconds:
            hub.pause(fault.delay_seconds)
        try:
            if fault is not None and fault.status is not None:
                raise _Answer(fault.status, fault.headers, fault.body)
            self._route(path)
        except _Answer as answer:
            self._send(answer, fault)

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, answer: _Answer, fault: Fault | None) -> None:
        body = answer.body
        if fault is not None and fault.replace is not None:
            body = fault.replace
        try:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if self.command != "HEAD" or "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault is not None and fault.keep_bytes is not None:
                body, self.close_connection = body[: fault.keep_bytes], True
            self.wfile.write(body)
        except OSError:  # the client has gone, tired of waiting
            self.close_connection = True

    def _route(self, path: str) -> None:
        if self.command in ("POST", "PUT"):
            status, value = Uploads(self.server.hub, self._token).answer(path, self.body)
            headers = {"Content-Type": "application/json"}
            if isinstance(value.get("error"), str):
                headers["X-Error-Message"] = value["error"]
            raise _Answer(status, headers, json.dumps(value).encode())
        if self.server.cdn:
            self._send_blob(self.server.hub.blobs[path.removeprefix("/blob/")], {})
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"))
        elif path.startswith("/api/datasets/"):
            self._api(path.removeprefix("/api/datasets/"), "datasets/")
        elif "/resolve/" in path:
            self._resolve(path[1:])
        raise _error(404, None, "Not Found")

    def _api(self, rest: str, prefix: str = "") -> None:
        owner, name, *action = rest.split("/")
        repository = self._repository(f"{prefix}{owner}/{name}", gate=False)
        kind, revision = (action[0], "/".join(action[1:])) if action else ("revision", "main")
        commit = self._commit(repository, revision)
        files = repository.commits[commit]
        if kind == "tree":
            entries = [_tree_entry(path, blob) for path, blob in files.items()]
            raise _Answer(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())
        blobs = parse_qs(self._url.query).get("blobs", ["false"])[0].lower() == "true"
        info = {
            "id": f"{owner}/{name}",
            "sha": commit,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "siblings": [_sibling(path, blob, blobs) for path, blob in files.items()],
        }
        raise _Answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _repository(self, repo: str, gate: bool = True) -> Repository:
        hub = self.server.hub
        repository = hub.repositories.get(repo)
        if repository is not None and repository.moved_to is not None:
            raise _Answer(307, {"Location": self.path.replace(repo, repository.moved_to, 1)})
        if self._token not in (None, TOKEN):
            raise _error(401, None, "Invalid credentials in Authorization header")
        if repository is None or (repository.private and self._token is None):
            status = hub.absent_status if self._token is None else 404
            raise _error(status, "RepoNotFound" if hub.names_absence else None, "Repository not found")
        if gate and repository.gated:
            raise _error(403, "GatedRepo", f"Access to model {repo} is restricted")
        return repository

    def _commit(self, repository: Repository, revision: str) -> str:
        commit = repository.resolve(revision)
        if commit is None:
            raise _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _resolve(self, path: str) -> None:
        repo, _, rest = path.partition("/resolve/")
        repository = self._repository(repo)
        raw = self._url.path.partition("/resolve/")[2]  # the revision may hold an escaped slash
        revision = unquote(raw.partition("/")[0])
        commit = self._commit(repository, revision)
        blob = repository.commits[commit].get(rest.removeprefix(f"{revision}/"))
        if blob is None:
            answer = _error(404, "EntryNotFound", "Entry not found")
            answer.headers["X-Repo-Commit"] = commit
            raise answer
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.etag}"'}
        if not blob.large:
            self._send_blob(blob, headers)
        self.server.hub.blobs[blob.sha256] = blob
        linked = {
            "Location": f"{self.server.hub.cdn}/blob/{blob.sha256}",
            "X-Linked-Etag": f'"{blob.sha256}"',
            "X-Linked-Size": str(len(blob.content)),
        }
        raise _Answer(302, headers | linked)

    def _send_blob(self, blob: Blob, headers: Mapping[str, str]) -> None:
        headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
        wanted = self.headers.get("Range")
        if wanted is None:
            if self.command == "HEAD":
                headers["Content-Length"] = str(len(blob.content))
            raise _Answer(200, headers, blob.content)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, size = int(first), len(blob.content)
        end = min(int(last or size - 1), size - 1)
        if start > end:
            raise _Answer(416, {"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        raise _Answer(206, headers, blob.content[start : end + 1])


def _sibling(path: str, blob: Blob, blobs: bool) -> dict[str, Any]:
    details = {"blobId": blob.git_sha1} | blob.listed("sha256") if blobs else {}
    return {"rfilename": path} | details


def _tree_entry(path: str, blob: Blob) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": blob.git_sha1} | blob.listed("oid")
