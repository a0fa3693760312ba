"""The page New run in three steps: pictures; what to learn, and the base; whether it fits, how long, how much, and
Start. Below, all other fields."""

from __future__ import annotations

import json
import secrets
from collections.abc import Hashable
from dataclasses import asdict
from functools import partial
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from simpletune.apps.web import live, processes, queue
from simpletune.apps.web.form.fields import get_at
from simpletune.apps.web.form.filled_form import (
    FOLDER,
    MODEL,
    PROMPT,
    SLIDER,
    FilledForm,
    FolderAnswers,
    FormRequest,
    fill_form,
)
from simpletune.apps.web.form.presets import HERE, card_here, cards, public_bases
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs, file_stamp, stamp
from simpletune.apps.web.runs_page import run_row
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.commands.init.answers import ABOUT, WHAT
from simpletune.commands.init.choices import TRIGGER
from simpletune.config.explain import rate_notes
from simpletune.config.load import shipped_names
from simpletune.models.families import family_of, is_downloaded, public_base
from simpletune.system.atomic import write_json
from simpletune.system.hub import has_token
from simpletune.system.hub_account import known_access
from simpletune.system.locks import is_held, wait_for_lock
from simpletune.system.options import Json, plural

CONFIGS, STARTING = "configs", ".start.lock"
LISTED = 200  # configurations in a list
SHOWN = 24  # thumbnails
PRESET, ONLY_PROMPTS = "preset", "a slider, from prompts alone"
LONGEST = 4000  # characters of an address that keeps the form
LOG_LINES = 30
NAMED = 3  # fields with problems that are named beside Start


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
    """Show the page, with ``?from=RUN`` or ``?file=PATH`` to start from, or as ``_address`` describes a form."""
    query = dict(request.query_params)
    sources = (("from", "run:"), ("file", "file:"), ("base", ""))
    base = next((f"{prefix}{query[key]}" for key, prefix in sources if key in query), PRESET)
    own = {path: text for path, text in query.items() if path == "name" or "." in path}
    own |= {FOLDER: query["folder"]} if query.get("folder") else {}
    answers = query.get("answers", "{}")
    form = {"base": base, "state": f'{{"mine": {json.dumps(own)}, "answers": {answers}}}'}
    form |= {name: query[name] for name in ("card", "trigger", "what") if name in query}
    asked, _ = _read_request(form)
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
    if (FOLDER in shown) == filled.is_slider:  # from pictures to prompts or back: another page
        return Response(headers={"hx-redirect": _address(filled)})
    anew = []  # sections that have got or lost fields
    for each in filled.edited.sections:
        own = (path for path in shown if (f"{path}.".startswith(f"{each.path}.") if each.path else "." not in path))
        if {field.path for field in each.fields()} - set(shown) or any(path not in fields for path in own):
            anew.append(each)
    inside = {each.path for section in anew for each in section.fields()}
    changed = [each for path, each in fields.items() if path not in inside and each.text != shown[path]]
    values = _values(request, filled, str(state.get("form", "")), state.get("live"))
    values |= {
        "named": filled.asked.trigger != asked.trigger,  # by an answer
        "guessed": state.get("guess") != filled.guess,
        "offered": state.get("offer") != _offer(filled),
        "redirected": filled.is_slider and state.get("prompts") != filled.prompts,
    }
    response = render(request, "start_change.html", 200, anew=anew, changed=changed, inside=inside, **values)
    response.headers["hx-replace-url"] = _address(filled)
    return response


def live_line(request: Request) -> Response:
    """Show the live line, once a prediction is ready (``?key=KEY&last=KEY``)."""
    roots, query = request.app.state.roots, request.query_params
    shown = _live(roots, query.get("key") or None, query.get("last") or None, "")
    late = shown["ready"]  # the form has not seen it yet
    return render(request, "start_live.html", live={**shown, "late": late})


