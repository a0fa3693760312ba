"""Join the pages into one ASGI application."""

from __future__ import annotations

import mimetypes
from collections.abc import Hashable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from simpletune.apps.http import Guard
from simpletune.apps.web import data_page, run_page, runs_page, start
from simpletune.apps.web.access import FAILED, HEADERS, Access
from simpletune.apps.web.events import FileWatcher, changes, events
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.templates import SHARED, TEMPLATES, render
from simpletune.system.locks import is_held
from simpletune.system.options import UserError

PAGES = (runs_page, start, data_page, run_page)
"""Each has ``routes() -> list[Route]`` and ``stamps(roots, runs) -> dict[str, Hashable]``."""
STATIC = {
    "base.css": SHARED, "app.css": TEMPLATES, "app.js": TEMPLATES, "htmx.min.js": TEMPLATES,
    "start.js": TEMPLATES, "run.js": TEMPLATES,
}  # fmt: skip
KEEP = {"cache-control": "max-age=60"}  # seconds: saves requests, and an update shows within a minute


def make_app(roots: Roots, access: Access) -> tuple[ASGIApp, FileWatcher]:
    """Build the application; pages find the roots as ``request.app.state.roots``.

    Returns:
        The application, and the watch over its files, which must be closed before the server stops.
    """
    routes = [Route("/events", events), Route("/changes", changes), Route("/static/{name}", static)]
    for page in PAGES:
        routes += page.routes()
    app = Starlette(routes=routes, exception_handlers={UserError: problem, HTTPException: problem})
    app.router.redirect_slashes = False

    def look() -> dict[str, Hashable]:
        runs = [(folder, is_held(folder)) for folder in roots.all_runs()]
        return {topic: stamp for page in PAGES for topic, stamp in page.stamps(roots, runs).items()}

    watch = FileWatcher(look)
    app.state.roots, app.state.watch = roots, watch
    return Guard(app, access.hosts, plain_answer, FAILED, HEADERS, access.refusal), watch


def plain_answer(status: int, message: str) -> Response:
    """Answer before or without a page."""
    return PlainTextResponse(message, status)


async def static(request: Request) -> Response:
    """GET /static/NAME: styles and scripts."""
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404)
    return FileResponse(STATIC[name] / name, media_type=mimetypes.guess_type(name)[0], headers=KEEP)


def problem(request: Request, error: Exception) -> Response:
    """Show a user's mistake, an unknown path or a wrong method, on a separate page or as a part in the place that sent
    the request."""
    status, message, headers = 422, str(error), None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    is_part = request.headers.get("hx-request") == "true"
    response = render(request, "problem_part.html" if is_part else "problem.html", status, message=message)
    response.headers.update(headers or {})
    return response
