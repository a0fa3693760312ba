"""The page of all runs: a table with pictures, the settings that differ, and figures; and the queue."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from simpletune.apps.web import queue
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs, RunState, stamp, state_of
from simpletune.apps.web.templates import read_form, render
from simpletune.runs.attempts import attempts_of, total_seconds
from simpletune.runs.folder import SUMMARY, read_json_or_none
from simpletune.system.atomic import atomic_file
from simpletune.system.console import duration
from simpletune.system.locks import is_held
from simpletune.system.options import Json, UserError

THUMBNAILS, SIDE = "thumbnails", 176  # pixels
SAME = ("$schema", "version", "about", "name", "output", "tracking", "profile")  # settings that affect no figure
LISTED = 6  # settings of a run
LONGEST = 40  # characters of a setting
CACHED = 1000  # runs
Row = Mapping[str, object]


@dataclass(frozen=True)
class RunEntries:
    """A run's entries in the table that do not depend on other runs.

    Args:
        state: the run's state.
        settings: its settings as text, by path.
        best: best held-out loss, or loss at the end; None if unknown.
        peak: GiB of device memory; None if it was not measured.
        seconds: the seconds of all attempts.
        picture: the end of the thumbnail's address; empty if there is no picture.
    """

    state: RunState
    settings: Mapping[str, str]
    best: str
    peak: float | None
    seconds: float
    picture: str


def routes() -> list[Route]:
    """Return the page's routes."""
    return [
        Route("/", all_runs),
        Route("/runs/table", table),
        Route("/runs/queue", queue_part),
        Route("/runs/thumbnail/{name}", thumbnail),
        Route("/queue/{what}", change_queue, methods=["POST"]),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics ``run:NAME`` and ``runs``."""
    found: dict[str, Hashable] = {f"run:{folder.name}": stamp(folder, held) for folder, held in runs}
    return {**found, "runs": tuple(found.items())}


def all_runs(request: Request) -> Response:
    """GET /: the page."""
    roots = request.app.state.roots
    return render(request, "all_runs.html", 200, runs=rows(roots), **_queue(roots))


def table(request: Request) -> Response:
    """GET /runs/table: only the table, after a change."""
    return render(request, "all_runs_table.html", runs=rows(request.app.state.roots))


def queue_part(request: Request) -> Response:
    """GET /runs/queue: only the queue."""
    return render(request, "queue.html", 200, **_queue(request.app.state.roots))


CHANGES: Mapping[str, Callable[[Roots, str], None]] = {
    "remove": queue.remove, "up": queue.move_up, "stop": queue.stop,
}  # fmt: skip


async def change_queue(request: Request) -> Response:
    """POST /queue/remove, /queue/up, /queue/stop: change the entry ``id``."""
    form = await read_form(request)
    act, which = CHANGES.get(request.path_params["what"]), form.get("id", [""])[-1]
    if act is None:
        raise HTTPException(404)
    await run_in_threadpool(act, request.app.state.roots, which)
    if request.headers.get("hx-request") != "true":
        return RedirectResponse("/", 303)
    return await run_in_threadpool(queue_part, request)


def thumbnail(request: Request) -> Response:
    """GET /runs/thumbnail/NAME?v=STAMP: a small copy of the newest sheet of validation pictures."""
    roots: Roots = request.app.state.roots
    run = roots.run(request.path_params["name"])
    picture = state_of(run).picture if run is not None else None
    file = roots.inside(run, picture) if run is not None and picture is not None else None
    if file is None:
        raise HTTPException(404)
    return FileResponse(small(roots, file), headers={"cache-control": "private, max-age=86400"})


def small(roots: Roots, file: Path) -> Path:
    """Return a small copy of a picture, cached."""
    from PIL import Image

    found = file.stat()
    key = hashlib.sha256(f"{file} {found.st_mtime_ns} {found.st_size}".encode()).hexdigest()[:24]
    target = roots.own / THUMBNAILS / f"{key}.jpg"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with Image.open(file) as picture:
                picture.thumbnail((SIDE, SIDE))
                with atomic_file(target, shared=True) as part:
                    picture.convert("RGB").save(part, "JPEG", quality=85)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise HTTPException(404, f"{file.name} is not a readable picture ({error})") from None
    return target


def rows(roots: Roots) -> list[Row]:
    """Return the table's rows: running runs first, then the newest.

    Args:
        roots: the page's roots.
    """
    found = [(run_entries(folder, stamp(folder, is_held(folder))), _age(folder)) for folder in roots.all_runs()]
    found.sort(key=lambda pair: (pair[0].state.word != "running", -pair[1]))
    differing = differences([each.settings for each, _ in found])
    return [
        {"state": each.state, "differs": own, "best": each.best, "peak": each.peak,
         "time": duration(each.seconds) if each.seconds else "", "picture": each.picture}
        for (each, _), own in zip(found, differing, strict=True)
    ]  # fmt: skip


@lru_cache(maxsize=CACHED)
def run_entries(folder: Path, stamp: Hashable) -> RunEntries:
    """Read a run; cached until its stamp changes.

    Args:
        folder: the run's folder.
        stamp: its files' stamp.
    """
    state = state_of(folder)
    summary = read_json_or_none(folder / SUMMARY) or {}
    seconds = total_seconds(attempts_of(folder))
    picture = ""
    if state.picture is not None:
        picture = str((folder / state.picture).stat().st_mtime_ns)
    peak = summary.get("peak_allocated_gib")
    settings = {path: text for path, text in flat(state.settings).items() if path.partition(".")[0] not in SAME}
    return RunEntries(state, settings, _best(summary), peak if isinstance(peak, float) else None, seconds, picture)


def differences(settings: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Describe, for each run, the settings that differ from most runs'.

    Args:
        settings: each run's settings, as text by path.
    """
    counts: dict[str, Counter[str | None]] = {}
    for each in settings:
        for path in each:
            counts.setdefault(path, Counter())
    for path, counter in counts.items():
        counter.update(each.get(path) for each in settings if each)
    usual = {path: counter.most_common(1)[0][0] for path, counter in counts.items()}
    found = []
    for each in settings:
        own = [f"{path} {each.get(path, 'default')}" for path in usual if each and each.get(path) != usual[path]]
        found.append([*own[:LISTED], *([f"and {len(own) - LISTED} more"] if len(own) > LISTED else [])])
    return found


def flat(settings: Json, prefix: str = "") -> dict[str, str]:
    """Return settings as text, by dotted path."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            found[f"{prefix}{key}"] = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    return found


def _best(summary: Json) -> str:
    best = summary.get("best")
    if isinstance(best, dict) and best.get("by") != "last":
        return f"step {best.get('step')} by {best.get('by')}"
    after = summary.get("eval_loss_after")
    return f"{after:.4f}" if isinstance(after, float) else ""


def _age(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _queue(roots: Roots) -> dict[str, object]:
    """Return the values for the queue's part of the page."""
    try:
        return {"entries": queue.read_queue(roots), "damaged": ""}
    except UserError as error:
        return {"entries": [], "damaged": str(error)}