@with_form
def begin(request: Request, form: Form) -> Response:
    """Write the configuration and queue the run, or show the problems."""
    roots: Roots = request.app.state.roots
    asked, state = _read_request(form)
    filled = _fill(request, asked)
    estimate = _estimate_request(filled)
    predicted = live.cached_estimate(roots, estimate.key) if estimate else None
    if filled.config is None or _blocked(filled, predicted or {}):
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
    base, card, word, kind, chosen, pick = (
        texts.pop(name, "") for name in ("base", "card", "trigger", "class", "what", "pick")
    )
    if pick in {base.name for base in public_bases(None)}:
        texts[MODEL], family = pick, family_of(pick)
        if base.startswith("shipped:") or (family is not None and family.family != texts.get("model.family")):
            base = PRESET if FOLDER in texts else SLIDER  # the settings are another model's
    trigger = " ".join(f"{word.strip() or TRIGGER} {kind}".split()) if kind.strip() else " ".join(word.split())
    what = next((each for each in WHAT if each == chosen), None)
    return FormRequest(base or PRESET, card or HERE, trigger, texts, shown, mine, given, what), state


def _address(filled: FilledForm) -> str:
    """Return the page's address with what the user has entered, so that a reload shows it; without, if that is too
    long."""
    asked, mine = filled.asked, dict(filled.edited.mine)
    for path in filled.answered:
        mine.pop(path, None)
    pairs = {"folder": mine.pop(FOLDER, ""), "trigger": asked.trigger, "what": asked.what or ""}
    pairs |= {"card": "" if asked.card == HERE else asked.card, "base": "" if asked.base == PRESET else asked.base}
    pairs |= {"answers": json.dumps(asdict(filled.answers))} if filled.answers.chosen else {}
    found = urlencode({**{name: text for name, text in pairs.items() if text}, **mine}, errors="replace")
    return f"/start?{found}" if 0 < len(found) <= LONGEST else "/start"


def _whole_page(request: Request, filled: FilledForm, form: str, last: object, status: int = 200) -> Response:
    roots: Roots = request.app.state.roots
    values = _values(request, filled, form, last)
    values |= {"named": False, "guessed": False, "offered": False, "redirected": False}
    files = [str(file) for root in (roots.own / CONFIGS, *roots.named) for file in sorted(root.glob("*.json"))[:LISTED]]
    base = filled.asked.base
    shipped = [(f"shipped:{name}", name) for name in shipped_names()]
    unlisted = base.startswith(("file:", "run:", "shipped:")) and base not in dict(shipped)
    own = [(base, base.replace(":", " ", 1))] if unlisted else []
    bases_to_start_from = [(PRESET, "what suits the card and the pictures"), (SLIDER, ONLY_PROMPTS), *own, *shipped]
    values |= {"tried": status != 200, "uploads": roots.uploads, "bases_to_start_from": bases_to_start_from}
    return render(request, "start.html", status, cards=cards(), files=files, **values)


def _values(request: Request, filled: FilledForm, form: str, last: object) -> dict[str, object]:
    """Return the values common to the page and its parts."""
    roots: Roots = request.app.state.roots
    estimate = _estimate_request(filled)
    key = estimate.key if estimate else None
    predicted = live.cached_estimate(roots, key) if key else None
    if estimate is not None and filled.planned is not None and predicted is None:
        live.keep_shipped(roots, estimate.key, filled.planned, filled.card)
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
        "guess": filled.guess,
        "offer": _offer(filled),
        "prompts": filled.prompts,
    }
    return {
        "filled": filled,
        "live": shown,
        "state": json.dumps(state, ensure_ascii=False),
        "warnings": _warnings(roots, filled),
        "blocked": _blocked(filled, predicted or {}),
        "what": [(each, f"{each.capitalize()}: {ABOUT[each]}") for each in WHAT],
        "bases": public_bases(filled.card),
        "drawn_by": partial(_drawn_by, roots),  # reads every run: only where bases are shown
        "has_token": has_token(),
        "general": [str(each) for each in filled.problems if each.path not in fields],
        "thumbnails": _thumbnails(filled),
    }


