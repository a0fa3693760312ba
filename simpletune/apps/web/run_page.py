"""The page of a run. While it trains: progress, the card, charts, pictures, requests, log. Afterwards: files to take
home, comparisons, choosing a step, continuing. In the run's folder, the page writes only the control file; whatever
computes is a verb in a separate process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from urllib.parse import quote, urlencode

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from simpletune.apps.http import whole_number
from simpletune.apps.web import processes, queue
from simpletune.apps.web.processes import job_name
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run.files import AS_WRITTEN, COMFYUI, FORMATS, ResultFile
from simpletune.apps.web.run.matrix import COMPARE, Matrix, comparisons_of, matrix_of, small_copy, strip_of
from simpletune.apps.web.run.progress import Progress, charts_of, evaluation_at, read_progress
from simpletune.apps.web.run_state import Runs, file_stamp, json_object, stamps_in
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.config.error_text import problems_of
from simpletune.runs.attempts import attempts_of
from simpletune.runs.best_checkpoint import choose_best
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.control import (
    LONGEST,
    STRONGEST,
    AnyRequest,
    GenerateRequest,
    SaveRequest,
    StopRequest,
    ask,
    new_id,
    read_answers,
    read_generated,
    read_requests,
)
from simpletune.runs.folder import ATTEMPTS, BEST, CHECKPOINTS, CONTROL, CONTROL_ANSWERS, GENERATED, SAMPLES, SUMMARY
from simpletune.system.atomic import write_json
from simpletune.system.card_load import CardMeter
from simpletune.system.disk import format_bytes
from simpletune.system.options import ConfigError, Json, UserError

SHOWN = 12  # requests, and requested pictures, newest first
LOG_LINES, JOB_LINES = 40, 12  # of the run's log, and of a verb's
TRAIN = "run"  # the queue's name for a run's process
JOBS = {
    COMPARE: "Comparison",
    "choose": "Choice of the best step",
    "report": "Report",
    "finish": "Result",
}
"""The verbs that the page starts for a run, besides its training, and what they make."""
REPORT = "report.html"
FULL = ("full", "partial")  # methods whose result has no strength
STRENGTHS, MOST_STRENGTHS = "0.25 0.5 0.75 1 1.25", 8
WHOLE, BROKEN = ("seed", "steps", "width", "height"), ("strength", "guidance")
METER = CardMeter()
NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,9})?")
# Our own pages contain their scripts and pictures. Sandboxed, they cannot send requests to this server.
ALONE = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts"
)
RESULT = {"content-type": "application/octet-stream", "content-disposition": "attachment"}
TEXT = {"content-type": "text/plain; charset=utf-8"}
SENT: dict[str, dict[str, str]] = {  # files that may be sent, by suffix, with their headers
    ".png": {"content-type": "image/png"},
    ".html": {"content-type": "text/html; charset=utf-8", "content-security-policy": ALONE},
    ".safetensors": RESULT,
    ".json": TEXT,
    ".jsonl": TEXT,
    ".md": TEXT,
}


def routes() -> list[Route]:
    return [
        Route("/run/{name}", page),
        Route("/run/{name}/ask", ask_run, methods=["POST"]),
        Route("/run/{name}/compare", compare, methods=["POST"]),
        Route("/run/{name}/choose", choose_step, methods=["POST"]),
        Route("/run/{name}/convert", convert, methods=["POST"]),
        Route("/run/{name}/report", report, methods=["POST"]),
        Route("/run/{name}/finish", finish, methods=["POST"]),
        Route("/run/{name}/continue", go_on, methods=["POST"]),
        Route("/run/{name}/stop", stop_job, methods=["POST"]),
        Route("/run/{name}/file/{path:path}", file),
        Route("/run/{name}/small/{path:path}", small),
        Route("/run/{name}/download", download),
        *(
            Route(f"/run/{{name}}/{word}", partial(part, template, values))
            for word, (_, template, values) in PARTS.items()
        ),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics of the parts, such as ``pictures:NAME``."""
    found: dict[str, Hashable] = {}
    logs = stamps_in(roots.own / processes.LOGS)
    for folder, held in runs:
        name = folder.name
        files = (SUMMARY, ATTEMPTS, BEST, CHECKPOINTS, REPORT)
        jobs = (f"{job_name(kind, name)}{suffix}" for kind in JOBS for suffix in (".log", ".json"))
        found |= {
            f"held:{name}": held,
            f"pictures:{name}": file_stamp(folder / SAMPLES),
            f"requests:{name}": tuple(file_stamp(folder / file) for file in (CONTROL, CONTROL_ANSWERS, GENERATED)),
            f"log:{name}": logs.get(f"{job_name(TRAIN, name)}.log"),
            f"after:{name}": (
                held,
                *(file_stamp(folder / file) for file in files),
            ),
            f"jobs:{name}": tuple(logs.get(job) for job in jobs),
            f"comparisons:{name}": file_stamp(folder / COMPARE),
        }
    return found


