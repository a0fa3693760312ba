"""All runs: a table with pictures, the settings that differ, figures."""

from __future__ import annotations

from collections.abc import Hashable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletune.web.roots import Roots
from simpletune.web.run_state import stamp, state_of
from simpletune.web.templates import render


def routes() -> list[Route]:
    """Return the page's routes."""
    return [Route("/", all_runs), Route("/runs/table", table)]


def stamps(roots: Roots) -> dict[str, Hashable]:
    """Return the stamps of the topics ``run:NAME`` and ``runs``."""
    found: dict[str, Hashable] = {f"run:{folder.name}": stamp(folder) for folder in roots.all_runs()}
    return {**found, "runs": tuple(found.items())}


def all_runs(request: Request) -> Response:
    """GET /: the page."""
    return render(request, "all_runs.html", runs=_rows(request))


def table(request: Request) -> Response:
    """GET /runs/table: the table alone, when something has changed."""
    return render(request, "all_runs_table.html", runs=_rows(request))


def _rows(request: Request) -> list[object]:
    return [state_of(folder) for folder in request.app.state.roots.all_runs()]
