"""The page Start: a card, a folder and a trigger word, then Start; below, a prediction and all other fields."""

from __future__ import annotations

import json
import secrets
from collections.abc import Hashable
from dataclasses import asdict

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from simpletune.apps.web import live, processes, queue
from simpletune.apps.web.form.filled_form import FilledForm, FolderAnswers, FormRequest, fill_form
from simpletune.apps.web.form.presets import HERE, card_here, cards
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs, file_stamp
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.config.explain import rate_notes
from simpletune.config.load import shipped_names
from simpletune.system.atomic import write_json
from simpletune.system.locks import wait_for_lock
from simpletune.system.options import plural

CONFIGS, STARTING = "configs", ".start.lock"
LISTED = 200  # configurations in a list
SHOWN = 24  # thumbnails
PRESET = "preset"
LOG_LINES = 30


def routes() -> list[Route]:
    return [
        Route("/start", page),
        Route("/start/change", change, methods=["POST"]),
        Route("/start/live", live_line),
        Route("/start/run", begin, methods=["POST"]),
        Route("/start/config.json", download, methods=["POST"]),
        *(Route(path, redirect_to_form, methods=["GET"]) for path in ("/start/run", "/start/config.json")),
        Route("/queued/{id}", queued_run),
        Route("/queued/{id}/part", queued_run),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics ``estimates`` and ``queue``; makes sure that the queue's runner is running."""
    queue.ensure_runner(roots)
    return {"estimates": file_stamp(roots.own / live.FOLDER), "queue": file_stamp(roots.own / queue.FILE)}


# The form


def page(request: Request) -> Response:
    """Show the page, with ``?from=RUN`` or ``?file=PATH`` to start from."""
    query = request.query_params
    base = f"run:{query['from']}" if "from" in query else f"file:{query['file']}" if "file" in query else PRESET
    folder = {"data.path": query["folder"]} if query.get("folder") else {}
    asked = FormRequest(base, HERE, "", folder, {}, folder)
    return _whole_page(request, _fill(request, asked), secrets.token_hex(6), None)


def _fill(request: Request, asked: FormRequest) -> FilledForm:
    return fill_form(request.app.state.roots, request.app.state.scans, asked)


@with_form
def change(request: Request, form: Form) -> Response:
    """Show the parts that a change or an answer affects; without scripts the whole page."""
    asked, state = _read_request(form)
    filled = _fill(request, asked)
    if request.headers.get("hx-request") != "true":
        return _whole_page(request, filled, str(state.get("form", "")), state.get("live"))
    shown = {path: text.replace("\r\n", "\n") for path, text in asked.texts.items()}
    fields = filled.edited.fields
    anew = []  # sections that have got or lost fields
    for each in filled.edited.sections:
        own = (path for path in shown if (f"{path}.".startswith(f"{each.path}.") if each.path else "." not in path))
        if {field.path for field in each.fields()} - set(shown) or any(path not in fields for path in own):
            anew.append(each)
    inside = {each.path for section in anew for each in section.fields()}
    changed = [each for path, each in fields.items() if path not in inside and each.text != shown[path]]
    values = _values(request, filled, str(state.get("form", "")), state.get("live"))
    named = filled.asked.trigger != asked.trigger  # by an answer
    return render(request, "start_change.html", 200, anew=anew, changed=changed, inside=inside, named=named, **values)


def live_line(request: Request) -> Response:
    """Show the live line, once a prediction is ready (``?key=KEY&last=KEY``)."""
    roots, query = request.app.state.roots, request.query_params
    shown = _live(roots, query.get("key") or None, query.get("last") or None, "")
    return render(request, "start_live.html", live=shown)


@with_form
def begin(request: Request, form: Form) -> Response:
    """Write the configuration and queue the run, or show the problems."""
    roots: Roots = request.app.state.roots
    asked, state = _read_request(form)
    filled = _fill(request, asked)
    if not filled.may_start or filled.config is None:
        return _whole_page(request, filled, str(state.get("form", "")), state.get("live"), 422)
    name, folder = filled.config.name, roots.own / CONFIGS
    files = (folder / f"{name}{'' if n == 1 else f'-{n}'}.json" for n in range(1, 10**6))
    with wait_for_lock(roots.own / STARTING, "waiting for another page that starts a run"):
        needed = {each.config for each in queue.read_queue(roots) if each.state in ("waiting", "running")}
        file = next(file for file in files if str(file) not in needed)  # the first that no run in the queue needs
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, filled.data)
        entry = queue.add(roots, name, file, queue.queue_device(filled.data))
    return RedirectResponse(f"/queued/{entry.id}", 303)


def redirect_to_form(request: Request) -> Response:
    """Redirect from the address to which the form is sent, as when a page of problems is opened again."""
    return RedirectResponse("/start", 303)


@with_form
def download(request: Request, form: Form) -> Response:
    """Send the configuration as a file."""
    filled = _fill(request, _read_request(form)[0])
    name = filled.config.name if filled.config else "config"
    headers = {"content-disposition": f'attachment; filename="{name}.json"'}
    return Response(json.dumps(filled.data, indent=2, ensure_ascii=False) + "\n", 200, headers, "application/json")


def _read_request(form: Form) -> tuple[FormRequest, dict[str, object]]:
    """Read the form: the request, and the state that the page carries along."""
    texts = dict(form)
    try:
        state = json.loads(texts.pop("state", "{}"))
        json.dumps(state, ensure_ascii=False).encode()  # JSON can name half a character, which no page can hold
        shown, mine, answers = (dict(state.get(name, {})) for name in ("shown", "mine", "answers"))
        pairs = [*answers.get("chosen", []), *([json.loads(texts.pop("choice"))] if "choice" in texts else [])]
        given = FolderAnswers(answers.get("folder", ""), tuple((question, words) for question, words in pairs))
        said = [given.folder, *(each for pair in given.chosen for each in pair)]
        if not all(isinstance(each, str) for each in (*shown, *shown.values(), *mine, *mine.values(), *said)):
            raise ValueError
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise HTTPException(400, "The form is damaged. Reload the page") from None
    base, card, trigger = (texts.pop(name, "") for name in ("base", "card", "trigger"))
    asked = FormRequest(base or PRESET, card or HERE, " ".join(trigger.split()), texts, shown, mine, given)
    return asked, state