# What the page shows


@dataclass(frozen=True)
class RunView:
    """A run as its page shows it. Each method named in ``PARTS`` returns the values of that part's template."""

    roots: Roots
    folder: Path

    @cached_property
    def progress(self) -> Progress:
        return read_progress(self.folder)

    @cached_property
    def matrix(self) -> Matrix:
        return matrix_of(self.folder)

    @property
    def method(self) -> str:
        """The adapter's method; empty if the configuration does not say."""
        adapter = self.progress.state.settings.get("adapter")
        return str(adapter.get("method", "")) if isinstance(adapter, dict) else ""

    @property
    def has_strength(self) -> bool:
        """Whether the run's result is an adapter, which has a strength."""
        return self.method not in FULL

    def file(self, step: str, layout: str = COMFYUI) -> ResultFile:
        """Return the result, or with a step a checkpoint, as a file in a layout."""
        if layout not in (COMFYUI, AS_WRITTEN, *FORMATS):
            raise UserError(f"{layout[:40]!r} is not a format. Use {', '.join((COMFYUI, AS_WRITTEN, *FORMATS))}")
        return ResultFile(self.roots, self.folder, required_number(step, "step") if step else None, layout, self.method)

    def weights(self, step: str) -> str:
        """Name the run's result, or with a step a checkpoint, for a command."""
        return f"{self.folder}@{required_number(step, 'step')}" if step else str(self.folder)

    def image_form(self) -> Json:
        """Return the defaults of the picture form: the settings of the run's validation."""
        settings = self.progress.state.settings
        validation, data = settings.get("validation"), settings.get("data")
        option: Json = validation if isinstance(validation, dict) else {}
        side = data.get("resolution", "") if isinstance(data, dict) else ""
        prompts = option.get("prompts")
        prompt = prompts[0] if isinstance(prompts, list) and prompts else ""
        if not prompt and self.matrix.rows:
            prompt = self.matrix.rows[0]["prompt"]
        if not prompt and isinstance(data, dict):  # before the first pictures
            prompt = data.get("prompt") or "a picture"
        fallback = {"width": option.get("width") or side, "height": option.get("height") or side}
        own = {name: option.get(name, "") for name in ("seed", "steps", "guidance")}
        own["negative_prompt"] = option.get("negative_prompt") or ""
        return {"prompt": prompt, **own, **fallback}

    def state(self) -> Json:
        """Return the state and the sections."""
        return {"run": self.progress}

    def charts(self) -> Json:
        """Return the charts, and memory by stage."""
        planned = self.progress.steps if self.progress.running else None
        return {"run": self.progress, "charts": charts_of(self.folder, planned)}

    def form(self) -> Json:
        """Return the form for requests to the run, if it is training."""
        return {"run": self.progress, "image_form": self.image_form()}

    def images(self) -> Json:
        return {"run": self.progress, "matrix": self.matrix, "strip": strip_of(self.folder)}

    def requests(self) -> Json:
        """Return waiting requests, answers and requested pictures, newest first."""
        answers = read_answers(self.folder)
        answered = {answer["id"] for answer in answers}
        try:
            waiting, broken = [each for each in read_requests(self.folder) if each.id not in answered], ""
        except UserError as error:
            waiting, broken = [], str(error)
        generated = [each for each in read_generated(self.folder) if (self.folder / each["file"]).is_file()]
        answered_last = [answer for answer in answers if answer["state"] != "done" or answer.get("ask") != "draw"]
        return {
            "waiting": waiting,
            "broken": broken,
            "answers": answered_last[: -SHOWN - 1 : -1],
            "generated": generated[: -SHOWN - 1 : -1],
        }

    def log(self) -> Json:
        """Return the end of the log, for a run that a page started."""
        return {"lines": processes.tail(self.roots, job_name(TRAIN, self.folder.name), LOG_LINES)}

    def card(self) -> Json:
        """Return what the cards are doing, while the run trains on one."""
        attempts = attempts_of(self.folder) if self.progress.running else []
        on_card = bool(attempts) and not attempts[-1].device.startswith(queue.CPU) and bool(shutil.which("nvidia-smi"))
        return {"on_card": on_card, "cards": METER.read() if on_card else ()}

    def next_steps(self) -> Json:
        """Return what can be done with the run when it is not training."""
        state, steps = self.progress.state, self.progress.steps or self.progress.state.done
        try:
            best = choose_best(self.folder)
        except (UserError, KeyError, TypeError):  # a file about it is damaged
            best = None
        summary = json_object(self.folder / SUMMARY)
        saved = [step for step, _ in list_checkpoints(self.folder)]
        last = summary.get("steps")
        sources = [(str(step), f"step {step:,}") for step in reversed(saved)]
        if self.file("").source is not None and last not in saved:
            sources.insert(0, ("", f"the result, step {last:,}" if isinstance(last, int) else "the result"))
        # the result rather than a checkpoint with the same weights
        first = "" if best is None or (best.step == last and self.file("").source) else str(best.step)
        more = steps if state.done < steps else steps + max(1, steps // 2)  # as planned, or half as many again
        return {
            "run": self.progress,
            "steps": saved,
            "best": best,
            "evaluation": evaluation_at(self.folder, best.step) if best is not None else None,
            "file": self.file(first),
            "file_step": best.step if best is not None else last,
            "sources": sources,
            "has_result": self.file("").source is not None,
            "output": str(summary.get("output", "")),
            "command_run": shlex.quote(str(self.folder)),
            "report": (self.folder / REPORT).is_file(),
            "formats": FORMATS if self.method in ("lora", "dora") else {},
            "has_strength": self.has_strength,
            "strengths": STRENGTHS,
            "more": more,
            "image_form": self.image_form(),
            **self.comparisons(),
        }

    def jobs(self) -> Json:
        """Return the processes that the page has started for the run, besides its training."""
        found = []
        for kind, title in JOBS.items():
            name = job_name(kind, self.folder.name)
            lines, running = processes.tail(self.roots, name, JOB_LINES), processes.is_running(self.roots, name)
            if lines or running:
                code = None if running else processes.exit_code(self.roots, name)
                word = (
                    "running" if running else "stopped" if code in processes.STOPPED else "failed" if code else "done"
                )
                job = {"kind": kind, "title": title, "word": word, "lines": lines, "seconds": 0, "about": ""}
                found.append(job | (self.running_job(kind) if running else {}))
        return {"jobs": found}

    def running_job(self, kind: str) -> Json:
        """Return since how many seconds a verb has been running, and what a comparison draws."""
        record = processes.read_record(self.roots, job_name(kind, self.folder.name))
        words, since = record.get("words"), record.get("since")
        listed = [each for each in words if isinstance(each, str)] if isinstance(words, list) else []
        prompt = next((each for each in listed if each.startswith("--prompt=")), "")
        seconds = max(0.0, time.time() - since) if isinstance(since, float) else 0.0
        return {"kind": kind, "title": JOBS[kind], "seconds": int(seconds), "about": prompt.removeprefix("--prompt=")}

    def comparisons(self) -> Json:
        return {"comparisons": comparisons_of(self.folder)}


# In the page's order: the topic that renews a part, its template, and the template's values. `after` contains
# `comparisons`.
PARTS: dict[str, tuple[str, str, Callable[[RunView], Json]]] = {
    "now": ("run", "run_now.html", RunView.state),
    "card": ("held", "run_card.html", RunView.card),
    "ask": ("held", "run_ask.html", RunView.form),
    "requests": ("requests", "run_requests.html", RunView.requests),
    "result": ("after", "run_result.html", RunView.next_steps),
    "jobs": ("jobs", "run_jobs.html", RunView.jobs),
    "pictures": ("pictures", "run_pictures.html", RunView.images),
    "charts": ("run", "run_charts.html", RunView.charts),
    "after": ("after", "run_after.html", RunView.next_steps),
    "log": ("log", "run_log.html", RunView.log),
    "comparisons": ("comparisons", "run_comparisons.html", RunView.comparisons),
}


def view_of(request: Request) -> RunView:
    """Return the run that a path names, or answer 404."""
    roots: Roots = request.app.state.roots
    folder = roots.run(request.path_params["name"])
    if folder is None:
        raise HTTPException(404, f"There is no run {request.path_params['name']}")
    return RunView(roots, folder)


with_run_form = partial(with_form, require=view_of)


def page(request: Request) -> Response:
    """Show the page with all of its parts."""
    view, all_values = view_of(request), Json()
    for _, _, values in PARTS.values():
        all_values |= values(view)
    parts = [(id, topic, template) for id, (topic, template, _) in PARTS.items() if id != "comparisons"]
    return render(request, "run.html", name=view.folder.name, parts=parts, **all_values)


def part(template: str, values: Callable[[RunView], Json], request: Request) -> Response:
    """Show one part, after a change."""
    view = view_of(request)
    return render(request, template, name=view.folder.name, **values(view))


# What can be asked of a run


@with_run_form
def ask_run(request: Request, form: Form) -> Response:
    """Put a request into the control file."""
    view, what = view_of(request), form.get("ask", "")
    asked: AnyRequest
    if what == "save":
        asked = SaveRequest(id=new_id("save"), ask="save")
    elif what == "stop":
        asked = StopRequest(id=new_id("stop"), ask="stop")
    elif what == "draw":
        asked = _generate_request(form)
    else:
        raise UserError(f"{what[:40]!r} cannot be asked of a run. Use draw, save or stop")
    ask(view.folder, asked)
    return render(request, "run_asked.html", asked=asked)


def _generate_request(form: Form) -> GenerateRequest:
    """Read a request for a picture; empty fields mean the run's settings."""
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
        return GenerateRequest(**data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, data, GenerateRequest), "this picture") from None


