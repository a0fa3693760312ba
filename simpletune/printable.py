"""Text from files that others made, for a terminal: what would steer it is shown and not sent."""

from __future__ import annotations

import re

# Control characters but line break and tab; marks and overrides of direction; other line breaks; halves of pairs.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    r"""A text in which ESC stands as ``\x1b``: a terminal would obey it; line breaks and tabs stay."""
    return STEERING.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode(), text)
