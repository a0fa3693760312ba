"""Suggest a configuration for a folder of pictures and a device, with a reason for each choice. Prints and asks
nothing."""

from __future__ import annotations

from pathlib import Path

from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import Choices
from simpletune.commands.init.defaults import UNASKED, Suggestion
from simpletune.commands.init.inspect_folder import FolderContents, inspect_folder
from simpletune.system.console import silent
from simpletune.system.gpus import Card


def suggest(
    folder: Path, answers: Answers = UNASKED, device: Card | None = None, seen: FolderContents | None = None
) -> Suggestion:
    """Suggest a configuration."""
    if seen is None:
        with silent():
            seen = inspect_folder(folder)
    choices = Choices(seen, answers, device)
    choices.base()
    choices.pictures()
    choices.captions()
    choices.method()
    choices.length()
    choices.validation()
    choices.describe()
    return Suggestion(choices.config, tuple(choices.reasons), tuple(choices.notes))
