"""The part of Start and Data that brings pictures: an upload, file by file, and the folders that are here already."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletune.apps.http import BODY_TIMEOUT, CLIENT_CLOSED_REQUEST, CLIENT_LEFT, whole_number
from simpletune.apps.web.data_set import list_folders
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.apps.web.upload import LIMITS, Upload, Uploads
from simpletune.data.sources.source import UnusableImage

CLOSE = {"Connection": "close"}  # what is still under way is not read
ENDED = "This upload has ended, and nothing of it was kept. Upload again"


def routes() -> list[Route]:
    return [
        Route("/upload", begin, methods=["POST"]),
        Route("/upload/{id}/file", receive, methods=["POST"]),
        Route("/upload/{id}/finish", finish, methods=["POST"]),
        Route("/upload/{id}/cancel", cancel, methods=["POST"]),
        Route("/folders", folders),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return none: nothing here changes by itself."""
    return {}


@with_form
def begin(request: Request, form: Form) -> Response:
    """Begin to fill a new folder; ``bytes`` is the size of all files. The answer has the limits of files, so that a
    page need not send what would be left out."""
    upload = request.app.state.uploads.begin(form.get("name", ""), whole_number(form.get("bytes", "")) or 0)
    return JSONResponse({"id": upload.id, "limits": LIMITS})


async def receive(request: Request) -> Response:
    """Receive one file of a path and a size (``?path=PATH&size=BYTES``), whose content is the body; a page leaves out
    the body of a file that is refused for its name or size."""
    path, size = request.query_params.get("path", ""), whole_number(request.query_params.get("size", "")) or 0
    with _using(request) as upload:
        before, kind = len(upload.left_out), None
        try:
            kind = upload.admit(path, size)
            if kind is not None:
                await _read(request, upload, kind)
                await run_in_threadpool(upload.settle, path, kind)
        except UnusableImage as reason:
            upload.leave_out(path, reason)
        left_out = upload.left_out[before:]
        is_read = kind is not None and not left_out
        values = {"pictures": upload.images, "left_out": left_out}
        return JSONResponse(values, headers=None if is_read else CLOSE)


async def _read(request: Request, upload: Upload, kind: str) -> None:
    """Write the body of a request into an upload."""
    chunks = aiter(request.stream())
    with upload.incoming(kind) as write:
        try:
            while True:
                async with asyncio.timeout(BODY_TIMEOUT):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                await run_in_threadpool(write, chunk)
        except TimeoutError:
            raise HTTPException(408, f"Nothing arrived for {BODY_TIMEOUT:g} s. Upload again", CLOSE) from None
        except ClientDisconnect:
            raise HTTPException(CLIENT_CLOSED_REQUEST, CLIENT_LEFT) from None


async def finish(request: Request) -> Response:
    """Give the folder its name."""
    with _using(request) as upload:
        before = len(upload.left_out)
        folder = await run_in_threadpool(upload.finish)
        request.app.state.uploads.end(upload)
        left_out = upload.left_out[before:]
        return JSONResponse({"folder": str(folder), "pictures": upload.images, "left_out": left_out})


def cancel(request: Request) -> Response:
    """Remove what has arrived."""
    upload = request.app.state.uploads.find(request.path_params["id"])
    if upload is not None:
        request.app.state.uploads.end(upload)
    return Response(status_code=204)


@contextmanager
def _using(request: Request) -> Iterator[Upload]:
    """Hold the upload that a request names, for this request alone. Whatever fails ends it, such as a full disk, a
    limit of the whole upload, or a lost connection."""
    uploads: Uploads = request.app.state.uploads
    upload = uploads.find(request.path_params["id"])
    if upload is None:
        raise HTTPException(404, ENDED, CLOSE)
    if upload.busy:
        raise HTTPException(409, "This upload is receiving another file. Send one at a time", CLOSE)
    upload.busy = True
    try:
        yield upload
    except BaseException as error:
        cancelled = uploads.find(upload.id) is None
        uploads.end(upload)
        if cancelled and isinstance(error, OSError):
            raise HTTPException(404, ENDED, CLOSE) from None
        raise
    finally:
        upload.busy = False
        if uploads.find(upload.id) is None:
            uploads.end(upload)  # what was written after it was cancelled


def folders(request: Request) -> Response:
    """Show one level of the folders in the roots (``?folder=PATH``)."""
    query = request.query_params
    found = list_folders(request.app.state.roots, query.get("folder", ""))
    return render(request, "upload_folders.html", level=found, moved="folder" in query)
