"""Parse arguments; report a mistake in one line with value, rule and a pointer to the help instead of the usage."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")
_REQUIRED = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """Extend argparse's parser with this project's messages; the verbs' parsers are of this class too."""

    def __init__(self, **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self.register("type", float, _number)
        self.register("type", int, _whole)

    def error(self, message: str, verb: str = "") -> NoReturn:
        """Print the mistake and a pointer to the help, and exit with code 2."""
        text = _in_our_words(message)
        stop = "" if text.endswith("?") else "."
        print(f"error: {text}{stop} See {' '.join(filter(None, (self.prog, verb)))} --help", file=sys.stderr)
        sys.exit(2)


def _in_our_words(message: str) -> str:
    message = message.removeprefix("argument ")
    if message.startswith(_REQUIRED):
        names = message.removeprefix(_REQUIRED)
        return f"{names} {'are' if ', ' in names else 'is'} missing"
    found = _CHOICE.search(message)
    if found:
        from simpletune.config.error_text import did_you_mean

        guess = did_you_mean(found[1], found[2].replace("'", "").split(", "))
        message = f"{message[: found.start()]}unknown value {found[1]}.{guess}"
    return message.rstrip(".")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from None
