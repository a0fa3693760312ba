"""Parts of a run's page while it trains: progress, charts, pictures, requests, log. In the run's folder, the page
writes only the control file. Whatever computes is a verb in a separate process.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletune.apps.web.files import file_response
from simpletune.apps.web.processes import exit_code, start, tail
from simpletune.apps.web.processes import running as is_running
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run import progress
from simpletune.apps.web.run.pictures import matrix_of, small_copy
from simpletune.apps.web.run.progress import Progress, charts_of
from simpletune.apps.web.run_state import file_stamp, state_of
from simpletune.apps.web.templates import read_fields, render
from simpletune.config.error_text import problems_of
from simpletune.runs.control import (
    AnyRequest,
    DrawRequest,
    SaveRequest,
    StopRequest,
    ask,
    new_id,
    read_answers,
    read_drawings,
    read_requests,
)
from simpletune.runs.folder import CONTROL, CONTROL_ANSWERS, DRAWN, SAMPLES
from simpletune.system.options import ConfigError, Json, UserError

SHOWN = 12  # requests, and requested pictures, newest first
LINES = 40  # of the log
WHOLE, BROKEN = ("seed", "steps", "width", "height"), ("strength", "guidance")
NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,9})?")
# Our own pages contain their scripts and pictures. Sandboxed, they cannot send requests to this server.
ALONE = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts"
)
SENT: dict[str, dict[str, str]] = {  # files that may be sent, by suffix, with their headers
    ".png": {"content-type": "image/png"},
    ".html": {"content-type": "text/html; charset=utf-8", "content-security-policy": ALONE},
    ".safetensors": {"content-type": "application/octet-stream", "content-disposition": "attachment"},
    ".json": {"content-type": "text/plain; charset=utf-8"},
    ".jsonl": {"content-type": "text/plain; charset=utf-8"},
    ".md": {"content-type": "text/plain; charset=utf-8"},
}
TRAIN = "run"  # the queue's name for a run's process
UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")
JOB_LINES = 12  # of another log


@dataclass(frozen=True)
class RunJob:
    """A process started from a run's page.

    Args:
        kind: compare, export and so on.
        running: whether it is running.
        failed: whether it ended with an error.
        lines: the end of its log.
    """

    kind: str
    running: bool
    failed: bool
    lines: list[str]


@functools.lru_cache(maxsize=4096)
def job_name(kind: str, run: str) -> str:
    """Name the process and log of a verb for a run; a hash distinguishes names that do not fit."""
    plain = UNUSUAL.sub("_", run)[:100]
    unusual = plain != run
    return f"{kind}-{plain}" + (f"-{hashlib.sha256(run.encode()).hexdigest()[:8]}" if unusual else "")


def begin(roots: Roots, kind: str, run: str, words: Sequence[str]) -> None:
    """Start a verb for a run.

    Raises:
        UserError: one of this kind is already running for the run.
    """
    start(roots, words, job_name(kind, run))


def job_of(roots: Roots, kind: str, run: str) -> RunJob | None:
    """Return the last process of a kind for a run; None if there was none."""
    name = job_name(kind, run)
    lines, runs = tail(roots, name, JOB_LINES), is_running(roots, name)
    if not lines and not runs:
        return None
    return RunJob(kind, runs, not runs and exit_code(roots, name) not in (0, None), lines)


def routes() -> list[Route]:
    """Return the page's routes."""
    return [
        Route("/run/{name}/now", now),
        Route("/run/{name}/form", form),
        Route("/run/{name}/pictures", pictures),
        Route("/run/{name}/requests", requests),
        Route("/run/{name}/log", log),
        Route("/run/{name}/ask", ask_run, methods=["POST"]),
        Route("/run/{name}/file/{path:path}", file),
        Route("/run/{name}/small/{path:path}", small),
    ]