# What can be done with a run


@with_run_form
def compare(request: Request, form: Form) -> Response:
    """Generate with the base and with a checkpoint at several strengths."""
    view = view_of(request)
    prompt = " ".join(form.get("prompt", "").split())
    if not prompt or not prompt.isprintable() or len(prompt) > LONGEST:
        raise UserError(f"prompt: write 1 to {LONGEST:,} characters that can be printed")
    seed = required_number(form.get("seed") or "0", "seed")
    source = view.weights(form.get("step", ""))
    models = [source]
    if view.has_strength:
        models = [f"{source}:{strength:g}" for strength in strengths_of(form.get("strengths", STRENGTHS))]
    words = ["compare", *models, "--run", source, f"--prompt={prompt}", f"--seed={seed}", "--predict"]
    return _begin(request, view, COMPARE, words)


@with_run_form
def choose_step(request: Request, form: Form) -> Response:
    """Choose a step as the best, or let the figures choose."""
    view, step = view_of(request), form.get("step", "auto")
    chosen = "auto" if step == "auto" else str(required_number(step, "step"))
    return _begin(request, view, "choose", ["evaluate", str(view.folder), "--choose", chosen])


@with_run_form
def convert(request: Request, form: Form) -> Response:
    """Convert the result or a checkpoint, if its file is not in the wanted layout or converted already, and offer it
    for download. Answers when it is ready."""
    view, step, layout = view_of(request), form.get("step", ""), form.get("format", COMFYUI)
    file, is_part = view.file(step, layout), request.headers.get("hx-request") == "true"
    try:
        size = format_bytes(file.ready().stat().st_size)
    except UserError as error:
        if not is_part:
            raise
        return render(request, "problem_part.html", message=str(error))
    address = f"/run/{quote(os.fsencode(view.folder.name))}/download?{urlencode({'step': step, 'format': layout})}"
    if not is_part:
        return RedirectResponse(address, 303)
    place = "models/hypernetworks" if file.name.endswith(".pt") else "models/loras"
    return render(request, "run_file.html", address=address, file=file.name, size=size, place=place)


