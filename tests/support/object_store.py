"""An S3-compatible server for tests (moto's), which injects faults."""

from __future__ import annotations

import sys
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Literal
from urllib.parse import unquote

import pytest

BUCKET = "bucket"
Fault = Literal["error", "cut", "short", "slow", "rot", "refused"]


class Faults:
    """Chooses a fault for each request, and counts them.

    Args:
        choose: maps (number of the request, method, path) to a fault, or None.
    """

    def __init__(self, choose: Callable[[int, str, str], Fault | None] = lambda number, method, path: None):
        self.choose, self.seen, self.injected = choose, 0, 0
        self._lock = threading.Lock()

    def next(self, method: str, path: str) -> Fault | None:
        """The fault of a request."""
        with self._lock:
            self.seen += 1
            fault = self.choose(self.seen, method, path)
            self.injected += fault is not None
            return fault


def _rotten(content: bytes) -> bytes:
    """The content with one bit flipped."""
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


class _Handler(BaseHTTPRequestHandler):
    """Passes requests on to moto, which is a WSGI application: without a server of its own, each takes half as long."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer's content would wait 40 ms for the client to confirm its headers
    store: Callable[..., Iterable[bytes]]
    faults: Faults

    def _forward(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        fault = self.faults.next(self.command, self.path)
        if fault in ("error", "refused"):
            self.send_response(500 if fault == "error" else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "cut" and self.command != "GET":
            self.close_connection = True
            self.connection.close()
            return
        if fault == "slow":
            time.sleep(0.1)
        if fault == "rot" and self.command == "PUT" and body:
            body = _rotten(body)
            wanted = self.headers.get("x-amz-checksum-sha256")
            if wanted and wanted != b64encode(sha256(body).digest()).decode():  # what S3 answers, and moto does not
                self.send_response(400)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        status, headers, content = self._answer(body)
        if fault == "short" and content and self.command == "GET":
            content = content[: len(content) // 2]  # a whole answer of the wrong length
        if fault == "rot" and content and self.command == "GET":
            content = _rotten(content)
        self.send_response(status)
        for name, value in headers.items():
            if name not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if fault == "cut":
            content = content[: len(content) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)
        if fault == "cut":
            self.connection.close()

    def _answer(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """The status, headers (with names in lower case) and content with which the store answers."""
        path, _, query = self.path.partition("?")
        given = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in self.headers.items()}
        environment = given | {
            "REQUEST_METHOD": self.command, "SCRIPT_NAME": "", "PATH_INFO": unquote(path, "latin-1"),
            "QUERY_STRING": query, "RAW_URI": self.path, "REQUEST_URI": self.path, "SERVER_PROTOCOL": "HTTP/1.1",
            "SERVER_NAME": "127.0.0.1", "SERVER_PORT": str(self.server.server_address[1]), "REMOTE_ADDR": "127.0.0.1",
            "CONTENT_TYPE": given.get("HTTP_CONTENT_TYPE", ""), "CONTENT_LENGTH": str(len(body)),
            "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.input": BytesIO(body), "wsgi.errors": sys.stderr,
            "wsgi.multithread": True, "wsgi.multiprocess": False, "wsgi.run_once": False,
        }  # fmt: skip
        begun: list[tuple[str, list[tuple[str, str]]]] = []
        parts = self.store(environment, lambda status, headers, error=None: begun.append((status, headers)))
        content = b"".join(parts)
        ((status, headers),) = begun
        return int(status.split()[0]), {name.lower(): value for name, value in headers}, content

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def serving(faults: Faults | None = None) -> Iterator[str]:
    """Run a server with one empty bucket, and yield its URL (``http://...``)."""
    from moto.backends import get_backend
    from moto.server import create_backend_app

    from simpletune.system.stores import object_store

    soon = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=10), "base": 2}
    retries, object_store.RETRIES = object_store.RETRIES, {**object_store.RETRIES, "backoff": soon}  # type: ignore[typeddict-item]
    get_backend("s3").reset()
    handler = type("Handler", (_Handler,), {"store": staticmethod(create_backend_app("s3")), "faults": Faults()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
    handler.faults = faults or handler.faults
    try:
        yield url
    finally:
        object_store.RETRIES = retries
        server.shutdown()
        server.server_close()


def settings(url: str) -> dict[str, str]:
    """The environment with which clients reach a server."""
    return {
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": url,
    }  # fmt: skip


@pytest.fixture(scope="module")
def faults() -> Faults:
    return Faults()


@pytest.fixture(scope="module")
def server(faults: Faults) -> Iterator[str]:
    """The URL of a server whose requests the test makes fail by ``faults.choose``."""
    with serving(faults) as url:
        yield url


@pytest.fixture
def reached(server: str, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients in this process use the server."""
    for name, value in settings(server).items():
        monkeypatch.setenv(name, value)
    yield
    faults.choose = lambda number, method, path: None
