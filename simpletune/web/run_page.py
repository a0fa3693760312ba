"""The page of a run: the parts of ``running`` and ``after`` on one page."""

from __future__ import annotations

from collections.abc import Hashable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletune.web.after import after_of, comparisons_of, jobs_of
from simpletune.web.pictures import matrix_of
from simpletune.web.roots import Roots
from simpletune.web.running import drawing_defaults, log_of, now_of, requests_of, run_of
from simpletune.web.templates import render


def routes() -> list[Route]:
    """Return the page's route."""
    return [Route("/run/{name}", page)]


def stamps(roots: Roots) -> dict[str, Hashable]:
    """Return no topics: those of the parts do."""
    return {}


def page(request: Request) -> Response:
    """GET /run/NAME: the page."""
    folder = run_of(request)
    values = {**after_of(request, folder), **now_of(folder), **requests_of(folder), **log_of(request, folder)}
    return render(
        request, "run.html", matrix=matrix_of(folder), drawing=drawing_defaults(folder), jobs=jobs_of(request, folder),
        comparisons=comparisons_of(folder), **values,
    )  # fmt: skip
