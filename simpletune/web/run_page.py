"""The page of a run: the parts of ``running`` and ``after`` on one page."""

from __future__ import annotations

import os
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletune.system.locks import is_held
from simpletune.web import after, running
from simpletune.web.after import after_of, comparisons_of, jobs_of
from simpletune.web.pictures import matrix_of
from simpletune.web.processes import LOGS
from simpletune.web.roots import Roots
from simpletune.web.running import drawing_defaults, log_of, now_of, requests_of, run_of
from simpletune.web.templates import render


def routes() -> list[Route]:
    """Return the routes of the page and of its parts."""
    return [Route("/run/{name}", page), *running.routes(), *after.routes()]


def stamps(roots: Roots) -> dict[str, Hashable]:
    """Return the stamps of the topics of the parts, such as ``pictures:NAME``."""
    found: dict[str, Hashable] = {}
    logs = stamps_in(roots.own / LOGS)
    for folder in roots.all_runs():
        held = is_held(folder)
        parts = running.topics(folder, held, logs) | after.topics(roots, folder, held, logs)
        found |= {f"{topic}:{folder.name}": stamp for topic, stamp in parts.items()}
    return found


def stamps_in(folder: Path) -> dict[str, Hashable]:
    """Return a stamp of each file in a folder, by name."""
    found: dict[str, Hashable] = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:  # the folder, or a file that is being replaced
        for entry in entries:
            status = entry.stat()
            found[entry.name] = status.st_mtime_ns, status.st_size
    return found


def page(request: Request) -> Response:
    """GET /run/NAME: the page."""
    folder = run_of(request)
    values = {**after_of(request, folder), **now_of(folder), **requests_of(folder), **log_of(request, folder)}
    return render(
        request, "run.html", matrix=matrix_of(folder), drawing=drawing_defaults(folder), jobs=jobs_of(request, folder),
        comparisons=comparisons_of(folder), **values,
    )  # fmt: skip
