"""Load the pages' templates. Jinja escapes all user input (prompts, names, captions) on every page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simpletune.system.package import ASSETS

if TYPE_CHECKING:
    from jinja2 import Template


def page_template(kind: str, **filters: Callable[..., str]) -> Template:
    """Load the template ``assets/KIND/page.html``; rendering it without a variable that it uses is an error.

    Args:
        kind: ``report``, ``compare`` or ``data_report``.
        filters: by name in the template.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(ASSETS / kind)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(filters)
    return environment.get_template("page.html")
