"""Read the fields of a run's forms: whole numbers, prompts, lists of strengths."""

from __future__ import annotations

import re

from simpletune.runs.control import LONGEST, STRONGEST
from simpletune.system.options import UserError

STRENGTHS = "0.25 0.5 0.75 1 1.25"
MOST_STRENGTHS = 8


def whole_number(text: str, what: str) -> int:
    """Read a whole number.

    Raises:
        UserError: the text is not a whole number.
    """
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UserError(f"{what}: {text[:40]!r} is not a whole number of at least 0")
    return int(text)


def plain_text(text: str, what: str) -> str:
    """Read a text without control characters.

    Raises:
        UserError: it is empty or contains control characters.
    """
    text = " ".join(text.split())
    if not text or not text.isprintable() or len(text) > LONGEST:
        raise UserError(f"{what}: write 1 to {LONGEST:,} characters that can be printed")
    return text


def strengths_of(text: str) -> list[float]:
    """Read strengths from a text such as ``0.5 1``, in order and without duplicates; drops 0, because the base is
    always drawn.

    Raises:
        UserError: one is not a number, or there are none or too many.
    """
    parts = re.split(r"[\s,;]+", text.strip())
    rule = f"Use 1 to {MOST_STRENGTHS} numbers above 0 and at most {STRONGEST:g}, such as {STRENGTHS}"
    try:
        found = sorted({float(part) for part in parts} - {0.0})
    except ValueError:
        raise UserError(f"strengths: {text[:60]!r} is not a list of numbers. {rule}") from None
    if not 1 <= len(found) <= MOST_STRENGTHS or not all(0 < value <= STRONGEST for value in found):
        raise UserError(f"strengths: {text[:60]!r} does not fit. {rule}")
    return found
