"""Read the command line of a training script: a shell file with variables, comments and continued lines, which is never
run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from simpletune.system.options import Json

VARIABLE = re.compile(r"\$\{?(\w+)\}?")
ASSIGNMENT = re.compile(r"(?:export\s+|\$env:)?(\w+)\s*=(?!=)(.*)")
MOST_TEXT = 2**16  # characters of a command, and of its variables' values: shlex takes quadratic time


class TooLong(ValueError):
    """Report a command line that its variables make too long."""


def read_command(text: str) -> Json | None:
    """Return the options of the first command that names a Python script, and the script's name as ``script``; None if
    there is no such command."""
    variables: dict[str, str] = {}
    left = MOST_TEXT

    def value(found: re.Match[str]) -> str:
        nonlocal left
        named = variables.get(found[1], found[0])
        left -= len(named)  # before they are joined: variables of variables double with every line
        if left < 0:
            raise TooLong(
                f"its variables stand for more than {MOST_TEXT:,} characters, up to ${found[1]}. Write the command out"
            )
        return named

    for words in _commands(text):
        words = [VARIABLE.sub(value, word) for word in words]
        script = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if script is not None:
            return {"script": PurePosixPath(words[script].replace("\\", "/")).name} | read_flags(words[script + 1 :])
        for word in words:
            if (found := ASSIGNMENT.fullmatch(word)) is not None:
                variables[found[1]] = found[2]
    return None


def split_words(text: str, comments: bool = False) -> list[str]:
    """Split a line as a shell does; ``ValueError`` for quotes that never close and ``TooLong``."""
    if len(text) > MOST_TEXT:
        raise TooLong(f"a command of {len(text):,} characters. Use at most {MOST_TEXT:,}")
    return shlex.split(text, comments)


def _commands(text: str) -> Iterator[list[str]]:
    """Yield each line's words. Joins lines that end in a backslash; skips those with quotes that never close."""
    for line in re.sub(r"[\\^`][ \t]*\r?\n", " ", text).splitlines():
        try:
            yield split_words(line, comments=True)
        except TooLong:
            raise
        except ValueError:
            continue


def read_flags(words: list[str]) -> Json:
    """Return options by name: ``--rank=4``, ``--rank 4``, ``--push_to_hub`` (true), ``--betas 0.9 0.99`` (a list)."""
    found: Json = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            found[key] = value if equals else True
        elif key and isinstance(found[key], list):
            found[key].append(word)
        elif key:
            found[key] = word if found[key] is True else [found[key], word]
    return found


def listed(value: object) -> list[object]:
    """One value or several, as a list."""
    return value if isinstance(value, list) else [value]
