"""The pages' templates. What somebody typed (prompts, names, captions) goes through Jinja's escaping, in every page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def page_template(kind: str, **filters: Callable[..., str]) -> Template:
    """The template ``assets/KIND/page.html``; a name that it does not get is an error.

    Args:
        kind: ``report``, ``compare`` or ``data_report``.
        filters: by the names that the template knows them by.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(ASSETS / kind)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(filters)
    return environment.get_template("page.html")