def download(request: Request) -> Response:
    """Send a file that ``convert`` has offered."""
    view, query = view_of(request), request.query_params
    found = view.file(query.get("step", ""), query.get("format", COMFYUI))
    if found.file is None or not found.file.is_file():
        raise HTTPException(404, "This file is not there: convert it on the run's page")
    return FileResponse(found.file, filename=found.name, media_type=RESULT["content-type"])


def report(request: Request) -> Response:
    """Write the run's report."""
    view = view_of(request)
    return _begin(request, view, "report", ["report", str(view.folder)])


@with_run_form
def finish(request: Request, form: Form) -> Response:
    """Make a stopped run's checkpoint its result."""
    view = view_of(request)
    return _begin(request, view, "finish", ["control", view.weights(form.get("step", "")), "--finish"])


def _begin(request: Request, view: RunView, kind: str, words: list[str]) -> Response:
    """Start a verb for a run, and report it; if one of this kind is running, show that one instead."""
    name = job_name(kind, view.folder.name)
    running = processes.is_running(view.roots, name)
    if not running:
        processes.start(view.roots, words, name, title=f"{JOBS[kind]} of {view.folder.name}")
    job = view.running_job(kind) if running else {"kind": kind, "title": JOBS[kind]}
    return render(request, "run_begun.html", name=view.folder.name, job=job, before=running)


