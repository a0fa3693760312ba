"""The page of all runs: cards with a picture, figures and the settings that differ, to star, hide and delete; a chart;
the queue; and the bin."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from simpletune.apps.web import marks, processes, queue, run_bin
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run.matrix import small_copy
from simpletune.apps.web.run.progress import Evaluation, evaluation_at, losses_of
from simpletune.apps.web.run_page import JOBS, job_name, view_of
from simpletune.apps.web.run_state import Runs, file_stamp, stamp, state_of
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.runs.attempts import attempts_of, total_seconds
from simpletune.runs.best_checkpoint import LAST
from simpletune.system.atomic import atomic_file
from simpletune.system.console import duration
from simpletune.system.disk import format_bytes
from simpletune.system.locks import is_held
from simpletune.system.options import Json, UserError

THUMBNAILS = "thumbnails"
SAME = ("$schema", "version", "about", "name", "output", "tracking", "profile")  # settings that affect no figure
LISTED = 6  # settings of a run
LONGEST = 40  # characters of a setting
CACHED = 1000  # runs
CHARTED, MOST_CHARTED = 4, 6  # runs in the chart: at first, and at most, as pages.css has colours
CHANGES: Mapping[str, Callable[[Roots, str], None]] = {"remove": queue.remove, "up": queue.move_up, "stop": queue.stop}
MARKS: Mapping[str, tuple[marks.Mark, bool]] = {
    "star": ("starred", True),
    "unstar": ("starred", False),
    "hide": ("hidden", True),
    "unhide": ("hidden", False),
}
RENEW = {"hx-trigger": "renew"}  # lets the parts of the page that show runs load themselves again


def routes() -> list[Route]:
    return [
        Route("/", all_runs),
        Route("/runs/table", table),
        Route("/runs/losses", losses),
        Route("/runs/queue", queue_part),
        Route("/runs/thumbnail/{name}", thumbnail),
        Route("/runs/bin", bin_part),
        Route("/runs/bin/restore", restore, methods=["POST"]),
        Route("/runs/bin/empty", ask_to_empty),
        Route("/runs/bin/empty", empty, methods=["POST"]),
        Route("/run/{name}/delete", ask_to_delete),
        Route("/run/{name}/delete", delete, methods=["POST"]),
        Route("/run/{name}/mark", mark, methods=["POST"]),
        Route("/queue/{what}", change_queue, methods=["POST"]),
        Route("/queue/{what}", redirect_to_runs, methods=["GET"]),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics ``run:NAME``, ``runs`` and ``bin``."""
    found: dict[str, Hashable] = {f"run:{folder.name}": stamp(folder, held) for folder, held in runs}
    marked = file_stamp(roots.own / marks.FILE)
    return {**found, "runs": (*found.items(), marked), "bin": file_stamp(roots.runs / run_bin.BIN)}


def all_runs(request: Request) -> Response:
    """Show the page."""
    roots = request.app.state.roots
    found = cards(roots)
    shown = [row["state"] for row in found["runs"]]
    charted = [roots.runs / state.name for state in shown if state.loss is not None][:CHARTED]
    values = {**found, "charted": [folder.name for folder in charted], "losses": losses_of(charted), **_queue(roots)}
    return render(request, "all_runs.html", 200, **values, **_bin(roots))


def table(request: Request) -> Response:
    """Show only the cards, after a change; the runs in the chart (``?run=NAME...``) keep their check marks."""
    charted = [folder.name for folder in _charted_runs(request)]
    return render(request, "all_runs_table.html", 200, **cards(request.app.state.roots), charted=charted)


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
    roots: Roots = request.app.state.roots
    run = roots.run(request.path_params["name"])
    image = state_of(run).image if run is not None else None
    file = roots.find_inside(run, image) if run is not None and image is not None else None
    if file is None:
        raise HTTPException(404)
    stamp = file_stamp(file)
    key = hashlib.sha256(f"{file} {stamp}".encode(errors="surrogatepass")).hexdigest()[:24]
    target = roots.own / THUMBNAILS / f"{key}.webp"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = small_copy(file, stamp)
        except (OSError, SyntaxError, ValueError) as error:
            raise HTTPException(404, f"{file.name} is not a readable picture ({error})") from None
        with atomic_file(target, shared=True) as part:
            part.write_bytes(data)
    return FileResponse(target, headers={"cache-control": "private, max-age=86400"})


# Stars, hidden runs and the bin


@partial(with_form, require=view_of)
def mark(request: Request, form: Form) -> Response:
    """Star or hide the run, or take that back."""
    roots, folder, what = request.app.state.roots, view_of(request).folder, form.get("what", "")
    if what not in MARKS:
        raise UserError(f"{what[:40]!r} is no mark of a run. Use {', '.join(MARKS)}")
    row, _ = run_row(folder, stamp(folder, is_held(folder)))
    marks.mark(roots, row["key"], *MARKS[what])
    return _done(request)


def ask_to_delete(request: Request) -> Response:
    """Ask before the run is deleted, with its name and size."""
    folder = view_of(request).folder
    size = format_bytes(run_bin.folder_bytes(folder))
    return render(request, "runs_ask.html", name=folder.name, size=size)


