"""The page of all runs: cards with a picture, figures and the settings that differ; a chart; and the queue."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from simpletune.apps.web import queue
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run.progress import losses_of
from simpletune.apps.web.run_state import Runs, file_stamp, stamp, state_of
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.runs.attempts import attempts_of, total_seconds
from simpletune.system.atomic import atomic_file
from simpletune.system.console import duration
from simpletune.system.locks import is_held
from simpletune.system.options import Json, UserError

THUMBNAILS, SIDE = "thumbnails", 512  # pixels
SAME = ("$schema", "version", "about", "name", "output", "tracking", "profile")  # settings that affect no figure
LISTED = 6  # settings of a run
LONGEST = 40  # characters of a setting
CACHED = 1000  # runs
CHARTED, MOST_CHARTED = 4, 6  # runs in the chart: at first, and at most, as pages.css has colours
CHANGES: Mapping[str, Callable[[Roots, str], None]] = {"remove": queue.remove, "up": queue.move_up, "stop": queue.stop}


def routes() -> list[Route]:
    return [
        Route("/", all_runs),
        Route("/runs/table", table),
        Route("/runs/losses", losses),
        Route("/runs/queue", queue_part),
        Route("/runs/thumbnail/{name}", thumbnail),
        Route("/queue/{what}", change_queue, methods=["POST"]),
        Route("/queue/{what}", redirect_to_runs, methods=["GET"]),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics ``run:NAME`` and ``runs``."""
    found: dict[str, Hashable] = {f"run:{folder.name}": stamp(folder, held) for folder, held in runs}
    return {**found, "runs": tuple(found.items())}


def all_runs(request: Request) -> Response:
    """Show the page."""
    roots = request.app.state.roots
    found = rows(roots)
    charted = [roots.runs / row["state"].name for row in found if row["state"].loss is not None][:CHARTED]
    return render(request, "all_runs.html", 200, **_cards(found, charted), losses=losses_of(charted), **_queue(roots))


def table(request: Request) -> Response:
    """Show only the cards, after a change; the runs in the chart (``?run=NAME...``) keep their check marks."""
    return render(request, "all_runs_table.html", 200, **_cards(rows(request.app.state.roots), _charted_runs(request)))


def losses(request: Request) -> Response:
    """Show only the chart of the losses of some runs (``?run=NAME...``)."""
    return render(request, "all_runs_losses.html", losses=losses_of(_charted_runs(request)))


def queue_part(request: Request) -> Response:
    """Show only the queue."""
    return render(request, "queue.html", 200, **_queue(request.app.state.roots))


def _change_of(request: Request) -> Callable[[Roots, str], None]:
    change = CHANGES.get(request.path_params["what"])
    if change is None:
        raise HTTPException(404)
    return change


@partial(with_form, require=_change_of)
def change_queue(request: Request, form: Form) -> Response:
    """Remove, move up or stop the entry ``id``."""
    _change_of(request)(request.app.state.roots, form.get("id", ""))
    return queue_part(request) if request.headers.get("hx-request") == "true" else RedirectResponse("/", 303)


def redirect_to_runs(request: Request) -> Response:
    """Redirect from the address of a button, as when a page that says why it failed is opened again."""
    _change_of(request)
    return RedirectResponse("/", 303)


def thumbnail(request: Request) -> Response:
    """Send a small copy of the newest validation picture, cached as a file until its stamp (``?v=STAMP``) changes."""
    from PIL import Image

    roots: Roots = request.app.state.roots
    run = roots.run(request.path_params["name"])
    image = state_of(run).image if run is not None else None
    file = roots.find_inside(run, image) if run is not None and image is not None else None
    if file is None:
        raise HTTPException(404)
    found = file.stat()
    key = hashlib.sha256(f"{file} {found.st_mtime_ns} {found.st_size}".encode()).hexdigest()[:24]
    target = roots.own / THUMBNAILS / f"{key}.jpg"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with Image.open(file) as small:
                small.thumbnail((SIDE, SIDE))
                with atomic_file(target, shared=True) as part:
                    small.convert("RGB").save(part, "JPEG", quality=85)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise HTTPException(404, f"{file.name} is not a readable picture ({error})") from None
    return FileResponse(target, headers={"cache-control": "private, max-age=86400"})


def rows(roots: Roots) -> list[Json]:
    """Return the table's rows: running runs first, then the newest."""
    found = []
    for folder in roots.all_runs():
        row, settings = run_row(folder, stamp(folder, is_held(folder)))
        changed = file_stamp(folder)
        found.append((row["state"].word != "running", -changed[0] if changed else 0, row, settings))
    found.sort(key=lambda each: each[:2])
    differing = differences([settings for *_, settings in found])
    return [{**row, "differs": own} for (_, _, row, _), own in zip(found, differing, strict=True)]


@lru_cache(maxsize=CACHED)
def run_row(folder: Path, stamp: Hashable) -> tuple[Json, dict[str, str]]:
    """Read what the table shows of a run alone, and its settings as text by path; cached until its stamp changes."""
    state = state_of(folder)
    summary = state.summary
    seconds = total_seconds(attempts_of(folder))
    best, after, peak = (summary.get(key) for key in ("best", "eval_loss_after", "peak_allocated_gib"))
    newest = None if state.image is None else file_stamp(folder / state.image)
    row: Json = {
        "state": state,
        "best": f"{after:.4f}" if isinstance(after, float) else "",  # the best held-out loss, or the one at the end
        "peak": peak if isinstance(peak, float) else None,  # GiB of device memory; None if it was not measured
        "time": duration(seconds) if seconds else "",  # of all attempts
        # the end of the thumbnail's address
        "picture": str(newest[0]) if newest else "",
    }
    if isinstance(best, dict) and best.get("by") != "last":
        row["best"] = f"step {best.get('step')} by {best.get('by')}"
    return row, {path: text for path, text in flatten(state.settings).items() if path.partition(".")[0] not in SAME}


def differences(settings: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Describe, for each run, the settings that differ from most runs'. Settings are texts by path."""
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


def flatten(settings: Json, prefix: str = "") -> dict[str, str]:
    """Return settings as text, by dotted path."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            found[f"{prefix}{key}"] = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    return found


def _charted_runs(request: Request) -> list[Path]:
    """Return the runs whose losses the page asks for."""
    roots: Roots = request.app.state.roots
    found = [roots.run(name) for name in request.query_params.getlist("run")]
    return [folder for folder in found if folder is not None][:MOST_CHARTED]


def _cards(found: list[Json], charted: list[Path]) -> dict[str, object]:
    return {"runs": found, "charted": [folder.name for folder in charted]}


def _queue(roots: Roots) -> dict[str, object]:
    try:
        entries, others = queue.read_all(roots)
        return {"entries": entries, "others": others, "damaged": ""}
    except UserError as error:
        return {"entries": [], "others": [], "damaged": str(error)}
