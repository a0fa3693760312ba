"""The page of a run: the parts of ``running``, and what can be done when the run is not training: its report,
comparisons, choosing a step, files for other tools, and continuing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletune.adapters.methods.adapter import OUTPUT
from simpletune.apps.web import queue, run_live
from simpletune.apps.web.files import file_response
from simpletune.apps.web.processes import LOGS
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run.comparisons import COMPARE, comparisons_of
from simpletune.apps.web.run.form_values import STRENGTHS, plain_text, strengths_of, whole_number
from simpletune.apps.web.run.pictures import matrix_of
from simpletune.apps.web.run.progress import Progress
from simpletune.apps.web.run_live import (
    TRAIN,
    RunJob,
    begin,
    drawing_defaults,
    job_name,
    job_of,
    list_requests,
    log_lines,
    now_of,
    run_of,
    run_progress,
)
from simpletune.apps.web.run_state import Runs, file_stamp, json_object, stamps_in
from simpletune.apps.web.templates import read_fields, render
from simpletune.runs.best_checkpoint import BestCheckpoint, choose_best
from simpletune.runs.checkpoint_folders import checkpoint_folder, list_checkpoints
from simpletune.runs.folder import ATTEMPTS, BEST, CHECKPOINTS, SUMMARY
from simpletune.system.atomic import write_json
from simpletune.system.options import Json, UserError

REPORT = "report.html"
JOBS = (COMPARE, "choose", "export", "report", "finish")
FORMATS = {"kohya": "kohya (ComfyUI, Forge)", "comfy": "ComfyUI", "diffusers": "diffusers"}
WHOLE = ("full", "partial")  # methods whose result has no strength


def routes() -> list[Route]:
    """Return the routes of the page and of its parts."""
    posts = {
        "compare": compare, "choose": choose_step, "export": export, "report": report, "finish": finish,
        "continue": go_on,
    }  # fmt: skip
    gets = {"after": after, "jobs": jobs, "comparisons": comparisons}
    return [
        Route("/run/{name}", page),
        *run_live.routes(),
        *(Route(f"/run/{{name}}/{word}", handler) for word, handler in gets.items()),
        *(Route(f"/run/{{name}}/{word}", handler, methods=["POST"]) for word, handler in posts.items()),
        Route("/run/{name}/exports/{file}", exported),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics of the parts, such as ``pictures:NAME``."""
    found: dict[str, Hashable] = {}
    logs = stamps_in(roots.own / LOGS)
    for folder, held in runs:
        parts = run_live.topics(folder, held, logs) | topics(roots, folder, held, logs)
        found |= {f"{topic}:{folder.name}": stamp for topic, stamp in parts.items()}
    return found


def page(request: Request) -> Response:
    """GET /run/NAME: the page."""
    folder = run_of(request)
    values = {**after_of(request, folder), **now_of(folder), **list_requests(folder), **log_lines(request, folder)}
    return render(
        request, "run.html", matrix=matrix_of(folder), drawing=drawing_defaults(folder), jobs=jobs_of(request, folder),
        comparisons=comparisons_of(folder), **values,
    )  # fmt: skip


