"""The form's bases by card: the shipped configuration nearest to the card, for the user's folder and trigger word."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from simpletune.apps.web.form.fields import StartingConfig, set_at
from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import TRIGGER, profile_of, suggest
from simpletune.config.load import read_json, shipped_names
from simpletune.config.schema import run_name
from simpletune.system.gpus import GROUPS, Card
from simpletune.system.options import Json, UserError

CHOSEN = "chosen for your card and pictures"  # the source of a preset's values
HERE = "here"  # the machine that serves the page
WITHOUT_CARD, WITH_CARD = "demo", "sd3_medium_lora_8gb"
SIZES = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192)  # GB of cards that are not in the list
CAPTIONS = (".txt", ".caption", ".jsonl")
LOOKED_AT = 1000  # entries of a folder; decoding more would keep the form waiting
TRY_OUT = (
    "This machine has no graphics card: the tiny model that comes with simpletune, for trying out. It draws flat "
    "figures of 64 px, no photos"
)


@cache
def card_here() -> Card | None:
    """Return this machine's first graphics card that torch can use; None if there is none."""
    from simpletune.commands.init.machine import card_here

    return card_here()[0]


def cards() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return groups of (value, words) of the cards to choose from: this machine's first, and by memory last."""
    here = card_here()
    words = f"this machine: {here.name}, {here.gib:.0f} GiB" if here else "this machine: no graphics card"
    groups = (
        (name, [(card.name, f"{card.name}, {card.gib:g} GiB") for card in group]) for name, group in GROUPS.items()
    )
    return [("", [(HERE, words)]), *groups, ("Another card", [(f"{gib}GiB", f"other: {gib} GB") for gib in SIZES])]


def preset(card: Card | None, folder: Path | None, trigger: str) -> StartingConfig:
    """Return a configuration for a card, a folder of pictures, if one is chosen yet, and a trigger word, which may be
    empty."""
    if folder is not None:
        try:
            few = sum(1 for _ in zip(range(LOOKED_AT + 1), folder.rglob("*"), strict=False)) <= LOOKED_AT
        except OSError:
            few = True
        if few:
            with suppress(UserError):  # nothing is usable: reported at the field
                return _suggestion(folder, folder.stat().st_mtime_ns, card, trigger)
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
    _use_folder(data, folder, trigger, reasons)
    return StartingConfig(data, CHOSEN, origin, reasons, (TRY_OUT,) if card is None else ())


@lru_cache(maxsize=64)
def _suggestion(folder: Path, changed: int, card: Card | None, trigger: str) -> StartingConfig:
    """Return what ``simpletune init`` suggests for a folder; cached until the folder changes."""
    found = suggest(folder, Answers(trigger=trigger or None), card)
    reasons = {each.path: each.why for each in found.reasons}
    words = ["init", str(folder), *(["--trigger", trigger] if trigger else []), "--yes", "--out"]
    notes = tuple(found.notes) if card is not None else (TRY_OUT, *found.notes)
    return StartingConfig(found.config, CHOSEN, f"{found.config['name']}.json", reasons, notes, tuple(words))


def shipped_config(name: str, folder: Path | None, trigger: str) -> StartingConfig:
    """Return a shipped configuration for the user's pictures; a UserError if there is none with this name."""
    if name not in shipped_names():
        raise UserError(f"There is no shipped configuration {name[:80]!r}. Choose one from the list")
    data = read_json(Path(name))
    data.pop("$schema", None)
    reasons: dict[str, str] = {}
    _use_folder(data, folder, trigger, reasons)
    return StartingConfig(data, f"from the configuration {name}", name, reasons)


def _use_folder(data: Json, folder: Path | None, trigger: str, reasons: dict[str, str]) -> None:
    """Point a configuration to a folder, and put the trigger word into its captions."""
    if folder is None:
        return
    data["data"] = {key: value for key, value in data["data"].items() if key not in ("prompt", "caption_prefix")}
    data["data"]["path"] = str(folder)
    try:
        beside = (each for _, each in zip(range(LOOKED_AT), folder.iterdir(), strict=False))
        captioned = any(each.suffix.lower() in CAPTIONS for each in beside)
    except OSError:
        captioned = False
    word = trigger or ("" if captioned else TRIGGER)
    if captioned and word:
        data["data"]["caption_prefix"] = f"{word},"
        reasons["data.caption_prefix"] = "the pictures have captions: the trigger word is put before each"
    elif word:
        data["data"]["prompt"] = f"a photo of {word}"
        reasons["data.prompt"] = "the folder has no captions: all pictures get this one"
