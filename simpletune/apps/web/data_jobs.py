"""Processes started by the page Data: the check of all pictures, and captioning by a model."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Hashable, Mapping
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletune.apps.web import processes
from simpletune.apps.web.data_set import DataSet, open_data_set
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import stamps_in
from simpletune.apps.web.templates import read_fields, render
from simpletune.commands.inspect_data.report import FIGURES
from simpletune.system.atomic import write_json
from simpletune.system.hub import HUB_NAME
from simpletune.system.options import Json, UserError

GROUPS, EACH = 24, 6  # groups of duplicates shown, and pictures in each
LISTED = 200  # unusable entries
LINES = 12  # of a log
CHECK, CAPTION = "data-check-", "data-caption-"
PRECISIONS, DEVICES = ("bf16", "int8", "fp32"), ("auto", "cpu", "cuda")
KEPT, REDO = "missing", "ours"
LONGEST = 2000  # characters of a field


def routes() -> list[Route]:
    """Return the routes of checks and captioning."""
    return [
        Route("/data/check", check, methods=["GET"]),
        Route("/data/check", start_check, methods=["POST"]),
        Route("/data/captioning", captioning, methods=["GET"]),
        Route("/data/captioning", start_captioning, methods=["POST"]),
        Route("/data/captioning/stop", stop_captioning, methods=["POST"]),
    ]


def stamps(roots: Roots) -> dict[str, Hashable]:
    """Return a stamp for each data set that has been checked or captioned."""
    found: dict[str, list[tuple[str, Hashable]]] = {}
    for name, stamp in sorted(stamps_in(roots.own / processes.LOGS).items()):
        if name.startswith("data-"):
            kind, _, key = Path(name).stem.rpartition("-")
            found.setdefault(f"{kind}:{key}", []).append((name, stamp))
    return {topic: tuple(files) for topic, files in found.items()}


def _asked(request: Request, given: Mapping[str, str]) -> DataSet:
    return open_data_set(request.app.state.roots, given.get("place", ""), given.get("source", "0"))


def check(request: Request) -> Response:
    """GET /data/check: the last check's findings: duplicates side by side, and what is unusable and why."""
    return _check_part(request, _asked(request, request.query_params))


async def start_check(request: Request) -> Response:
    """POST /data/check: decode and compare all pictures in a separate process (``simpletune data``)."""
    form = await read_fields(request)
    return await run_in_threadpool(_start_check, request, form)


def _start_check(request: Request, form: Mapping[str, str]) -> Response:
    found, roots = _asked(request, form), request.app.state.roots
    place = _folder(roots, found)
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / "config.json", found.config.model_dump(mode="json", by_alias=True), shared=True)
    words = ("data", str(place / "config.json"), "--out", str(place), "--pictures", "0")
    processes.start(roots, words, CHECK + found.key)
    return _check_part(request, found)


def _check_part(request: Request, found: DataSet) -> Response:
    roots: Roots = request.app.state.roots
    file = _folder(roots, found) / FIGURES
    report = _report(file)
    checked = time.strftime("%d %B %Y, %H:%M", time.localtime(file.stat().st_mtime)) if report else ""
    groups = [("Identical files", report.get("duplicates", [])), ("Nearly identical", report.get("alike", []))]
    values: Json = {
        "report": report, "checked": checked, "groups": groups, "most_groups": GROUPS, "each": EACH, "listed": LISTED,
        **_state(roots, CHECK + found.key),
    }  # fmt: skip
    return render(request, "data_check.html", data=found, query=found.query, **values)


def _report(file: Path) -> Json:
    """The last check's report; empty if there is none, or if another version wrote it."""
    try:
        found: object = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "unusable" in found else {}


def captioning(request: Request) -> Response:
    """GET /data/captioning: the form and the state of captioning."""
    return _captioning_part(request, _asked(request, request.query_params))


async def start_captioning(request: Request) -> Response:
    """POST /data/captioning: start ``simpletune caption`` on the folder."""
    form = await read_fields(request)
    return await run_in_threadpool(_start_captioning, request, form)


def _start_captioning(request: Request, form: Mapping[str, str]) -> Response:
    found, roots = _asked(request, form), request.app.state.roots
    try:
        if found.why_not:
            raise UserError(found.why_not)
        processes.start(roots, caption_words(roots, found.folder, form), CAPTION + found.key)
    except UserError as reason:
        return _captioning_part(request, found, str(reason))
    return _captioning_part(request, found)


def caption_words(roots: Roots, folder: Path, form: Mapping[str, str]) -> list[str]:
    """Build the command line for captioning.

    Args:
        roots: a model's folder must be in one of them.
        folder: the pictures' folder.
        form: what the user chose.

    Raises:
        UserError: the model is neither a hub name nor in a root, or a choice is unknown.
    """
    model = form.get("model", "").strip()
    if not model:
        raise UserError("The model is empty. Give a hub name, such as florence-community/Florence-2-base, or a folder")
    is_folder = (roots.named[0] / model).exists() or not HUB_NAME.match(model) or ".." in model
    chosen = str(roots.resolve(model)) if is_folder else model
    words = ["caption", str(folder), f"--model={chosen}"]
    for name in ("prompt", "prefix", "trigger"):  # one word each, so that no value is read as a flag
        text = form.get(name, "").strip()
        if len(text) > LONGEST or "\0" in text:
            raise UserError(f"{name} has {len(text):,} characters. Use at most {LONGEST:,}")
        words += [f"--{name}={text}"] if text else []
    for name, known in (("precision", PRECISIONS), ("device", DEVICES)):
        value = form.get(name, known[0])
        if value not in known:
            raise UserError(f"{name}: {value} is unknown. Use one of {', '.join(known)}")
        words.append(f"--{name}={value}")
    return [*words, "--again"] if form.get("which") == REDO else words


async def stop_captioning(request: Request) -> Response:
    """POST /data/captioning/stop: end captioning; captions so far stay, and the next start continues."""
    form = await read_fields(request)
    return await run_in_threadpool(_stop_captioning, request, form)


def _stop_captioning(request: Request, form: Mapping[str, str]) -> Response:
    found, roots = _asked(request, form), request.app.state.roots
    process = processes.find_process(roots, CAPTION + found.key)
    if process is not None:
        process.signal(signal.SIGTERM)
    return _captioning_part(request, found)


def _captioning_part(request: Request, found: DataSet, said: str = "") -> Response:
    roots: Roots = request.app.state.roots
    entries = found.entries()
    captioned = sum(bool(entry.text) for entry in entries)
    values: Json = {"pictures": len(entries), "captioned": captioned, **_state(roots, CAPTION + found.key)}
    return render(request, "data_captioning.html", 422 if said else 200, data=found, said=said, **values)


def _state(roots: Roots, log_name: str) -> Json:
    return {
        "running": processes.running(roots, log_name),
        "lines": processes.tail(roots, log_name, LINES),
        "code": processes.exit_code(roots, log_name),
    }


def _folder(roots: Roots, found: DataSet) -> Path:
    """The folder for a data set's check."""
    return roots.own / "data" / found.key