def _thumbnails(filled: FilledForm) -> list[tuple[str, str]]:
    """Return the first pictures of the folder, without masks: their names and captions."""
    seen, one = filled.seen, str(get_at(filled.data, "data.missing_prompt") or get_at(filled.data, PROMPT) or "")
    own = seen is not None and bool(seen.own_captions)
    shown = seen.images[:SHOWN] if seen else []
    return [(image.name, image.caption if own and not image.as_it_is else one) for image in shown]


def _offer(filled: FilledForm) -> list[str]:
    """Return the bases to choose from, and the chosen one."""
    return [*(base.name for base in public_bases(filled.card)), str(get_at(filled.data, MODEL))]


def _drawn_by(roots: Roots) -> dict[str, tuple[str, str]]:
    """Return for each base the newest run that has drawn with it, and the end of its thumbnail's address."""
    found: dict[str, tuple[float, str, str]] = {}
    for folder in roots.all_runs():
        row, settings = run_row(folder, stamp(folder, is_held(folder)))
        base, changed = settings.get(MODEL, ""), file_stamp(folder)
        if row["picture"] and base and changed and changed[0] > found.get(base, (0,))[0]:
            found[base] = (changed[0], folder.name, row["picture"])
    return {base: (name, end) for base, (_, name, end) in found.items()}


def _estimate_request(filled: FilledForm) -> live.EstimateRequest | None:
    """Describe what to predict; None while there are problems."""
    planned = filled.planned
    if planned is None:
        return None
    data = None if planned.data is None else planned.data.model_dump(mode="json")
    return live.estimate_request(planned, {**filled.data, "data": data}, filled.card)


def _cannot_download(filled: FilledForm) -> str:
    """Say why the base cannot be downloaded, as far as that is known without asking the Hub; empty if it can."""
    name = str(get_at(filled.data, MODEL))
    base, known = public_base(name), known_access(name)
    if known is not None:
        return known.why if known.may_fail else ""
    if base is None or not base.gated or has_token() or is_downloaded(name):
        return ""
    return f"{base.title} needs a token of the Hub, of an account that has accepted its licence."


def _blocked(filled: FilledForm, predicted: Json) -> list[str]:
    """Return why the run cannot start, as sentences; empty if it can."""
    fields, wrong = filled.edited.fields, [each.path for each in filled.problems]
    if wrong == [FOLDER] and not fields[FOLDER].text:
        return ["Choose a folder with pictures first."]
    found = []
    if wrong:
        names = dict.fromkeys(fields[path].title if path in fields else path for path in wrong)
        which = f": {', '.join(names)}" if len(names) <= NAMED else ""
        found.append(f"{plural(len(wrong), 'problem')} to fix before it can start{which}.")
    if filled.questions:
        found.append(f"Answer {'the question' if len(filled.questions) == 1 else 'the questions'} above first.")
    elif filled.scan and filled.scan.is_running:
        found.append("It can start once the folder has been looked at.")
    elif filled.config is not None and card_here() is None and queue.queue_device(filled.data) == queue.GPU:
        found.append(
            "This machine has no graphics card, and the run needs one: download the configuration, and start it there."
        )
    elif filled.config is not None and (why := _cannot_download(filled)):
        found.append(why)
    elif predicted.get("fits") is False and filled.asked.card == HERE:
        found.append("It does not fit this card. Choose a smaller base, picture size or batch.")
    return found


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
        "late": False,
        "kinds": sorted({kind for stage in figures.get("stages", {}).values() for kind in stage["by_kind"]}),
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
    here = card_here()
    if filled.config is not None and here is not None and filled.asked.card != HERE:
        found.append(f"Start trains on this machine's {here.name}, not on a {filled.asked.card}")
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