def topics(roots: Roots, folder: Path, held: bool, logs: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """Return the stamps of the topics ``after``, ``jobs`` and ``comparisons`` of a run.

    Args:
        roots: what the pages may touch.
        folder: run folder.
        held: whether a process trains it.
        logs: stamps of the files with logs, by name.
    """
    files = (SUMMARY, ATTEMPTS, BEST, CHECKPOINTS, REPORT)
    jobs = [logs.get(f"{job_name(kind, folder.name)}{suffix}") for kind in JOBS for suffix in (".log", ".json")]
    exports = exports_of(roots, folder.name)
    return {
        "after": (held, *(file_stamp(folder / name) for name in files), file_stamp(exports)),
        "jobs": tuple(jobs),
        "comparisons": file_stamp(folder / COMPARE),
    }


def exports_of(roots: Roots, name: str) -> Path:
    """The folder of a run's converted files."""
    return roots.own / "exports" / job_name("run", name)


def after(request: Request) -> Response:
    """GET /run/NAME/after: what can be done with the run when it is not training."""
    folder = run_of(request)
    return render(request, "run_after.html", drawing=drawing_defaults(folder), **after_of(request, folder))


def jobs(request: Request) -> Response:
    """GET /run/NAME/jobs: the processes started from this page."""
    return render(request, "run_jobs.html", jobs=jobs_of(request, run_of(request)))


def comparisons(request: Request) -> Response:
    """GET /run/NAME/comparisons: the newest comparisons."""
    folder = run_of(request)
    return render(request, "run_comparisons.html", name=folder.name, comparisons=comparisons_of(folder))


def jobs_of(request: Request, folder: Path) -> list[RunJob]:
    """The processes that the page has started for a run, besides its training."""
    found = (job_of(request.app.state.roots, kind, folder.name) for kind in JOBS)
    return [job for job in found if job is not None]


def after_of(request: Request, folder: Path) -> Json:
    """The values for the part with what the page offers for a run."""
    roots: Roots = request.app.state.roots
    progress, summary, best = run_progress(folder), json_object(folder / SUMMARY), best_of(folder)
    exports = exports_of(roots, folder.name)
    files = sorted(file.name for file in exports.glob("*.safetensors")) if exports.is_dir() else []
    saved = "" if best is None else f"{checkpoint_folder(Path(), best.step)}/{OUTPUT}"
    return {
        "name": folder.name, "run": progress, "steps": [step for step, _ in list_checkpoints(folder)],
        "best": best, "best_file": saved if (folder / saved).is_file() else "",
        "result": OUTPUT if (folder / OUTPUT).is_file() else "", "result_step": summary.get("steps"),
        "output": str(summary.get("output", "")), "report": (folder / REPORT).is_file(),
        "exports": files, "formats": FORMATS, "has_strength": has_strength(progress), "strengths": STRENGTHS,
        "more": more_steps(progress),
    }  # fmt: skip


def best_of(folder: Path) -> BestCheckpoint | None:
    """The best checkpoint; None if there is none, or a file about it is damaged."""
    try:
        return choose_best(folder)
    except (UserError, KeyError, TypeError):
        return None


def has_strength(progress: Progress) -> bool:
    """Return whether a run's result is an adapter, which has a strength."""
    adapter = progress.state.settings.get("adapter")
    return not (isinstance(adapter, dict) and adapter.get("method") in WHOLE)


def more_steps(progress: Progress) -> int:
    """The default number of steps for continuing: as planned, or half as many again."""
    steps = progress.steps or progress.state.done
    return steps if progress.state.done < steps else steps + max(1, steps // 2)


async def compare(request: Request) -> Response:
    """POST /run/NAME/compare: draw the base and a checkpoint at several strengths."""
    folder, form = run_of(request), await read_fields(request)
    prompt = plain_text(form.get("prompt", ""), "prompt")
    seed = whole_number(form.get("seed") or "0", "seed")
    source = weights_argument(folder, form.get("step", ""))
    models = [source]
    if has_strength(run_progress(folder)):
        models = [f"{source}:{strength:g}" for strength in strengths_of(form.get("strengths", STRENGTHS))]
    words = ["compare", *models, "--run", source, f"--prompt={prompt}", f"--seed={seed}", "--predict"]
    return await _begun(request, folder, COMPARE, words)


async def choose_step(request: Request) -> Response:
    """POST /run/NAME/choose: choose a step as the best, or let the figures choose."""
    folder, form = run_of(request), await read_fields(request)
    step = form.get("step", "auto")
    chosen = "auto" if step == "auto" else str(whole_number(step, "step"))
    return await _begun(request, folder, "choose", ["evaluate", str(folder), "--choose", chosen])


async def export(request: Request) -> Response:
    """POST /run/NAME/export: convert a checkpoint for other tools."""
    folder, form = run_of(request), await read_fields(request)
    layout, step = form.get("format", ""), form.get("step", "")
    if layout not in FORMATS:
        raise UserError(f"{layout[:40]!r} is not a format. Use {', '.join(FORMATS)}")
    place = exports_of(request.app.state.roots, folder.name)
    place.mkdir(parents=True, exist_ok=True)
    source = weights_argument(folder, step)
    at = f"-{whole_number(step, 'step')}" if step else ""
    target = place / f"{job_name('lora', folder.name)}{at}-{layout}.safetensors"
    words = ["export", source, "--format", layout, "--out", str(target), "--overwrite"]
    return await _begun(request, folder, "export", words)


async def report(request: Request) -> Response:
    """POST /run/NAME/report: write the run's report."""
    folder = run_of(request)
    return await _begun(request, folder, "report", ["report", str(folder)])


async def finish(request: Request) -> Response:
    """POST /run/NAME/finish: make a stopped run's checkpoint its result."""
    folder, form = run_of(request), await read_fields(request)
    return await _begun(request, folder, "finish", ["finish", weights_argument(folder, form.get("step", ""))])


async def go_on(request: Request) -> Response:
    """POST /run/NAME/continue: queue the run, to continue training up to a number of steps."""
    folder, form = run_of(request), await read_fields(request)
    steps = whole_number(form.get("steps", ""), "steps")
    progress = run_progress(folder)
    if progress.running:
        raise UserError(f"{folder.name} is training already")
    if steps <= progress.state.done and progress.state.word == "finished":
        raise UserError(f"{folder.name} has {progress.state.done:,} steps. Use more than that")
    settings = going_on(folder, progress.state.settings, steps)
    await run_in_threadpool(_queued, request.app.state.roots, folder.name, settings)
    return render(request, "run_begun.html", kind="the run, as soon as the queue reaches it")


def going_on(folder: Path, settings: Json, steps: int) -> Json:
    """The configuration with which a run continues in its folder up to a number of steps."""
    train, output = ({**settings[key]} if isinstance(settings.get(key), dict) else {} for key in ("train", "output"))
    train |= {"steps": steps} | ({"epochs": None} if "epochs" in train else {})
    return {**settings, "name": folder.name, "train": train, "output": output | {"runs": str(folder.parent)}}


def _queued(roots: Roots, name: str, settings: Json) -> None:
    """Write the configuration for the queue, and queue the run."""
    config = roots.own / "configs" / f"{job_name(TRAIN, name)}-goes-on.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    write_json(config, settings, shared=True)
    queue.add(roots, name, config, queue.queue_device(settings), resume=True)


def weights_argument(folder: Path, step: str) -> str:
    """Name a run's result, or one of its checkpoints, for a command."""
    return f"{folder}@{whole_number(step, 'step')}" if step else str(folder)


async def _begun(request: Request, folder: Path, kind: str, words: list[str]) -> Response:
    """Start a verb, and report it."""
    await run_in_threadpool(begin, request.app.state.roots, kind, folder.name, words)
    return render(request, "run_begun.html", kind=kind)


def exported(request: Request) -> Response:
    """GET /run/NAME/exports/FILE: a converted file."""
    roots: Roots = request.app.state.roots
    place = exports_of(roots, run_of(request).name)
    headers = {"content-type": "application/octet-stream", "content-disposition": "attachment"}
    return file_response(roots, place, request.path_params["file"], **headers)
