"""Read the command line of a training script from a command file, which is never run: ``shells`` gives its commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PureWindowsPath

from simpletune.commands.importers.shells import MOST_TEXT, SHELLS, Cmd, Command, PowerShell, Sh, Shell, TooLong
from simpletune.system.options import Json

LAUNCHER = re.compile(r"[\W_]*(?:python[\d.]*w?|py|accelerate|torchrun|deepspeed|ipython)\w*[\W_]*", re.IGNORECASE)
TRAINS = re.compile(r"train|fine_?tun|dreambooth|inversion", re.IGNORECASE)  # in a script's name
FLAG = re.compile(r"--[\w-]+(=|$)")  # with blanks in its name it is a value, as for argparse
BEFORE = ("call", "start", "exec", "nohup", "sudo", "time", "env", "nice", "&")  # a script's name, in its place
SAYS = ("echo", "printf", "write-host", "write-output", "title", "type", "cat")
INNER: dict[str, type[Shell]] = {
    "cmd": Cmd, "bash": Sh, "sh": Sh, "zsh": Sh, "powershell": PowerShell, "pwsh": PowerShell,
}  # fmt: skip
TOOK = "command_file"  # the key of what is to be said of a command file: (key, value, why)


def read_command(text: str, suffix: str) -> Json | None:
    """Return the options of the first training script of a command file, the script's name as ``script``, and what is
    to be said of the rest of the file as ``TOOK``; None if it runs no such script."""
    commands = list(_commands(text, SHELLS[suffix]))
    found = [
        (command, at, name)
        for command in commands
        if (at := _script(command.words)) is not None and TRAINS.search(name := _name(command.words, at))
    ]
    if not found:
        return None
    (command, at, script), *further = found
    said = [[shown, script, why] for shown, why in command.notes.items()]
    said += [
        [f"line {other.line}", name, "a further training script: put its command in a file of its own"]
        for other, _, name in further
    ]
    said += [
        [f"line {each.line}", " ".join(each.words), "no command: its shell does not join it to the one above"]
        for each in commands
        if FLAG.match(each.words[0]) and each.line > command.line
    ]
    unique = [list(row) for row in dict.fromkeys(map(tuple, said))]  # a loop trains in each round
    return {"script": script, **read_flags(command.words[at + 1 :]), TOOK: unique}


def _commands(text: str, shell: type[Shell]) -> Iterator[Command]:
    """Yield commands; those in quotes that another shell is called with (``cmd /k "..."``) are read as its own."""
    outer = shell()
    for command in outer.read(text):
        words = command.words
        called = next((at for at, word in enumerate(words[:-2]) if _program(word) in INNER), None)
        if called is not None and words[called + 1].lower() in ("/k", "/c", "-c", "-lc", "-command"):
            inner = words[called + 2 :]
            if len(inner) > 1:
                yield Command(inner, command.notes, command.line)
                continue
            for each in INNER[_program(words[called])](outer.bounds).read(inner[0]):
                yield Command(each.words, command.notes | each.notes, command.line)
        else:
            yield command


def _program(word: str) -> str:
    """Return the name of a program, without its folder and ``.exe``."""
    return PureWindowsPath(word).name.lower().removesuffix(".exe")


def _script(words: list[str]) -> int | None:
    """Return the place of the Python script that a command runs, or of its module (``-m``)."""
    if _program(words[0]) in SAYS:
        return None
    launched = False
    for at, word in enumerate(words):
        if launched and word == "-c":
            return None
        if launched and words[at - 1] in ("-m", "--module") and not LAUNCHER.match(word):
            return at
        if word.lower().endswith(".py"):
            first = all(_program(before) in BEFORE or "=" in before or not before for before in words[:at])
            if launched or first:
                return at
        launched = launched or LAUNCHER.fullmatch(_program(word)) is not None
    return None


def _name(words: list[str], at: int) -> str:
    name = PureWindowsPath(words[at]).name
    return name if name.lower().endswith(".py") else f"{name.rpartition('.')[2]}.py"


def split_words(text: str) -> list[str]:
    """Split a line as a shell does. Raises ValueError if quotes never close, TooLong if it is too long."""
    if len(text) > MOST_TEXT:
        raise TooLong(f"a command of {len(text):,} characters. Use at most {MOST_TEXT:,}")
    return shlex.split(text)


def read_flags(words: list[str]) -> Json:
    """Return options by name: ``--rank=4``, ``--rank 4``, ``--push_to_hub`` (true), ``--betas 0.9 0.99`` (a list)."""
    found: Json = {}
    key = ""
    for word in words:
        if FLAG.match(word):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            found[key] = value if equals else True
        elif key and isinstance(found[key], list):
            found[key].append(word)
        elif key:
            found[key] = word if found[key] is True else [found[key], word]
    return found


def listed(value: object) -> list[object]:
    """Return one value or several, as a list."""
    return value if isinstance(value, list) else [value]
