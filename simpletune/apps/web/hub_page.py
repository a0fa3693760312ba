"""The Hub on the page New run: its token, which the Hub's own library keeps and no page shows; what it allows; and the
download of a base before a run is queued."""

from __future__ import annotations

from collections.abc import Hashable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletune.apps.web import processes
from simpletune.apps.web.form.filled_form import MODEL
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs, file_stamp, json_object
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.models.families import base_access, likely_family, public_base
from simpletune.system.atomic import write_json
from simpletune.system.disk import free_disk_bytes
from simpletune.system.hub import GIB, HUB_NAME, Repository
from simpletune.system.hub_account import forget_token, keep_token, token_source
from simpletune.system.options import Json, UserError

FOLDER, JOB = "bases", "download"  # of the states of downloads, and of their processes
LINES = 6  # of a download that has failed


def routes() -> list[Route]:
    return [
        Route("/hub", state),
        Route("/hub/token", set_token, methods=["POST"]),
        Route("/hub/token/delete", delete_token, methods=["POST"]),
        Route("/hub/download", download, methods=["POST"]),
        Route("/hub/pause", pause, methods=["POST"]),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamp of the topic ``downloads``."""
    folder = roots.own / FOLDER
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return {"downloads": tuple((file_stamp(file), processes.is_running(roots, file.stem)) for file in files)}


def state(request: Request) -> Response:
    """Show what the Hub allows of a base (``?model=NAME``), and its download."""
    return _state(request, request.query_params.get("model", ""))


@with_form
def set_token(request: Request, form: Form) -> Response:
    """Keep a token. The answer does not repeat it."""
    account = keep_token(form.get("token", ""))
    return _said(request, f"The Hub knows this token{f' as {account}' if account else ''}. It is kept on this machine.")


@with_form
def delete_token(request: Request, form: Form) -> Response:
    """Delete the token that is kept."""
    forget_token()
    return _said(request, "The token was deleted from this machine.")


def _said(request: Request, words: str) -> Response:
    response = render(request, "hub_said.html", said=words)
    response.headers["hx-trigger"] = "account"  # what shows the state of a base asks again
    return response


@with_form
def download(request: Request, form: Form) -> Response:
    """Download the base of the form, unless that is under way."""
    roots: Roots = request.app.state.roots
    name = _hub_name(form.get(MODEL, ""))
    model = {"family": likely_family(name).family, "pretrained": name}
    job = processes.job_name(JOB, name)
    folder = roots.own / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{job}.config"
    write_json(config, {"name": "download", "model": model, "data": {"path": "demo:pictures"}}, shared=True)
    words = [str(config), str(folder / f"{job}.json")]
    processes.start(roots, words, job, module="simpletune.apps.web.fetcher", title=f"The download of {name}")
    return _state(request, name)


@with_form
def pause(request: Request, form: Form) -> Response:
    """End a download; what is complete stays."""
    name = _hub_name(form.get(MODEL, ""))
    processes.send_signal(request.app.state.roots, processes.job_name(JOB, name))
    return _state(request, name)


def _hub_name(text: str) -> str:
    if text.startswith(".") or not HUB_NAME.match(text):
        raise UserError(f"{text[:80]!r} is not a name on the Hub (owner/name)")
    return text


def _state(request: Request, name: str) -> Response:
    roots: Roots = request.app.state.roots
    if not roots.is_on_hub(name):
        return render(request, "hub_state.html", name="", access=None, job=None)
    job, cache = processes.job_name(JOB, name), Repository(name).cache.parent
    running = processes.is_running(roots, job)
    found: Json = json_object(roots.own / FOLDER / f"{job}.json") if running else {}
    code = None if running else processes.exit_code(roots, job)
    paused = code in processes.STOPPED
    failed = "\n".join(processes.tail(roots, job, LINES)) if not paused and code is not None and code > 0 else ""
    values: dict[str, object] = {
        "name": name,
        "base": public_base(name),
        "access": base_access(name),
        "source": token_source(),
        "place": str(cache),
        "free": free_disk_bytes(cache) / GIB,
        "job": {"running": running, "paused": paused, "failed": failed, **found},
    }
    return render(request, "hub_state.html", 200, **values)