def _whole_page(request: Request, filled: FilledForm, form: str, last: object, status: int = 200) -> Response:
    roots: Roots = request.app.state.roots
    values = _values(request, filled, form, last)
    files = [str(file) for root in (roots.own / CONFIGS, *roots.named) for file in sorted(root.glob("*.json"))[:LISTED]]
    base = filled.asked.base
    own = [(base, base.replace(":", " ", 1))] if base.startswith(("file:", "run:")) else []
    shipped = [(f"shipped:{name}", name) for name in shipped_names()]
    bases = [(PRESET, "what suits the card and the pictures"), *own, *shipped]
    values |= {"tried": status != 200, "uploads": roots.uploads}
    return render(request, "start.html", status, cards=cards(), bases=bases, files=files, **values)


def _values(request: Request, filled: FilledForm, form: str, last: object) -> dict[str, object]:
    """Return the values common to the page and its parts."""
    roots: Roots = request.app.state.roots
    key = None
    if filled.planned is not None:
        estimate = live.estimate_request(
            filled.planned, {**filled.data, "data": filled.planned.data.model_dump(mode="json")}, filled.card
        )
        key = estimate.key
        if live.cached_estimate(roots, key) is None:
            live.keep_shipped(roots, key, filled.planned, filled.card)
            live.estimator(roots).want(form, estimate)
    until = "the problems are fixed" if filled.problems else "the folder has been looked at"
    why = "" if filled.planned else f"no prediction until {until}"
    shown = _live(roots, key, last if isinstance(last, str) else None, why)
    fields = filled.edited.fields
    state = {
        "form": form,
        "shown": {path: each.text for path, each in fields.items()},
        "mine": {path: text for path, text in filled.edited.mine.items() if path not in filled.answered},
        "live": key or last,
        "answers": asdict(filled.answers),
    }
    return {
        "filled": filled,
        "live": shown,
        "state": json.dumps(state, ensure_ascii=False),
        "warnings": _warnings(roots, filled),
        "count": plural(len(filled.problems), "problem"),
        "general": [str(each) for each in filled.problems if each.path not in fields],
        "thumbnails": _thumbnails(filled),
    }


def _thumbnails(filled: FilledForm) -> list[str]:
    """Return the first pictures of the folder by name, without masks."""
    seen = filled.seen
    return [image.name for image in seen.images[:SHOWN]] if seen else []


def _live(roots: Roots, key: str | None, last: str | None, why: str) -> dict[str, object]:
    """Return the live line: the prediction; while one is made, that which ships for other versions of the libraries, or
    the last one, greyed out."""
    found = live.cached_estimate(roots, key) if key else None
    shipped = live.cached_estimate(roots, key + live.SHIPPED) if key and found is None else None
    old = live.cached_estimate(roots, last) if last and found is None else None
    figures = found or shipped or old or {}
    return {
        "key": key,
        "last": last,
        "ready": found is not None,
        "why": why,
        "error": figures.get("error"),
        "figures": figures,
        "progress": live.estimator(roots).progress(key) if key and found is None else None,
    }


def _warnings(roots: Roots, filled: FilledForm) -> list[str]:
    """Warn what Start will do to older runs with this name, and where it cannot work."""
    name = filled.config.name if filled.config else ""
    found = []
    older = roots.run(name) if name else None
    number = next(n for n in range(1, 10**6) if not (roots.runs / f"{name}.{n}").exists())
    if name and any(each.name == name and each.state in ("waiting", "running") for each in queue.read_queue(roots)):
        found.append(f"{name} is already in the queue: this run waits until it ends and moves it to {name}.{number}")
    elif older is not None:
        found.append(f"An older run {name} moves to {name}.{number}")
    found += rate_notes(filled.config) if filled.config is not None else ()
    if filled.config is not None and card_here() is None and queue.queue_device(filled.data) == queue.GPU:
        found.append("This machine has no graphics card, where this run would fail: download the configuration instead")
    return found


# A run that waits in the queue


def queued_run(request: Request) -> Response:
    """Show a run that waits, starts or has failed, or only its state; redirect to the run's page once it exists."""
    roots: Roots = request.app.state.roots
    is_part = request.url.path.endswith("/part")
    entries = queue.read_queue(roots)
    at = next((at for at, each in enumerate(entries) if each.id == request.path_params["id"]), None)
    if at is None:
        raise HTTPException(404, "This run is no longer in the queue")
    entry, log = entries[at], queue.log_name(entries[at].name)
    if entry.state in ("running", "finished", "stopped") and roots.run(entry.name) is not None:
        prepared = (roots.runs / entry.name / "attempts.json").exists()  # before, an older run may still have its name
        if entry.state != "running" or (prepared and "step" in "\n".join(processes.tail(roots, log, 1000))):
            target = f"/run/{entry.name}"
            return Response(headers={"hx-redirect": target}) if is_part else RedirectResponse(target, 303)
    before = sum(each.state == "waiting" and each.device == entry.device for each in entries[:at])
    lines = [] if entry.state == "waiting" else processes.tail(roots, log, LOG_LINES)
    template = "queued_part.html" if is_part else "queued.html"
    return render(request, template, entry=entry, before=before, lines=lines)
