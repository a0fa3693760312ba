"""Bases of the form by card: the shipped configuration nearest to it, for the user's folder and trigger word."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from simpletune.cards import CARDS, Card, card_named_by_driver, card_of
from simpletune.config.load import read_json
from simpletune.config.shipped import shipped_names
from simpletune.memory.profiles import LORA
from simpletune.options import Json, UserError
from simpletune.web.form.edit import Base, set_at

HERE = "here"  # the machine of the page
WITHOUT_CARD, WITH_CARD = "demo", "sd3_medium_lora_8gb"
TRIGGER = "sks"  # a word without a meaning to the text encoders, in common use for this
CAPTIONS = (".txt", ".caption", ".jsonl")
LOOKED_AT = 2000  # entries of a folder
USABLE = 0.9  # share of a nominal size that a card of that size reports: 22.03 GiB of an L4's 24
SECONDS = 10  # until a driver that does not answer counts as none
TRY_OUT = (
    "This machine has no graphics card: the tiny model that comes with simpletune, for trying out. It draws flat "
    "figures of 64 px, no photos"
)


@cache
def card_here() -> Card | None:
    """Return the first graphics card of this machine as its driver describes it; None if there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        name, mib, capability = (part.strip() for part in answer.splitlines()[0].split(","))
        major, minor = capability.split(".")
        return card_named_by_driver(name, int(mib) * 2**20, (int(major), int(minor)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def cards() -> list[tuple[str, str]]:
    """Return (value, words) of the cards to choose from, this machine's first."""
    here = card_here()
    words = f"this machine: {here.name}, {here.gib:.0f} GB" if here else "this machine: no graphics card"
    return [(HERE, words), *((card.name, f"{card.name}, {card.gib:.0f} GB") for card in CARDS)]


def card_named(value: str) -> Card | None:
    """Return the card of a choice; None for a machine without one.

    Raises:
        UserError: there is no such card.
    """
    return card_here() if value == HERE else card_of(value)


def preset(card: Card | None, folder: Path | None, trigger: str) -> Base:
    """Return a configuration for a card.

    Args:
        card: to train on; None: there is none.
        folder: of pictures; None: not chosen yet.
        trigger: word that shall name what is learned; may be empty.
    """
    origin = WITHOUT_CARD if card is None else WITH_CARD
    data = copy.deepcopy(read_json(Path(origin)))
    for name in ("$schema", "about"):
        data.pop(name, None)
    data["validation"]["prompts"] = None
    data["data"]["path"] = ""
    reasons: dict[str, str] = {}
    if card is not None:
        set_at(data, "memory.profile", profile_of(card))
        reasons["memory.profile"] = f"{card.name} has {card.gib:.0f} GB"
    data["name"] = (run_name(folder.name) if folder else "") or "my_run"
    _use_folder(data, folder, trigger, reasons)
    return Base(data, "preset", origin, reasons, (TRY_OUT,) if card is None else ())


def shipped(name: str, folder: Path | None, trigger: str) -> Base:
    """Return a shipped configuration for the user's pictures.

    Raises:
        UserError: there is none of this name.
    """
    if name not in shipped_names():
        raise UserError(f"There is no shipped configuration {name[:80]!r}. Choose one of the list")
    data = read_json(Path(name))
    data.pop("$schema", None)
    reasons: dict[str, str] = {}
    _use_folder(data, folder, trigger, reasons)
    return Base(data, f"file {name}", name, reasons)


def _use_folder(data: Json, folder: Path | None, trigger: str, reasons: dict[str, str]) -> None:
    """Point a configuration to a folder, and put the trigger word into its captions."""
    if folder is None:
        return
    data["data"] = {key: value for key, value in data["data"].items() if key not in ("prompt", "caption_prefix")}
    data["data"]["path"] = str(folder)
    captioned = has_captions(folder)
    word = trigger or ("" if captioned else TRIGGER)
    if captioned and word:
        data["data"]["caption_prefix"] = f"{word},"
        reasons["data.caption_prefix"] = "the pictures have captions: the trigger word is put before each"
    elif word:
        data["data"]["prompt"] = f"a photo of {word}"
        reasons["data.prompt"] = "the folder has no captions: all pictures get this one"


def profile_of(card: Card) -> str:
    """Return the largest memory profile whose card this one is."""
    sizes = {int(name.removesuffix("gb")): name for name in LORA}
    fitting = [name for size, name in sizes.items() if size * USABLE <= card.bytes / 2**30]
    return fitting[-1] if fitting else next(iter(sizes.values()))


def run_name(text: str) -> str:
    """Return a run's name for a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("._-")[:60]


def has_captions(folder: Path) -> bool:
    """Tell whether a folder holds captions beside its pictures."""
    try:
        entries = (each for _, each in zip(range(LOOKED_AT), folder.iterdir(), strict=False))
        return any(each.suffix.lower() in CAPTIONS for each in entries)
    except OSError:
        return False
