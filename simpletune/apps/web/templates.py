"""Render pages and parts of pages; read forms. Jinja escapes every value; a missing variable is an error."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletune import __version__
from simpletune.apps.http import read_body
from simpletune.data.sources.walk import SUFFIXES, replace_surrogates
from simpletune.system.package import ASSETS

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = ASSETS / "web"
MOST_FORM = 2**20  # bytes of a form
Form = dict[str, str]


@functools.cache
def jinja_environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["version"] = __version__
    made.globals["picture_suffixes"] = ",".join(SUFFIXES)
    return made


def render(request: Request, template: str, status: int = 200, **values: object) -> HTMLResponse:
    """Render a template of ``assets/web``: a whole page extends ``base.html``, a part does not. The request's path
    marks the current entry of the navigation."""
    text = jinja_environment().get_template(template).render(path=request.url.path, **values)
    return HTMLResponse(replace_surrogates(text), status)  # names of files need not be UTF-8


async def read_form(request: Request) -> Form:
    """Read a form as browsers send it (``application/x-www-form-urlencoded``): each field with its last value. Raises
    HTTPException, 400, if it is not UTF-8, and those of ``read_body``."""
    body = await read_body(request, "application/x-www-form-urlencoded", MOST_FORM, "form", "a form")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=5000)
    except ValueError:
        raise HTTPException(400, "The form is not UTF-8, or has more than 5,000 fields") from None
    return {name: values[-1] for name, values in fields.items()}


def with_form(
    handle: Callable[[Request, Form], Response], require: Callable[[Request], object] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """Make a route's endpoint of a function that answers a form; it runs in a thread, because it reads and writes
    files. So does ``require``, which raises before the form is read if there is nothing to answer for."""

    @functools.wraps(handle)
    async def endpoint(request: Request) -> Response:
        if require is not None:
            await run_in_threadpool(require, request)
        return await run_in_threadpool(handle, request, await read_form(request))

    return endpoint
