"""docs/how-to/something-went-wrong.md: each message that it quotes is one that the sources can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "something-went-wrong.md").read_text()
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)
OTHERS = {"Killed": "bash prints it for a process that the kernel ended for want of memory"}
HOLE = "…"
Text = tuple[str, ...]
"""What a message consists of; ``HOLE`` stands for a part that varies."""


def texts_of(file: Path) -> list[Text]:
    """The texts that a file can print: strings of Python, where those that are joined are one; quotes of a script, and
    lines that a batch file echoes."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return [text for node in ast.walk(ast.parse(source)) if (text := text_of(node))]
    if file.suffix == ".bat":
        return [tuple(re.split(r"(?=%)|(?<=%)", line)) for line in re.findall(r"^echo (.+)$", source, re.M)]
    quoted = re.findall(r'"((?:[^"\\$]|\\.|\$\([^()]*\)|\$\{[^}]*\}|\$\w*)*)"', source)
    return [tuple(re.sub(r"\$\([^()]*\)|\$\{[^}]*\}|\$\w+", f"\0{HOLE}\0", each).split("\0")) for each in quoted]


def text_of(node: ast.AST) -> Text:
    """The text of a string or an f-string; empty for other nodes."""
    if isinstance(node, ast.JoinedStr):
        parts = (text_of(value) or (HOLE,) for value in node.values)
        return tuple(part for text in parts for part in text)
    return (node.value,) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ()


FILES = [
    *(ROOT / "simpletune").rglob("*.py"),
    *(ROOT / "simpletune").glob("*.sh"),
    *ROOT.glob("*.sh"),
    *ROOT.glob("*.bat"),
]
read = cache(Path.read_text)
texts_in = cache(texts_of)


def begins(rest: str, text: Sequence[str], fillings: frozenset[str]) -> bool:
    """Whether a text, with its holes left or filled, begins with ``rest``."""
    if not rest or not text:
        return not rest
    first, *others = text
    if first != HOLE:
        return first.startswith(rest) or rest.startswith(first) and begins(rest[len(first) :], others, fillings)
    return any(rest.startswith(each) and begins(rest[len(each) :], others, fillings) for each in (HOLE, *fillings))


def starts(message: str, text: Text) -> Iterator[list[str]]:
    """The ends of a text at which the message could begin."""
    for place, part in enumerate(text):
        at = part.find(message[0])
        while at >= 0:
            yield [part[at:], *text[place + 1 :]]
            at = part.find(message[0], at + 1)


def can_be_printed(message: str) -> bool:
    """Whether a source has the message. A hole may be filled with a string of the same file."""
    shown = message.strip(f" {HOLE}")
    words = set(re.findall(r"\w{3,}", shown))  # sorts out most files, whose strings need not be parsed
    for file in FILES:
        if all(word in read(file) for word in words):
            texts = texts_in(file)
            fillings = frozenset(text[0] for text in texts if len(text) == 1 and text[0])
            if any(begins(shown, end, fillings) for text in texts for end in starts(shown, text)):
                return True
    return False


@pytest.mark.parametrize("message", [each for each in QUOTED if each not in OTHERS])
def test_a_quoted_message_is_one_of_the_sources(message: str) -> None:
    assert can_be_printed(message)


def test_what_nobody_prints_is_found() -> None:
    assert can_be_printed("is gated, and no token was sent") and not can_be_printed("is gated, and no key was sent")
    assert not can_be_printed("the device's memory is fuller")
    assert len(QUOTED) > 40 and set(OTHERS) <= set(QUOTED)
    assert len(QUOTED) == len(set(QUOTED))
