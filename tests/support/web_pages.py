"""The pages of ``simpletune web`` without a server: a client in this process, on the test's own folders."""

from __future__ import annotations

from pathlib import Path

import httpx
from starlette.testclient import TestClient

from simpletune.apps.web.access import Access
from simpletune.apps.web.app import make_app
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
