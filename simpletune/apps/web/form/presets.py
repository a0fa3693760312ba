"""The form's bases by card: the shipped configuration nearest to the card, for the user's folder and trigger word."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from simpletune.apps.web.form.fields import StartingConfig, get_at, set_at
from simpletune.commands.init.answers import Answers, What
from simpletune.commands.init.choices import UNDER, Suggestion, profile_of, suggest, suggest_slider, templates_for
from simpletune.commands.init.inspect_folder import FolderContents
from simpletune.config.load import read_json, shipped_files
from simpletune.config.overrides import as_overrides
from simpletune.config.schema import run_name
from simpletune.data.concept import Direction
from simpletune.data.demo import TINY_SD3
from simpletune.models.families import FAMILIES, likely_family
from simpletune.models.shared.words import PublicBase
from simpletune.system.gpus import GROUPS, Card
from simpletune.system.hub import has_token
from simpletune.system.options import Json, UserError

DIRECTION = "concept.directions.0"  # of a slider
EXAMPLE = {"target": "a person", "positive": "a person, smiling", "negative": "a person, frowning"}
CHOSEN = "chosen for your card and pictures"  # the source of a preset's values
HERE = "here"  # the machine that serves the page
WITHOUT_CARD = "demo"
TINY = PublicBase(TINY_SD3, "Tiny model", 0.0, (0.0, 0.0, 0.0), "part of simpletune", "yes", "for trying out")
NO_TOKEN = "no token of the Hub is set on this machine, and this model needs none"
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
TRY_OUT = "The tiny model that comes with simpletune, for trying out. It draws flat figures of 64 px, no photos"


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


def public_bases(card: Card | None) -> tuple[PublicBase, ...]:
    """Return the models to choose from, the suggested one first: of those that need no token, where none is set;
    without a card, the tiny one."""
    bases = [base for family in FAMILIES for base in family.words.bases]
    if not has_token():
        # the best of the open ones
        bases.sort(key=lambda base: (base.gated, not base.measured, 0 if base.gated else -base.parameters))
    return (TINY, *bases) if card is None else tuple(bases)


def preset(
    card: Card | None,
    folder: Path | None,
    seen: FolderContents | None,
    trigger: str,
    chosen: Json | None = None,
    what: What | None = None,
    model: str | None = None,
) -> StartingConfig:
    """Return a configuration for a card, a folder of pictures, if one is chosen yet, what it holds, once that is known,
    a trigger word, which may be empty, and the fields that the user's answers about the pictures set. ``what`` the
    pictures teach and the ``model`` are guessed unless the user has chosen them."""
    suggested = public_bases(card)[0].name
    instead = suggested if model is None and card is not None and suggested != FAMILIES[0].pretrained else None
    named = model or instead
    if folder is not None and seen is not None:
        found = suggest(folder, Answers(what, trigger or None, model=named), card, seen, chosen)
        words = ["init", str(folder), *as_overrides(chosen or {})]
        for option, value in (("--what", what), ("--model", named), ("--trigger", trigger)):
            words += [option, value] if value else []
        words += ["--yes", "--out"]
        reasons = {each.path: each.why for each in found.reasons}
        if instead:
            reasons["model.pretrained"] = NO_TOKEN
        return StartingConfig(
            found.config,
            CHOSEN,
            f"{found.config['name']}.json",
            reasons,
            (TRY_OUT,) if found.config["model"]["pretrained"] == TINY_SD3 else (),
            tuple(words),
            _image_notes(found, seen, PROMINENT),
            found.questions,
        )
    named = named or suggested
    profile, fits = profile_of(card)
    template = likely_family(named).words.templates_of(named)[what or "style"]
    origin = WITHOUT_CARD if named == TINY_SD3 else templates_for(template, profile)[0]
    data = copy.deepcopy(read_json(Path(origin)))
    set_at(data, "model.pretrained", named)
    for name in ("$schema", "about"):
        data.pop(name, None)
    data["validation"]["prompts"] = None
    data["data"]["path"] = ""
    reasons = {"model.pretrained": NO_TOKEN} if instead else {}
    if loras := likely_family(named).model_copy(update={"pretrained": named}).known_assistants:
        set_at(data, "model.loras", loras)
        reasons["model.loras"] = UNDER
    if named != TINY_SD3 and "{card}" not in template:
        reasons["memory.profile"] = fits
        set_at(data, "memory.profile", profile)
    data["name"] = run_name(folder.name if folder else "", "my_run")
    if folder is not None:
        data["data"]["path"] = str(folder)
    return StartingConfig(data, CHOSEN, origin, reasons, (TRY_OUT,) if named == TINY_SD3 else ())


def shipped_config(
    name: str,
    folder: Path | None,
    seen: FolderContents | None,
    trigger: str,
    chosen: Json | None = None,
    what: What | None = None,
) -> StartingConfig:
    """Return a shipped configuration for the user's pictures. Raises UserError if there is none with this name."""
    if name not in shipped_files():
        raise UserError(f"There is no shipped configuration {name[:80]!r}. Choose one from the list")
    data = read_json(Path(name))
    data.pop("$schema", None)
    label = f"from the configuration {name}"
    if folder is None or is_slider(name):
        return StartingConfig(data, label, name)
    data["data"] = {key: value for key, value in data["data"].items() if key not in OF_FOLDER}
    data["data"]["path"] = str(folder)
    if seen is None:
        return StartingConfig(data, label, name)
    found = suggest(folder, Answers(what, trigger or None), None, seen, chosen)
    data["data"] |= {key: value for key, value in found.config["data"].items() if key not in OF_MODEL}
    reasons = {each.path: each.why for each in found.reasons if get_at(data, each.path) is not None}
    said = _image_notes(found, seen, tuple(path for path in PROMINENT if path.startswith("data.")))
    return StartingConfig(data, label, name, reasons, (), (), said, found.questions)


def is_slider(name: str) -> bool:
    """Return whether a shipped configuration trains from prompts alone."""
    return name in shipped_files() and "concept" in read_json(Path(name))


def slider(card: Card | None, mine: Mapping[str, str], model: str | None) -> StartingConfig:
    """Return a configuration that trains a slider between the user's prompts, or the example's, for a card."""
    words = {field: mine.get(f"{DIRECTION}.{field}", text) for field, text in EXAMPLE.items()}
    suggested = public_bases(card)[0].name
    instead = suggested if model is None and card is not None and suggested != FAMILIES[0].pretrained else None
    named = model or instead
    direction = Direction(
        target=words["target"], positive=words["positive"] or None, negative=words["negative"] or None
    )
    found = suggest_slider(direction, Answers(model=named), card)
    made_by = ["init", "--slider", *words.values(), *(["--model", named] if named else []), "--yes", "--out"]
    reasons = {each.path: each.why for each in found.reasons}
    if instead:
        reasons["model.pretrained"] = NO_TOKEN
    notes = (TRY_OUT,) if found.config["model"]["pretrained"] == TINY_SD3 else ()
    return StartingConfig(found.config, CHOSEN, f"{found.config['name']}.json", reasons, notes, tuple(made_by))


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
