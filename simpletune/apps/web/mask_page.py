"""The page that paints a picture's mask, and writes it where training reads it."""

from __future__ import annotations

import io
from collections.abc import Hashable
from pathlib import Path
from threading import Lock
from urllib.parse import urlencode

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletune.apps.http import read_body
from simpletune.apps.web.data_page import data_set_of
from simpletune.apps.web.data_set import DataSet
from simpletune.apps.web.history import History
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs
from simpletune.apps.web.templates import render
from simpletune.commands.inspect_data.thumbnails import AT_ONCE
from simpletune.data.sources.image_files import decode, decode_mask, image_size
from simpletune.data.sources.mask_files import LONGEST_SIDE, painted_mask, painting_size, write_mask
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import is_text, read_regular
from simpletune.models.shared.buckets import Size
from simpletune.system.options import Json, UserError

MOST_BYTES = 32 * 2**20  # of a painted mask: twice its pixels, of which an encoder may add a little
QUALITY = 90
SAVING = Lock()  # two saves of one mask at once


def routes() -> list[Route]:
    return [
        Route("/data/mask", page, methods=["GET"]),
        Route("/data/mask", save, methods=["POST"]),
        Route("/data/mask/picture", image),
        Route("/data/mask/painted", mask_image),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return none: nothing here changes by itself."""
    return {}


def page(request: Request) -> Response:
    """Show the picture to paint on, its mask so far, and links to its neighbours."""
    found, name, file = _find_image(request)
    files = [each for each in found.files() if is_text(str(each))]  # the others have no address
    place = files.index(file)
    before, after = files[place - 1 : place], files[place + 1 : place + 2]  # none at an end
    near: Json = {
        side: one[0].relative_to(found.folder).as_posix() if one else ""
        for side, one in (("before", before), ("after", after))
    }
    mask = found.mask(file)
    query = urlencode({**found.given, "name": name})
    return render(
        request, "mask.html", data=found, name=name, query=query, size=painting_size(_size(file)), mask=mask, **near
    )


def image(request: Request) -> Response:
    """Send the picture as training rotates it, at the size at which it is painted on."""
    _, _, file = _find_image(request)
    with AT_ONCE:
        data = read_regular(file)
        image = decode(data, at_least=LONGEST_SIDE).resize(painting_size(image_size(data)))
    return _image(image, "JPEG")


def mask_image(request: Request) -> Response:
    """Send its mask so far, grey, at the same size."""
    found, _, file = _find_image(request)
    mask = found.mask(file).found
    if mask is None:
        raise HTTPException(404)
    with AT_ONCE:
        image = decode_mask(read_regular(mask), "file").resize(painting_size(_size(file)), Image.Resampling.BILINEAR)
    return _image(image, "PNG")


async def save(request: Request) -> Response:
    """Write the mask that the body, a PNG, holds, unless the mask has another digest than the page showed."""
    body = await read_body(request, "image/png", MOST_BYTES, "mask", "a PNG")
    return await run_in_threadpool(_save, request, body)


def _save(request: Request, body: bytes) -> Response:
    found, name, file = _find_image(request)
    with AT_ONCE:
        content = painted_mask(body, _size(file))
    with SAVING:
        before = found.mask(file)
        if before.digest != request.query_params.get("digest", ""):
            raise UserError("The mask was changed by something else since this page showed it, and is left. Reload")
        with History(request.app.state.roots, found.key).change(f"mask of {name}", {before.target: content}):
            write_mask(before, content)
        return JSONResponse({"file": before.target.name, "digest": found.mask(file).digest})


def _find_image(request: Request) -> tuple[DataSet, str, Path]:
    """Return the data set, the picture's name and its file as a request (``?name=``) names them. Raises HTTPException
    if there is no such picture or it cannot be read, UserError if its mask cannot be painted."""
    found, name = data_set_of(request, request.query_params), request.query_params.get("name", "")
    if found.why_no_masks:
        raise UserError(f"Masks cannot be painted here: {found.why_no_masks}")
    file = found.image(name)
    if file is None or file not in found.files():  # a mask is no picture
        raise HTTPException(404, f"{name}: the folder has no such picture. Open the folder again")
    try:
        found.mask(file)
        _size(file)
    except UnusableImage as reason:
        raise HTTPException(422, f"{name} {reason}") from None
    return found, name, file


def _size(file: Path) -> Size:
    return image_size(read_regular(file))


def _image(image: Image.Image, kind: str) -> Response:
    file = io.BytesIO()
    image.save(file, kind, quality=QUALITY)
    return Response(file.getvalue(), media_type=f"image/{kind.lower()}")
