"""Make text safe for a terminal: escape control characters, and describe exceptions in one line."""

from __future__ import annotations

import re
import unicodedata

# Control characters except line feed and tab; direction marks and overrides; other line breaks; lone surrogates.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

LONGEST_NAME = 120  # characters of a name in a message
BIDIRECTIONAL = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they reorder the surrounding text


def printable(text: str) -> str:
    r"""Escape characters that a terminal would obey (ESC becomes ``\x1b``); line feeds and tabs stay."""
    return STEERING.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode(), text)


def describe_exception(error: BaseException) -> str:
    """Describe an exception in one line: its type and at most 300 characters of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no reason given'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def printable_name(name: str) -> str:
    """Make a name or a text safe for one line of a terminal: escape line breaks and other control characters, and
    shorten a very long one in the middle."""
    cut = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}...{name[-LONGEST_NAME // 2 + 3 :]}"
    return "".join(
        character.encode("unicode_escape").decode()
        if character in BIDIRECTIONAL or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        else character
        for character in cut
    )
