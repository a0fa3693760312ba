"""An S3-compatible server for tests (moto's), and a proxy in front of it that injects faults."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

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


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer's content would wait 40 ms for the client to confirm its headers
    target: int
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
        upstream = http.client.HTTPConnection("127.0.0.1", self.target, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault == "short" and content and self.command == "GET":
            content = content[: len(content) // 2]  # a whole answer of the wrong length
        if fault == "rot" and content and self.command == "GET":
            content = _rotten(content)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault == "cut":
            content = content[: len(content) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)
        if fault == "cut":
            self.connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def serving(faults: Faults | None = None) -> Iterator[str]:
    """Run a server with one empty bucket, and yield its URL (``http://...``). With faults, that of the proxy."""
    import logging

    from moto.server import ThreadedMotoServer

    from simpletune.system.stores import object_store

    soon = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=10), "base": 2}
    retries, object_store.RETRIES = object_store.RETRIES, {**object_store.RETRIES, "backoff": soon}  # type: ignore[typeddict-item]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    for path in ("/moto-api/reset", f"/{BUCKET}"):
        method = "POST" if "reset" in path else "PUT"
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)).close()
    proxy = None
    if faults is not None:
        handler = type("Proxy", (_Proxy,), {"target": port, "faults": faults})
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port if proxy else port}"
    finally:
        object_store.RETRIES = retries
        if proxy is not None:
            proxy.shutdown()
        with suppress(Exception):  # its thread may hang on an open connection; it is a daemon
            server.stop()


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