def topics(folder: Path, held: bool, logs: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """Return the stamps of the topics ``held``, ``pictures``, ``requests`` and ``log`` of a run.

    Args:
        folder: run folder.
        held: whether a process trains it.
        logs: stamps of the files with logs, by name.
    """
    return {
        "held": held,
        "pictures": file_stamp(folder / SAMPLES),
        "requests": tuple(file_stamp(folder / name) for name in (CONTROL, CONTROL_ANSWERS, DRAWN)),
        "log": logs.get(f"{job_name(TRAIN, folder.name)}.log"),
    }


def run_of(request: Request) -> Path:
    """Return the folder of the run that a path names.

    Raises:
        HTTPException: 404.
    """
    roots: Roots = request.app.state.roots
    folder = roots.run(request.path_params["name"])
    if folder is None:
        raise HTTPException(404, f"There is no run {request.path_params['name']}")
    return folder


def now(request: Request) -> Response:
    """GET /run/NAME/now: state and charts."""
    return render(request, "run_now.html", **now_of(run_of(request)))


def form(request: Request) -> Response:
    """GET /run/NAME/form: the form for requests to the run, if it is training."""
    folder = run_of(request)
    return render(request, "run_ask.html", name=folder.name, run=run_progress(folder), drawing=drawing_defaults(folder))


def pictures(request: Request) -> Response:
    """GET /run/NAME/pictures: the matrix."""
    folder = run_of(request)
    return render(request, "run_pictures.html", name=folder.name, matrix=matrix_of(folder))


def requests(request: Request) -> Response:
    """GET /run/NAME/requests: requests and their outcomes."""
    folder = run_of(request)
    return render(request, "run_requests.html", name=folder.name, **list_requests(folder))


def log(request: Request) -> Response:
    """GET /run/NAME/log: the end of the log."""
    return render(request, "run_log.html", **log_lines(request, run_of(request)))


def run_progress(folder: Path) -> Progress:
    """Read a run's progress."""
    return progress.read_progress(folder, state_of(folder))


def now_of(folder: Path) -> Json:
    """The values for a run's progress and charts."""
    found = run_progress(folder)
    return {"name": folder.name, "run": found, "charts": charts_of(folder, found.steps)}


def list_requests(folder: Path) -> Json:
    """A run's waiting requests, answers and requested pictures, newest first."""
    answers = read_answers(folder)
    answered = {answer["id"] for answer in answers}
    try:
        waiting, broken = [each for each in read_requests(folder) if each.id not in answered], ""
    except UserError as error:
        waiting, broken = [], str(error)
    drawings = [each for each in read_drawings(folder) if (folder / each["file"]).is_file()]
    answered_last = [answer for answer in answers if answer["state"] != "done" or answer.get("ask") != "draw"]
    return {
        "waiting": waiting, "broken": broken, "answers": answered_last[: -SHOWN - 1 : -1],
        "drawings": drawings[: -SHOWN - 1 : -1],
    }  # fmt: skip


def log_lines(request: Request, folder: Path) -> Json:
    """The end of the log, for a run that a page started."""
    return {"lines": tail(request.app.state.roots, job_name(TRAIN, folder.name), LINES)}


def drawing_defaults(folder: Path) -> Json:
    """The defaults of the picture form: the settings of the run's validation."""
    settings = run_progress(folder).state.settings
    validation, data = settings.get("validation"), settings.get("data")
    option: Json = validation if isinstance(validation, dict) else {}
    side = data.get("resolution", "") if isinstance(data, dict) else ""
    prompts = option.get("prompts")
    prompt = prompts[0] if isinstance(prompts, list) and prompts else ""
    if not prompt and (rows := matrix_of(folder).rows):
        prompt = rows[0].prompt
    if not prompt and isinstance(data, dict):  # before the first pictures
        prompt = data.get("prompt") or "a picture"
    fallback = {"width": option.get("width") or side, "height": option.get("height") or side}
    own = {name: option.get(name, "") for name in ("negative_prompt", "seed", "steps", "guidance")}
    return {"prompt": prompt, **own, **fallback}


async def ask_run(request: Request) -> Response:
    """POST /run/NAME/ask: put a request into the control file."""
    folder = run_of(request)
    asked = request_from(await read_fields(request))
    await run_in_threadpool(ask, folder, asked)
    return render(request, "run_asked.html", asked=asked)


def request_from(form: dict[str, str]) -> AnyRequest:
    """Read a request from a form; empty fields mean the run's settings.

    Raises:
        UserError: a value is not allowed.
    """
    what = form.get("ask", "")
    if what == "save":
        return SaveRequest(id=new_id("save"), ask="save")
    if what == "stop":
        return StopRequest(id=new_id("stop"), ask="stop")
    if what != "draw":
        raise UserError(f"{what[:40]!r} cannot be asked of a run. Use draw, save or stop")
    data: Json = {"id": new_id("draw"), "prompt": form.get("prompt", "").strip()}
    if form.get("negative_prompt", "").strip():
        data["negative_prompt"] = form["negative_prompt"].strip()
    for name in (*WHOLE, *BROKEN):
        text = form.get(name, "").strip()
        if text and not NUMBER.fullmatch(text):
            raise UserError(f"{name.replace('_', ' ')}: {text[:40]!r} is not a number")
        if text:
            data[name] = int(text) if name in WHOLE and "." not in text else float(text)
    try:
        return DrawRequest(**data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, data, DrawRequest), "this picture") from None


def file(request: Request) -> Response:
    """GET /run/NAME/file/PATH: a picture, a report, a result."""
    folder, path = run_of(request), request.path_params["path"]
    headers = SENT.get(Path(path).suffix)
    if headers is None:
        raise HTTPException(404)
    return file_response(request.app.state.roots, folder, path, **headers)


def small(request: Request) -> Response:
    """GET /run/NAME/small/PATH: a small copy of a picture."""
    roots: Roots = request.app.state.roots
    found = roots.inside(run_of(request), request.path_params["path"])
    if found is None or found.suffix != ".png":
        raise HTTPException(404)
    try:
        data = small_copy(found)
    except (OSError, SyntaxError, ValueError):
        raise HTTPException(404, "The picture is damaged") from None
    return Response(data, media_type="image/webp", headers={"cache-control": "private, max-age=3600"})
