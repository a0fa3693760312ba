"""The HTTP application: routes, error responses, the access log."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from simpletune.apps.http import CLIENT_CLOSED_REQUEST, CLIENT_LEFT, Guard, read_body
from simpletune.apps.serve.metrics import CONTENT_TYPE, Metrics
from simpletune.apps.serve.requests import Capabilities, RequestError, ServedImage, read_requests
from simpletune.apps.serve.worker import FAILED, STOPPING, GenerationJob, Worker
from simpletune.system.package import ASSETS
from simpletune.system.printable import printable

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": (PAGE / "page.html", "text/html; charset=utf-8"),
    "/pages.css": (ASSETS / "pages.css", "text/css; charset=utf-8"),
    "/page.css": (PAGE / "page.css", "text/css; charset=utf-8"),
    "/page.js": (PAGE / "page.js", "text/javascript; charset=utf-8"),
}
DECODED = 2  # requests whose pictures are decoded at a time; each takes some hundred MiB
PATIENCE = 10  # seconds for which a request waits to be decoded
STANDARD = ("negative_prompt", "width", "height", "steps", "guidance", "seed")  # fields of a Request, for the page


def to_stderr(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class HttpOptions:
    """Paths, format, host names and log of a server."""

    predict: tuple[str, ...] = ("/predict",)  # paths that generate images
    health: tuple[str, ...] = ("/health",)  # paths that report whether the server is ready
    predictions: Literal["plain", "object"] = "plain"  # base64 text, or {"output": base64 text}
    hosts: Collection[str] | None = None  # allowed Host headers; None: any
    log: Callable[[str], None] = to_stderr  # called with a line for every response


def make_app(worker: Worker, capabilities: Capabilities, metrics: Metrics, options: HttpOptions) -> ASGIApp:
    """Build the application around a worker that generates the images."""
    pages = {path: (file.read_bytes(), kind) for path, (file, kind) in PAGE_FILES.items()}
    decoding = asyncio.Semaphore(DECODED)

    async def read(request: Request) -> list[ServedImage]:
        body = await read_body(request, "application/json", capabilities.limits.body, "body", "application/json")
        try:
            async with asyncio.timeout(PATIENCE):
                await decoding.acquire()
        except TimeoutError:
            busy = f"The pictures of other requests are being decoded. Try again in {PATIENCE} s"
            raise RequestError(503, busy, headers={"Retry-After": str(PATIENCE)}) from None
        try:
            if await request.is_disconnected():  # while it waited
                raise RequestError(CLIENT_CLOSED_REQUEST, CLIENT_LEFT)
            worker.require_ready()
            return await run_in_threadpool(read_requests, body, capabilities)  # parsing must not block others
        finally:
            decoding.release()

    async def predict(request: Request) -> Response:
        arrived = time.monotonic()
        with worker.place():  # before the body, which may have megabytes, is read
            images = await read(request)
            job = worker.submit(images, arrived)
        request.scope["log"].update(pictures=len(images), loras=sorted({image.lora for image in images}))
        encoded = await wait_for_images(request, worker, job)
        waited, generated = job.started - job.submitted, time.monotonic() - job.started
        request.scope["log"]["waited"] = round(waited, 3)
        predictions = encoded if options.predictions == "plain" else [{"output": each} for each in encoded]
        timing = f"wait;dur={1000 * waited:.0f}, draw;dur={1000 * generated:.0f}"  # in ms, as browsers read it
        return JSONResponse({"predictions": predictions}, headers={"Server-Timing": timing})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": worker.state}, 200 if worker.state == "ready" else 503)

    async def scrape(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def info(request: Request) -> Response:
        standard = {name: getattr(capabilities.defaults, name) for name in STANDARD}
        names = {"loras": capabilities.loras, "tuned": capabilities.tuned}
        limits = asdict(capabilities.limits)
        about = {"inpaints": capabilities.inpaints, "status": worker.state}
        return JSONResponse({**names, "standard": standard, "limits": limits, **about})

    async def page(request: Request) -> Response:
        content, kind = pages[request.url.path]
        return Response(content, media_type=kind)

    routes = [Route(path, predict, methods=["POST"]) for path in options.predict]
    routes += [Route(path, health) for path in options.health]
    routes += [Route("/metrics", scrape), Route("/info", info), *(Route(path, page) for path in pages)]
    names = {**dict.fromkeys(pages, "page"), "/metrics": "metrics", "/info": "info"}
    names |= {**dict.fromkeys(options.health, "health"), **dict.fromkeys(options.predict, "predict")}
    metrics.add_gauges(lambda: worker.state == "ready", lambda: worker.waiting, worker.peak_bytes)
    app = Starlette(routes=routes, exception_handlers={RequestError: problem, HTTPException: problem})
    app.router.redirect_slashes = False
    return guard_app(app, names, metrics, options)


def guard_app(app: ASGIApp, names: Mapping[str, str], metrics: Metrics, options: HttpOptions) -> ASGIApp:
    """Wrap an app: besides what ``Guard`` does, count its responses by the names of their paths, and log each as a JSON
    line without prompts."""

    def record(scope: Scope, status: int, seconds: float) -> None:
        metrics.count_response(names.get(scope["path"], "other"), status, seconds)
        client = scope.get("client")
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
            **scope["log"],
        }
        options.log(json.dumps(line))

    return Guard(app, options.hosts, error_answer, FAILED, on_response=record)


async def wait_for_images(request: Request, worker: Worker, job: GenerationJob) -> list[str]:
    """Wait for a job's images in base64. Cancels the job and raises RequestError if the client leaves or the deadline
    passes."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done = asyncio.wrap_future(job.done)
    left: asyncio.Future[None] = asyncio.create_task(wait_for_disconnect())
    try:
        seconds = max(0.0, job.deadline - time.monotonic())
        await asyncio.wait((done, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if done.done() and (encoded := done.result()):
            return encoded
        if left.done():
            raise RequestError(CLIENT_CLOSED_REQUEST, CLIENT_LEFT)
        if worker.state != "ready":
            raise RequestError(503, STOPPING)
        raise RequestError(504, f"Not finished within {worker.limits.seconds:g} s. Request fewer pictures or steps")
    finally:
        left.cancel()
        worker.cancel(job)


async def problem(request: Request, error: Exception) -> Response:
    """Answer a RequestError, an unknown path or a wrong method in the form of all errors."""
    if isinstance(error, RequestError):
        problems = [asdict(problem) for problem in error.problems]
        return error_answer(error.message, error.status, problems, error.headers)
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    message = f"{error.detail}. Allowed: {allowed}" if allowed else error.detail
    return error_answer(message, error.status_code, headers=error.headers)


def error_answer(
    message: str, status: int, problems: Sequence[dict[str, str]] = (), headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse({"error": {"code": status, "message": message, "problems": [*problems]}}, status, headers)
