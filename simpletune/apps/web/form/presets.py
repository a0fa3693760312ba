"""The form's bases by card: the shipped configuration nearest to the card, for the user's folder and trigger word."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

from simpletune.apps.web.form.fields import StartingConfig, get_at, set_at
from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import Suggestion, profile_of, suggest
from simpletune.commands.init.inspect_folder import FolderContents
from simpletune.config.load import read_json, shipped_names
from simpletune.config.overrides import as_overrides
from simpletune.config.schema import run_name
from simpletune.system.gpus import GROUPS, Card
from simpletune.system.options import Json, UserError

CHOSEN = "chosen for your card and pictures"  # the source of a preset's values
HERE = "here"  # the machine that serves the page
WITHOUT_CARD, WITH_CARD = "demo", "sd3_medium_lora_8gb"
SIZES = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192)  # GB of cards that are not in the list
OF_MODEL = ("resolution", "caption_dropout", "max_upscale")
"""Fields of ``data`` that depend on the model rather than on the folder."""
OF_FOLDER = (
    "captions", "prompt", "missing_prompt", "caption_prefix", "folder_names", "mask", "mask_path", "reading", "split",
)  # fmt: skip
"""Fields of ``data`` that say how to read one folder, and mean nothing for another."""
PROMINENT = ("data.split", "data.mask", "data.missing_prompt", "data.on_error", "data.caption_prefix", "prior.method")
"""Decisions that a person wants to know of before the start."""
LABELS = {"prior.method": "Prior preservation"}  # of these, where the field's name alone does not say it
TRY_OUT = (
    "This machine has no graphics card: the tiny model that comes with simpletune, for trying out. It draws flat "
    "figures of 64 px, no photos"
)


@cache
def card_here() -> Card | None:
    """Return this machine's first graphics card that torch can use; None if there is none."""
    from simpletune.commands.init.fit_card import card_here

    return card_here()[0]


def cards() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return groups of (value, words) of the cards to choose from: this machine's first, and by memory last."""
    here = card_here()
    words = f"this machine: {here.name}, {here.gib:.0f} GiB" if here else "this machine: no graphics card"
    groups = (
        (name, [(card.name, f"{card.name}, {card.gib:g} GiB") for card in group]) for name, group in GROUPS.items()
    )
    return [("", [(HERE, words)]), *groups, ("Another card", [(f"{gib}GiB", f"other: {gib} GB") for gib in SIZES])]


def preset(
    card: Card | None, folder: Path | None, seen: FolderContents | None, trigger: str, chosen: Json | None = None
) -> StartingConfig:
    """Return a configuration for a card, a folder of pictures, if one is chosen yet, what it holds, once that is known,
    a trigger word, which may be empty, and the fields that the user's answers about the pictures set."""
    if folder is not None and seen is not None:
        found = suggest(folder, Answers(trigger=trigger or None), card, seen, chosen)
        fields = as_overrides(chosen or {})
        words = ["init", str(folder), *fields, *(["--trigger", trigger] if trigger else []), "--yes", "--out"]
        return StartingConfig(
            found.config,
            CHOSEN,
            f"{found.config['name']}.json",
            {each.path: each.why for each in found.reasons},
            (TRY_OUT,) if card is None else (),
            tuple(words),
            _image_notes(found, seen, PROMINENT),
            found.questions,
        )
    origin = WITHOUT_CARD if card is None else WITH_CARD
    data = copy.deepcopy(read_json(Path(origin)))
    for name in ("$schema", "about"):
        data.pop(name, None)
    data["validation"]["prompts"] = None
    data["data"]["path"] = ""
    reasons: dict[str, str] = {}
    if card is not None:
        profile, reasons["memory.profile"] = profile_of(card)
        set_at(data, "memory.profile", profile)
    data["name"] = run_name(folder.name if folder else "", "my_run")
    if folder is not None:
        data["data"]["path"] = str(folder)
    return StartingConfig(data, CHOSEN, origin, reasons, (TRY_OUT,) if card is None else ())


def shipped_config(
    name: str, folder: Path | None, seen: FolderContents | None, trigger: str, chosen: Json | None = None
) -> StartingConfig:
    """Return a shipped configuration for the user's pictures. Raises UserError if there is none with this name."""
    if name not in shipped_names():
        raise UserError(f"There is no shipped configuration {name[:80]!r}. Choose one from the list")
    data = read_json(Path(name))
    data.pop("$schema", None)
    label = f"from the configuration {name}"
    if folder is None:
        return StartingConfig(data, label, name)
    data["data"] = {key: value for key, value in data["data"].items() if key not in OF_FOLDER}
    data["data"]["path"] = str(folder)
    if seen is None:
        return StartingConfig(data, label, name)
    found = suggest(folder, Answers(trigger=trigger or None), None, seen, chosen)
    data["data"] |= {key: value for key, value in found.config["data"].items() if key not in OF_MODEL}
    reasons = {each.path: each.why for each in found.reasons if get_at(data, each.path) is not None}
    said = _image_notes(found, seen, tuple(path for path in PROMINENT if path.startswith("data.")))
    return StartingConfig(data, label, name, reasons, (), (), said, found.questions)


def _image_notes(found: Suggestion, seen: FolderContents, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Describe the pictures beside their sums: decisions that follow from them, and notes."""
    decided = []
    for each in found.reasons:
        if each.path in paths:
            label = LABELS.get(each.path) or each.path.rpartition(".")[2].replace("_", " ").capitalize()
            more = f". {each.override}" if each.override and each.path.startswith("data.") else ""  # no flags of init
            decided.append(f"{label} “{each.value}”: {each.why}{more}")
    left_over = seen.report.files.reason_sentences()
    return (*decided, *(note for note in found.notes if note not in left_over))
