"""A plain file server that supports ranges."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    requests: list[tuple[str, str]]

    def do_GET(self) -> None:
        """Answer with a file or a range of it."""
        self.requests.append((self.command, self.path))
        try:
            with open(self.folder / self.path.lstrip("/"), "rb") as file:
                self._send(file.fileno(), os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def _send(self, file: int, size: int) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        self.wfile.flush()
        if self.command == "HEAD":
            return
        while begin < end:
            begin += os.sendfile(self.connection.fileno(), file, begin, end - begin)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def serving_ranges(folder: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serve a folder; yield its URL and the requests, as they come."""
    requests: list[tuple[str, str]] = []
    handler = type("Files", (_Files,), {"folder": folder, "requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
