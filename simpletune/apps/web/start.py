"""The page Start: a card, a folder and a trigger word, then Start; below, a prediction and all other fields."""

from __future__ import annotations

import json
import secrets
from collections.abc import Hashable, Mapping
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from simpletune.apps.web import live, processes, queue
from simpletune.apps.web.form.filled_form import FilledForm, FormRequest, fill_form
from simpletune.apps.web.form.presets import HERE, card_here, cards
from simpletune.apps.web.queue import QueueEntry
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs
from simpletune.apps.web.templates import read_form, render
from simpletune.config.load import shipped_names
from simpletune.system.atomic import write_json
from simpletune.system.options import plural

CONFIGS = "configs"
LISTED = 200  # configurations in a list
PRESET = "preset"
LOG_LINES = 30


def routes() -> list[Route]:
    """Return the page's routes."""
    return [
        Route("/start", page),
        Route("/start/change", change, methods=["POST"]),
        Route("/start/live", live_line),
        Route("/start/run", begin, methods=["POST"]),
        Route("/start/config.json", download, methods=["POST"]),
        Route("/queued/{id}", queued),
        Route("/queued/{id}/part", queued_part),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics ``estimates`` and ``queue``; makes sure that the queue's runner is running."""
    queue.ensure_runner(roots)
    return {"estimates": live.stamp(roots), "queue": queue.stamp(roots)}


def page(request: Request) -> Response:
    """GET /start, with ``?from=RUN`` or ``?file=PATH`` to start from."""
    query = request.query_params
    base = f"run:{query['from']}" if "from" in query else f"file:{query['file']}" if "file" in query else PRESET
    folder = {"data.path": query["folder"]} if query.get("folder") else {}
    asked = FormRequest(base, HERE, "", folder, {}, folder)
    return _whole(request, fill_form(request.app.state.roots, asked), secrets.token_hex(6), None)


async def change(request: Request) -> Response:
    """POST /start/change: the parts that a change affects."""
    form = await read_form(request)
    return await run_in_threadpool(_change, request, form)


def _change(request: Request, form: Mapping[str, list[str]]) -> Response:
    asked, state = _asked(form)
    filled = fill_form(request.app.state.roots, asked)
    shown = {path: text.replace("\r\n", "\n") for path, text in asked.texts.items()}
    fields = filled.edited.fields()
    anew = [each for each in filled.edited.sections if {f.path for f in each.fields()} - set(shown)
            or any(path not in fields for path in shown if _in(each.path, path))]  # fmt: skip
    inside = {each.path for section in anew for each in section.fields()}
    changed = [each for path, each in fields.items() if path not in inside and each.text != shown[path]]
    values = _values(request, filled, str(state.get("form", "")), state.get("live"))
    return render(request, "start_change.html", 200, anew=anew, changed=changed, inside=inside, **values)


def live_line(request: Request) -> Response:
    """GET /start/live?key=KEY&last=KEY: the live line, once a prediction is ready."""
    roots, query = request.app.state.roots, request.query_params
    shown = _live(roots, query.get("key") or None, query.get("last") or None, "")
    return render(request, "start_live.html", live=shown)


async def begin(request: Request) -> Response:
    """POST /start/run: write the configuration and queue the run, or show the problems."""
    form = await read_form(request)
    return await run_in_threadpool(_begin, request, form)


def _begin(request: Request, form: Mapping[str, list[str]]) -> Response:
    roots: Roots = request.app.state.roots
    asked, state = _asked(form)
    filled = fill_form(roots, asked)
    if filled.problems or filled.config is None:
        return _whole(request, filled, str(state.get("form", "")), state.get("live"), 422)
    file = _free_file(roots, filled.config.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, filled.data)
    entry = queue.add(roots, filled.config.name, file, queue.queue_device(filled.data))
    return RedirectResponse(f"/queued/{entry.id}", 303)


async def download(request: Request) -> Response:
    """POST /start/config.json: the configuration as a file."""
    form = await read_form(request)
    filled = await run_in_threadpool(lambda: fill_form(request.app.state.roots, _asked(form)[0]))
    name = filled.config.name if filled.config else "config"
    headers = {"content-disposition": f'attachment; filename="{name}.json"'}
    return Response(json.dumps(filled.data, indent=2, ensure_ascii=False) + "\n", 200, headers, "application/json")


def queued(request: Request) -> Response:
    """GET /queued/ID: a run that is waiting, starting or has failed; redirects to the run's page once it exists."""
    entry = _entry(request)
    target = _run_page(request.app.state.roots, entry)
    return RedirectResponse(target, 303) if target else render(request, "queued.html", 200, **_waiting(request, entry))


def queued_part(request: Request) -> Response:
    """GET /queued/ID/part: only its state."""
    entry = _entry(request)
    target = _run_page(request.app.state.roots, entry)
    if target:
        return Response(headers={"hx-redirect": target})
    return render(request, "queued_part.html", 200, **_waiting(request, entry))


def _entry(request: Request) -> QueueEntry:
    which = request.path_params["id"]
    found = next((each for each in queue.read_queue(request.app.state.roots) if each.id == which), None)
    if found is None:
        raise HTTPException(404, "This run is no longer in the queue")
    return found


def _run_page(roots: Roots, entry: QueueEntry) -> str | None:
    """Return the address of a run that has begun; while it prepares, an older run may still have its name."""
    log = "\n".join(processes.tail(roots, queue.log_name(entry.name), 1000))
    begun = entry.state in ("running", "finished", "stopped") and roots.run(entry.name) is not None
    prepared = entry.state != "running" or (roots.runs / entry.name / "attempts.json").exists() and "step" in log
    return f"/run/{entry.name}" if begun and prepared else None


def _waiting(request: Request, entry: QueueEntry) -> dict[str, object]:
    roots = request.app.state.roots
    entries = queue.read_queue(roots)
    before = [
        each for each in entries[: entries.index(entry)] if each.state == "waiting" and each.device == entry.device
    ]
    lines = [] if entry.state == "waiting" else processes.tail(roots, queue.log_name(entry.name), LOG_LINES)
    return {"entry": entry, "before": len(before), "lines": lines}


def _asked(form: Mapping[str, list[str]]) -> tuple[FormRequest, dict[str, object]]:
    """Read the form: the request, and the state that the page carries along."""
    texts = {name: values[-1] for name, values in form.items()}
    try:
        state = json.loads(texts.pop("state", "{}"))
        shown, mine = dict(state.get("shown", {})), dict(state.get("mine", {}))
        if not all(isinstance(each, str) for each in (*shown, *shown.values(), *mine, *mine.values())):
            raise ValueError
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise HTTPException(400, "The form is damaged. Reload the page") from None
    base, card, trigger = (texts.pop(name, "") for name in ("base", "card", "trigger"))
    asked = FormRequest(base or PRESET, card or HERE, " ".join(trigger.split()), texts, shown, mine)
    return asked, state


def _whole(request: Request, filled: FilledForm, form: str, last: object, status: int = 200) -> Response:
    roots: Roots = request.app.state.roots
    values = _values(request, filled, form, last)
    files = [str(file) for root in (roots.own / CONFIGS, *roots.named) for file in sorted(root.glob("*.json"))[:LISTED]]
    return render(
        request, "start.html", status, cards=cards(), bases=_bases(filled.asked.base), files=files, tried=status != 200,
        **values,
    )  # fmt: skip


def _values(request: Request, filled: FilledForm, form: str, last: object) -> dict[str, object]:
    """Return the values common to the page and its parts."""
    roots: Roots = request.app.state.roots
    key = None
    if filled.planned is not None:
        wish = live.wish(
            filled.planned, {**filled.data, "data": filled.planned.data.model_dump(mode="json")}, filled.card
        )
        key = wish.key
        if live.cached_estimate(roots, key) is None:
            live.estimator(roots).want(form, wish)
    why = "" if filled.planned else "no prediction until the problems are fixed"
    shown = _live(roots, key, last if isinstance(last, str) else None, why)
    fields = filled.edited.fields()
    state = {
        "form": form, "shown": {path: each.text for path, each in fields.items()}, "mine": dict(filled.edited.mine),
        "live": key or last,
    }  # fmt: skip
    return {
        "filled": filled, "live": shown, "state": json.dumps(state, ensure_ascii=False),
        "warnings": _warnings(roots, filled), "count": plural(len(filled.problems), "problem"),
        "general": [str(each) for each in filled.problems if each.path not in fields],
    }  # fmt: skip


def _live(roots: Roots, key: str | None, last: str | None, why: str) -> dict[str, object]:
    """Return the live line: the prediction, or, while a new one is made, the last one, greyed out."""
    found = live.cached_estimate(roots, key) if key else None
    old = live.cached_estimate(roots, last) if last and found is None else None
    figures = found or old or {}
    return {
        "key": key,
        "last": last,
        "ready": found is not None,
        "why": why,
        "error": figures.get("error"),
        "figures": figures,
    }


def _warnings(roots: Roots, filled: FilledForm) -> list[str]:
    """Warn what Start will do to older runs with this name, and where it cannot work."""
    name = filled.config.name if filled.config else ""
    found = []
    older = roots.run(name) if name else None
    number = next(n for n in range(1, 10**6) if not (roots.runs / f"{name}.{n}").exists())
    waits = (
        any(each.name == name and each.state in ("waiting", "running") for each in queue.read_queue(roots))
        if name
        else False
    )
    if waits:
        found.append(f"{name} is already in the queue: this run waits until it ends and moves it to {name}.{number}")
    elif older is not None:
        found.append(f"An older run {name} moves to {name}.{number}")
    if filled.config is not None and card_here() is None and queue.queue_device(filled.data) == queue.GPU:
        found.append("This machine has no graphics card, where this run would fail: download the configuration instead")
    return found


def _free_file(roots: Roots, name: str) -> Path:
    """Return a file name for a configuration that no run in the queue still needs."""
    needed = {each.config for each in queue.read_queue(roots) if each.state in ("waiting", "running")}
    folder = roots.own / CONFIGS
    names = (folder / f"{name}{'' if n == 1 else f'-{n}'}.json" for n in range(1, 10**6))
    return next(file for file in names if str(file) not in needed)


def _bases(now: str) -> list[tuple[str, str]]:
    shipped = [(f"shipped:{name}", name) for name in shipped_names()]
    own = [(now, now.replace(":", " ", 1))] if now.startswith(("file:", "run:")) else []
    return [(PRESET, "what suits the card and the pictures"), *own, *shipped]


def _in(section: str, path: str) -> bool:
    return path.startswith(f"{section}.") or (section == path) if section else "." not in path
