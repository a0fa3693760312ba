"""An HTTP server on 127.0.0.1 that behaves like the hub: listings, files with ranges, and its failures."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Kind = TypeVar("Kind", bound="FakeHub")
TOKEN = "hf_SecretOfTheTest"
XET = "/xet"  # path of the store of large files


@dataclass
class Failure:
    """How the hub fails: with a status and the hub's error code, or without a response.

    Args:
        status: of the answer, or ``close`` (the connection ends), ``reset`` (it breaks) or ``stall`` (nothing comes).
        code: the X-Error-Code header.
        on: ``api`` (listings), ``resolve`` (files) or ``weights`` (large files).
        method: that fails; empty: all.
        times: how often; None: always.
        message: the X-Error-Message header; it repeats the token, as a careless proxy might.
    """

    status: int | str
    code: str | None = None
    on: str = "api"
    method: str = ""
    times: int | None = None
    message: str = f"no access for {TOKEN}"


@dataclass
class FakeHub:
    """The hub's files and behaviour.

    Args:
        files: of the one repository, by path.
        failure: to return instead of a response.
        cut_at: GET of a large file is cut after this many bytes; None: never.
        cuts: how many times.
        delay: seconds before an answer.
        damage: large files hold zeros.
        short: large files lack their last byte, and Content-Length says so.
        xet: large files are in Xet, whose store never answers (``stalls``) or refuses (``refuses``), or for which no
            token comes (``no token``); empty: they are not in Xet.
        requests: (method, path, range, token seen) of every request so far.
        sent: bytes of each file sent so far.
    """

    files: dict[str, bytes]
    name: str = "owner/tiny-sd3"
    failure: Failure | None = None
    cut_at: int | None = None
    cuts: int = 0
    delay: float = 0.0
    damage: bool = False
    short: bool = False
    xet: str = ""
    url: str = ""
    requests: list[tuple[str, str, str | None, bool]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def fetched(self) -> set[str]:
        """Paths of files that were asked for with GET."""
        return {path.split(f"/resolve/{COMMIT}/")[1] for method, path, _, _ in self.requests if "/resolve/" in path}

    def listing(self) -> bytes:
        """The answer to /api/models/owner/name?blobs=true, or of data sets."""
        siblings = [{"rfilename": path, "size": len(data), **_blob(path, data)} for path, data in self.files.items()]
        return json.dumps({"id": self.name, "sha": COMMIT, "siblings": siblings}).encode()


def is_large(path: str) -> bool:
    """Whether a file is in large-file storage, where its etag is its sha256."""
    return path.endswith((".safetensors", ".bin"))


def _blob(path: str, data: bytes) -> dict[str, object]:
    git = {"blobId": hashlib.sha1(data).hexdigest()}
    lfs = {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}
    return git | (lfs if is_large(path) else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:  # noqa: N802
        self.answer(body=False)

    def do_GET(self) -> None:  # noqa: N802
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.hub, unquote(self.path.split("?")[0])
        seen = TOKEN in (self.headers.get("authorization") or "")
        hub.requests.append((self.command, path, self.headers.get("range"), seen))
        time.sleep(hub.delay)
        kind = "api" if path.startswith("/api/") else "resolve"
        failure = hub.failure
        if failure is not None and failure.on in (kind, "weights" if is_large(path) else None):
            if failure.method in ("", self.command) and failure.times != 0:
                failure.times = None if failure.times is None else failure.times - 1
                return self.fail(failure)
        if path.startswith(XET):
            return self.fail(Failure(404) if hub.xet == "refuses" else Failure("stall"))
        if "/xet-read-token/" in path:
            return self.xet_token()
        if kind == "api":
            return self.account(seen) if path == "/api/whoami-v2" else self.api(path)
        self.file(path, body)

    def fail(self, failure: Failure) -> None:
        if isinstance(failure.status, str):
            return self.hang_up(failure.status)
        self.send_response(failure.status)
        if failure.code:
            self.send_header("X-Error-Code", failure.code)
        self.send_header("X-Error-Message", failure.message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def hang_up(self, how: str) -> None:
        self.close_connection = True
        if how == "stall":
            self.connection.settimeout(60)
            self.connection.recv(1)  # until the client hangs up
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.wfile.close()
        self.connection.close()

    def account(self, seen: bool) -> None:
        if not seen:
            return self.fail(Failure(401))
        access = {"type": "access_token", "accessToken": {"displayName": "test", "role": "read"}}
        data = json.dumps({"type": "user", "name": "tester", "auth": access}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def xet_token(self) -> None:
        if self.hub.xet == "no token":
            return self.fail(Failure("stall"))
        self.send_response(200)
        self.send_header("X-Xet-Cas-Url", self.hub.url + XET)
        self.send_header("X-Xet-Access-Token", "of the store")
        self.send_header("X-Xet-Token-Expiration", str(int(time.time()) + 3600))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def api(self, path: str) -> None:
        if path.split("/", 3)[-1].split("/revision/")[0] != self.hub.name:
            return self.fail(Failure(404, "RepoNotFound"))
        if "/revision/" in path and path.split("/revision/")[1] not in ("main", COMMIT):
            return self.fail(Failure(404, "RevisionNotFound"))
        data = self.hub.listing()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def file(self, path: str, body: bool) -> None:
        hub, name = self.hub, re.split(rf"/resolve/(?:main|{COMMIT})/", path)[-1]
        if name not in hub.files:
            return self.fail(Failure(404, "EntryNotFound"))
        data = hub.files[name]
        start = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        digest = hashlib.sha256(data) if is_large(name) else hashlib.sha1(data)
        self.send_header("ETag", f'"{digest.hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if hub.xet and is_large(name):
            self.send_header("X-Xet-Hash", digest.hexdigest())
            self.send_header("X-Xet-Refresh-Route", f"{hub.url}/api/models/{hub.name}/xet-read-token/{COMMIT}")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        data = (bytes(len(data)) if hub.damage and is_large(name) else data)[start:]
        if hub.short and is_large(name) and body:
            data = data[:-1]
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.send(name, data)

    def send(self, name: str, data: bytes) -> None:
        hub = self.hub
        if hub.cut_at is not None and hub.cuts and is_large(name) and len(data) > hub.cut_at:
            hub.cuts -= 1
            data = data[: hub.cut_at]
            self.close_connection = True
        hub.sent[name] = hub.sent.get(name, 0) + len(data)
        self.wfile.write(data)


@contextmanager
def serve(folder: Path, kind: type[Kind] = FakeHub, **more: bytes) -> Iterator[Kind]:
    """A hub that holds a folder's files.

    Args:
        folder: of the repository.
        kind: how it behaves.
        more: files by path, beside them.
    """
    files = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
    hub = kind(files | more)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # a client that has gone
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
