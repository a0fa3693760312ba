"""Default suggestions: settings by the model, steps by the number of pictures, the profile by the card."""

from __future__ import annotations

from dataclasses import dataclass

from simpletune.commands.init.answers import Answers, What
from simpletune.commands.init.inspect_folder import FolderContents
from simpletune.system.gpus import Card
from simpletune.system.options import Json, plural

TINY = "demo:tiny-sd3"
TINY_SIDE = 64  # pixels
PROFILES = ("4gb", "6gb", "8gb", "12gb", "16gb", "24gb")
USABLE = 0.9  # share of its nominal memory that a card reports: 22.03 GiB of an L4's 24, 11.75 of 12
DEFAULT_PROFILE = "8gb"  # profile for an unknown card
TEMPLATES: dict[str, dict[What, str]] = {
    "tiny": {"subject": "demo_subject", "style": "demo", "general": "demo"},
    "sd3": {"subject": "sd3_medium_dreambooth_lora", "style": "sd3_medium_lora_8gb", "general": "sd3_medium_lora_8gb"},
    "sd15": {"subject": "sd15_lora", "style": "sd15_lora", "general": "sd15_lora"},
}
"""Shipped configurations to take settings from, by the model's kind."""
KEPT = ("model", "adapter", "optimizer", "schedule", "objective", "train", "memory", "validation")
FEW = 30  # up to this many pictures without captions are taken for one subject
MANY = 200  # from this many captioned pictures on, the set is taken for a general one
STEPS: dict[What, tuple[int, int, int]] = {
    "subject": (100, 400, 1500),
    "style": (60, 800, 4000),
    "general": (10, 2000, 20000),
}
"""Steps per picture, and the least and most steps of a run of normal length."""
SIDES = (1024, 768, 512)  # of SD3, in pixels
NEAR, ENOUGH = 0.8, 0.75  # this share of the pictures reaches this share of the resolution
CHECKPOINTS = 4  # number of checkpoints of a run, all of them kept
HELD_OUT, FROM = 0.1, 50  # share of the pictures to hold out, and from how many pictures on
TRIGGER = "sks"  # a word without meaning to the text encoders, commonly used for this
GENERAL = "A photo of a lighthouse at dusk, waves against the rocks"
LISTED = 3
UNASKED = Answers()


@dataclass(frozen=True)
class Reason:
    """Why a field has its value."""

    path: str
    value: object
    why: str


@dataclass(frozen=True)
class Suggestion:
    """A configuration and the reasons for its choices."""

    config: Json
    reasons: tuple[Reason, ...]  # in the order of its sections
    notes: tuple[str, ...] = ()  # what the user should know about the pictures or the machine


def guess_what(seen: FolderContents) -> tuple[What, str]:
    """Guess what the pictures teach; also return the evidence."""
    captions = seen.caption_texts
    count, captioned = len(seen.pictures), 2 * len(set(captions)) > len(captions)
    if not captioned and count <= FEW:
        return "subject", f"{plural(count, 'picture')} without captions of their own"
    if captioned and count >= MANY:
        return "general", f"{plural(count, 'captioned picture')}"
    return "style", f"{plural(count, 'picture')} {'with' if captioned else 'without'} captions"


def default_trigger(seen: FolderContents) -> str | None:
    """Return a word to name what is learned, if captions do not name it."""
    return None if seen.caption_texts else TRIGGER


def profile_of(card: Card | None) -> tuple[str, str]:
    """Return the memory profile for a card, and the reason."""
    if card is None:
        return DEFAULT_PROFILE, "for an 8 GB card, since none is here: --device names yours"
    fitting = [name for name in PROFILES if card.gib * card.found >= USABLE * int(name[:-2])]
    if not fitting:
        return PROFILES[0], f"{card.name} has less than 4 GB: the profile that takes the least"
    return fitting[-1], f"for {card.name}"
