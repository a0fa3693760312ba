"""Render pages and parts of pages; read forms. Jinja escapes every value; a missing variable is an error."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from simpletune import __version__
from simpletune.apps.http import read_body
from simpletune.system.package import ASSETS

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = ASSETS / "web"
SHARED = Path(__file__).resolve().parent.parent / "serve" / "page"  # base.css


@functools.cache
def jinja_environment() -> Environment:
    """Load the templates of ``assets/web``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.globals["version"] = __version__
    return made


def render(request: Request, template: str, status: int = 200, **values: object) -> HTMLResponse:
    """Render a template of ``assets/web``.

    Args:
        request: its path marks the current entry of the navigation.
        template: file name; a whole page extends ``base.html``, a part does not.
        status: the response's status.
        values: the template's variables.
    """
    text = jinja_environment().get_template(template).render(path=request.url.path, **values)
    return HTMLResponse(text, status)


MOST_FORM = 2**20  # bytes of a form


async def read_form(request: Request) -> dict[str, list[str]]:
    """Read a form as browsers send it (``application/x-www-form-urlencoded``): each field with all its values.

    Raises:
        HTTPException: 400 if it is not UTF-8, and what ``read_body`` raises.
    """
    body = await read_body(request, "application/x-www-form-urlencoded", MOST_FORM, "form", "a form")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=5000)
    except ValueError:
        raise HTTPException(400, "The form is not UTF-8, or has more than 5,000 fields") from None


async def read_fields(request: Request) -> dict[str, str]:
    """Read a form: each field with its last value. Raises what ``read_form`` raises."""
    return {name: values[-1] for name, values in (await read_form(request)).items()}
