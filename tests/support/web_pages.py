"""The pages of ``web`` in this process, on the test's own folders: clients without a server, and a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from serving import until
from starlette.testclient import TestClient

from simpletune.apps.http import HttpServer, bind
from simpletune.apps.web.access import Access
from simpletune.apps.web.app import PageServer, make_app
from simpletune.apps.web.roots import make_roots

ADDRESS = "http://127.0.0.1:8100"
HOSTS = {"127.0.0.1", "localhost"}


def open_pages(folder: Path, runs: str = "runs", token: str | None = None) -> TestClient:
    """Return a client of the pages whose root is ``folder``, with the header that a browser sends with its forms."""
    app, _ = make_app(make_roots(folder / runs, [folder]), Access(HOSTS, token))
    return TestClient(app, base_url=ADDRESS, headers={"origin": ADDRESS}, follow_redirects=False)


def many_pages(folder: Path) -> httpx.AsyncClient:
    """Return a client of the same pages for hundreds of requests: one event loop serves them all."""
    app, _ = make_app(make_roots(folder / "runs", [folder]), Access(HOSTS, None))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=ADDRESS, headers={"origin": ADDRESS})


@contextmanager
def pages_served(folder: Path) -> Iterator[PageServer]:
    """A server of the pages, in a thread."""
    bound = bind("127.0.0.1", 0)
    server = PageServer(*make_app(make_roots(folder / "runs", [folder]), Access({"127.0.0.1"})))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield server
    server.watch.close()
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def address_of(server: HttpServer) -> tuple[str, int]:
    """Host and port of a server that runs."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return host, port