@partial(with_form, require=view_of)
def delete(request: Request, form: Form) -> Response:
    """Move the run to the bin, unless something still works on it."""
    roots, folder = request.app.state.roots, view_of(request).folder
    for kind, title in JOBS.items():
        if processes.is_running(roots, job_name(kind, folder.name)):
            raise UserError(f"{title} of {folder.name} is still running. Wait for its end, or stop it on its page")
    gone = run_bin.delete(roots, folder)
    return _done(request, gone=gone, restored="")


def bin_part(request: Request) -> Response:
    """Show only the bin."""
    return render(request, "runs_bin.html", 200, **_bin(request.app.state.roots))


@with_form
def restore(request: Request, form: Form) -> Response:
    """Move the run ``id`` back from the bin."""
    return _done(request, gone=None, restored=run_bin.restore(request.app.state.roots, form.get("id", "")))


def ask_to_empty(request: Request) -> Response:
    """Ask before the bin is emptied, with the runs that it has now."""
    return render(request, "runs_ask.html", 200, name="", size="", **_bin(request.app.state.roots))


@with_form
def empty(request: Request, form: Form) -> Response:
    """Remove the runs ``ids`` from the bin for good."""
    run_bin.empty(request.app.state.roots, form.get("ids", "").split())
    return _done(request)


def _done(request: Request, **said: object) -> Response:
    """Answer a form: let the page show what has changed, and say it; without scripts, show the page again."""
    if request.headers.get("hx-request") != "true":
        return RedirectResponse("/", 303)
    answer = render(request, "runs_said.html", 200, **said) if said else Response(status_code=204)
    answer.headers.update(RENEW)
    return answer


def _bin(roots: Roots) -> dict[str, object]:
    binned = run_bin.read_bin(roots)
    return {"binned": binned, "bin_size": format_bytes(sum(each.size for each in binned))}


# The cards


def cards(roots: Roots) -> dict[str, Any]:
    """Return the cards' rows, those of hidden runs apart, and what is wrong with the file of marks."""
    try:
        marked, damaged = marks.read_marks(roots), ""
    except UserError as error:
        marked, damaged = marks.Marks(), str(error)
    found = rows(roots, marked)
    hidden = [row for row in found if row["hidden"]]
    return {"runs": [row for row in found if not row["hidden"]], "hidden": hidden, "marks_damaged": damaged}


def rows(roots: Roots, marked: marks.Marks) -> list[Json]:
    """Return the cards' rows: starred runs first, then running ones, then the newest."""
    found = []
    for folder in roots.all_runs():
        row, settings = run_row(folder, stamp(folder, is_held(folder)))
        changed = file_stamp(folder)
        own = {**row, "starred": row["key"] in marked.starred, "hidden": row["key"] in marked.hidden}
        order = not own["starred"], row["state"].word != "running", -changed[0] if changed else 0
        found.append((order, own, settings))
    found.sort(key=lambda each: each[0])
    differing = differences([settings for *_, settings in found])
    return [{**row, "differs": own} for (_, row, _), own in zip(found, differing, strict=True)]


@lru_cache(maxsize=CACHED)
def run_row(folder: Path, stamp: Hashable) -> tuple[Json, dict[str, str]]:
    """Read what the table shows of a run alone, and its settings as text by path; cached until its stamp changes."""
    state = state_of(folder)
    attempts = attempts_of(folder)
    best, after, peak = (state.summary.get(key) for key in ("best", "eval_loss_after", "peak_allocated_gib"))
    newest = None if state.image is None else file_stamp(folder / state.image)
    row: Json = {
        "state": state,
        "id": hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:12],  # of its elements
        # for its marks: stays with the run when its folder is renamed, as by a new run of its name
        "key": f"{state.settings.get('name', folder.name)} {attempts[0].started.isoformat() if attempts else ''}",
        "best": None,  # step
        "chosen": "",  # by what, if not because it is the last
        "evaluation": None,  # loss of that step, or at the end
        "peak": peak if isinstance(peak, float) else None,  # GiB of device memory; None if it was not measured
        "time": duration(seconds) if (seconds := total_seconds(attempts)) else "",  # of all attempts
        # the end of the thumbnail's address
        "picture": str(newest[0]) if newest else "",
    }
    if isinstance(best, dict) and isinstance(best.get("step"), int):
        row |= {"best": best["step"], "chosen": "" if best.get("by") == LAST else str(best.get("by"))}
        row["evaluation"] = evaluation_at(folder, best["step"])
    elif isinstance(after, float):
        held = bool(state.summary.get("held_out_pictures"))
        row["evaluation"] = Evaluation(after, 0, held)
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


def _queue(roots: Roots) -> dict[str, object]:
    try:
        entries, others = queue.read_all(roots)
    except UserError as error:
        return {"entries": [], "others": [], "damaged": str(error)}
    shown = [each for each in entries if not _is_among_runs(roots, each)]
    return {"entries": shown, "others": others, "damaged": ""}


def _is_among_runs(roots: Roots, entry: queue.QueueEntry) -> bool:
    """Return whether an entry has ended as planned, so that the run's card says all."""
    return entry.state == "finished" or (entry.state == "stopped" and roots.run(entry.name) is not None)