@with_run_form
def stop_job(request: Request, form: Form) -> Response:
    """End a verb that the page has started for the run."""
    view, kind = view_of(request), form.get("kind", "")
    if kind not in JOBS:
        raise UserError(f"{kind[:40]!r} is nothing that this page starts. Use {', '.join(JOBS)}")
    processes.send_signal(view.roots, job_name(kind, view.folder.name))
    return part("run_jobs.html", RunView.jobs, request)


@with_run_form
def go_on(request: Request, form: Form) -> Response:
    """Queue the run, to continue training up to a number of steps."""
    view = view_of(request)
    name, state = view.folder.name, view.progress.state
    steps = required_number(form.get("steps", ""), "steps")
    if view.progress.running:
        raise UserError(f"{name} is training already")
    if steps <= state.done and state.word == "finished":
        raise UserError(f"{name} has {state.done:,} steps. Use more than that")
    sections = (state.settings.get(key) for key in ("train", "output"))
    train, output = ({**each} if isinstance(each, dict) else {} for each in sections)
    train |= {"steps": steps} | ({"epochs": None} if "epochs" in train else {})
    output["runs"] = str(view.folder.parent)
    settings = {**state.settings, "name": name, "train": train, "output": output}
    config = view.roots.own / "configs" / f"{job_name(TRAIN, name)}-goes-on.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    write_json(config, settings, shared=True)
    queue.add(view.roots, name, config, queue.queue_device(settings), resume=True)
    return render(request, "run_queued.html")


def required_number(text: str, what: str) -> int:
    """Read a whole number of at least 0 from a form's field."""
    number = whole_number(text.strip())
    if number is None:
        raise UserError(f"{what}: {text.strip()[:40]!r} is not a whole number of at least 0")
    return number


def strengths_of(text: str) -> list[float]:
    """Read strengths such as ``0.5 1``, in order, without duplicates and 0: the base is always compared."""
    rule = f"Use 1 to {MOST_STRENGTHS} numbers above 0 and at most {STRONGEST:g}, such as {STRENGTHS}"
    try:
        found = sorted({float(part) for part in re.split(r"[\s,;]+", text.strip())} - {0.0})
    except ValueError:
        raise UserError(f"strengths: {text[:60]!r} is not a list of numbers. {rule}") from None
    if not 1 <= len(found) <= MOST_STRENGTHS or not all(0 < value <= STRONGEST for value in found):
        raise UserError(f"strengths: {text[:60]!r} does not fit. {rule}")
    return found


# Its files


def file(request: Request) -> Response:
    """Send a picture, a report or a result."""
    view, path = view_of(request), request.path_params["path"]
    headers, found = SENT.get(Path(path).suffix), view.roots.find_inside(view.folder, path)
    if headers is None or found is None:
        raise HTTPException(404)
    return FileResponse(found, headers=headers)


def small(request: Request) -> Response:
    """Send a small copy of a picture."""
    view = view_of(request)
    found = view.roots.find_inside(view.folder, request.path_params["path"])
    if found is None or found.suffix != ".png":
        raise HTTPException(404)
    try:
        data = small_copy(found, file_stamp(found))
    except (OSError, SyntaxError, ValueError):
        raise HTTPException(404, "The picture is damaged") from None
    return Response(data, media_type="image/webp", headers={"cache-control": "private, max-age=3600"})
