"""The pages as one ASGI application, and the server that runs it."""

from __future__ import annotations

import argparse
import mimetypes
import secrets
import signal
from collections.abc import Hashable
from types import FrameType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from simpletune.apps.http import Guard, HttpServer, bind, is_loopback, loopback_hosts, url_of
from simpletune.apps.web import data_page, hub_page, mask_page, queue, run_page, runs_page, start, upload_page
from simpletune.apps.web.access import FAILED, HEADERS, TOKEN, Access
from simpletune.apps.web.events import FileWatcher, changes, events
from simpletune.apps.web.roots import Roots, make_roots
from simpletune.apps.web.scans import Scans
from simpletune.apps.web.templates import TEMPLATES, render
from simpletune.apps.web.upload import Uploads, clean
from simpletune.system.console import say
from simpletune.system.locks import is_held
from simpletune.system.options import UserError
from simpletune.system.package import ASSETS

PAGES = (runs_page, start, hub_page, data_page, mask_page, run_page, upload_page)
"""Each has ``routes() -> list[Route]`` and ``stamps(roots, runs) -> dict[str, Hashable]``."""
STATIC = {
    "pages.css": ASSETS,
    "app.css": TEMPLATES,
    "app.js": TEMPLATES,
    "htmx.min.js": TEMPLATES,
    "start.js": TEMPLATES,
    "run.js": TEMPLATES,
    "runs.js": TEMPLATES,
    "icon.svg": TEMPLATES,
    "chart.js": TEMPLATES,
    "upload.js": TEMPLATES,
    "mask.js": TEMPLATES,
}
KEEP = {"cache-control": "max-age=60"}  # seconds: saves requests, and an update shows within a minute
CONNECTIONS = 256  # a browser keeps one for its events, and a few more while it loads a page


def run(args: argparse.Namespace) -> None:
    """Serve the pages until a signal arrives, as the arguments (``cli.serve.web_arguments``) say."""
    roots = make_roots(args.runs, args.root)
    bound = bind(args.host, args.port)
    local = is_loopback(bound)
    token = None if local and not args.token else secrets.token_urlsafe(24)
    scans = Scans(roots)
    app, watch = make_app(roots, Access(loopback_hosts(args.host) if local else None, token), scans)
    say(f"runs in {roots.runs}; pictures and configurations below {', '.join(map(str, roots.named))}")
    if not local:
        say("warning: other machines can reach this page, and nothing is encrypted: use it in a network that you trust")
    say(f"open {url_of(bound)}{f'?{TOKEN}={token}' if token else ''}")
    clean(roots)
    queue.ensure_runner(roots)  # after a restart of the machine, before anyone opens a page
    try:
        PageServer(app, watch).run(sockets=[bound])
    finally:
        scans.close()
        clean(roots)


class PageServer(HttpServer):
    """A server that ends its event streams when it stops; otherwise open pages would keep it running forever."""

    def __init__(self, app: ASGIApp, watch: FileWatcher):
        super().__init__(app, CONNECTIONS, grace=3)
        self.watch = watch

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; runs and the queue continue."""
        say(f"{signal.Signals(sig).name}: the page stops; runs and the queue continue")
        self.watch.close()
        super().handle_exit(sig, frame)


def make_app(roots: Roots, access: Access, scans: Scans | None = None) -> tuple[ASGIApp, FileWatcher]:
    """Build the application, in which pages find the roots as ``request.app.state.roots``, and the watch over files,
    which must be closed before the server stops."""
    routes = [Route("/events", events), Route("/changes", changes), Route("/static/{name}", static)]
    for page in PAGES:
        routes += page.routes()
    app = Starlette(routes=routes, exception_handlers={UserError: problem, HTTPException: problem})
    app.router.redirect_slashes = False

    def look() -> dict[str, Hashable]:
        runs = [(folder, is_held(folder)) for folder in roots.all_runs()]
        return {topic: stamp for page in PAGES for topic, stamp in page.stamps(roots, runs).items()}

    watch = FileWatcher(look)
    app.state.roots, app.state.watch, app.state.uploads = roots, watch, Uploads(roots)
    app.state.scans = scans or Scans(roots)
    return Guard(app, access.hosts, PlainTextResponse, FAILED, HEADERS, access.refusal), watch


async def static(request: Request) -> Response:
    """Send a style or a script."""
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404)
    return FileResponse(STATIC[name] / name, media_type=mimetypes.guess_type(name)[0], headers=KEEP)


def problem(request: Request, error: Exception) -> Response:
    """Show a user's mistake, an unknown path or a wrong method, on a separate page or as a part in the place that sent
    the request, or as JSON for a script."""
    status, message, headers = 422, str(error), None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    if request.headers.get("accept") == "application/json":
        return JSONResponse({"problem": message}, status, headers or {"connection": "close"})
    is_part = request.headers.get("hx-request") == "true"
    response = render(request, "problem_part.html" if is_part else "problem.html", status, message=message)
    response.headers.update(headers or {})
    return response
