"""The configuration by which pictures without one are shown: of the model and the card that would train them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import TINY_SIDE, suggest
from simpletune.commands.init.init_command import card_for, fields_of, file_for, reads_folder
from simpletune.config.load import read_config, validate
from simpletune.config.overrides import merge
from simpletune.config.schema import DEMO, TrainConfig
from simpletune.data.demo import DATA, PREFIX, TINY_SD3
from simpletune.models.families import FAMILIES, likely_family
from simpletune.system.console import note
from simpletune.system.gpus import Card
from simpletune.system.options import Json
from simpletune.system.printable import printable

DEFAULT_MODEL = FAMILIES[0].pretrained
DEFAULT_TITLE = "Stable Diffusion 3 Medium"


def folder_config(
    folder: Path, overrides: Sequence[str] = (), model: str | None = None, device: str | None = None
) -> tuple[TrainConfig, str]:
    """Return the configuration beside a folder, or the one that ``init`` would suggest for a card; writes nothing.

    Args:
        folder: of pictures.
        overrides: of its fields.
        model: base to train; None: that of the file beside the folder, or the default one, also without a card.
        device: card by name or memory, or ``cpu``; None: this machine's.

    Returns:
        The configuration, and a sentence about what its sizes are for; empty for a file's.
    """
    file = file_for(folder)
    if model is None and device is None and os.path.isfile(file):  # its name may be too long for one
        config, notices = read_config(file, list(overrides), needs_model=False)
        if any(reads_folder(folder, source) for source in config.sources):
            note(notices)
            return config, ""
    card = card_for(device)[0]
    answers = Answers(model=model or base_of(folder))
    found = suggest(folder, answers, card, chosen=fields_of(folder, overrides))
    merged, notices, problems = merge(found.config, list(overrides))
    config = validate(merged, str(folder), problems, needs_model=False)
    of_data = (each for each in found.questions if "trigger" not in each.choices[0].overrides)
    for question in of_data:
        choices = "; ".join(choice.words for choice in question.choices)
        notices.append(f"init will ask: {printable(question.text)} ({choices})")
    note(notices)
    return config, _about(config, model is None, card)


def page_config(
    place: Path, model: str | None = None, side: int | None = None, upscaled: bool = False
) -> tuple[TrainConfig, str]:
    """Return a configuration for a folder or a table without a file beside it, without looking at the pictures.

    Args:
        place: of the pictures.
        model: base to train; None: the default one.
        side: resolution in pixels; None: the model's own.
        upscaled: whether small pictures are used, however far they are scaled up; always for the tiny models.
    """
    chosen = model or base_of(place)
    is_tiny = chosen.startswith(DEMO)
    data: Json = {"path": str(place), **({"reading": "any"} if place.is_dir() else {"source": "table"})}
    if upscaled or is_tiny:
        data["max_upscale"] = None
    if side is not None or is_tiny:
        data["resolution"] = TINY_SIDE if side is None else side
    whole = {"name": "data", "data": data, "model": _model(chosen)}
    config = validate(whole, str(place), needs_data=False, needs_model=False)
    return config, _about(config, model is None, None)


def with_model(config: TrainConfig, model: str) -> TrainConfig:
    """Return a configuration's data and batches, for another base. Its other settings may not suit that one, and change
    no size."""
    whole = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    kept: Json = {name: whole[name] for name in ("name", "data", "train") if name in whole}
    kept["validation"] = {"split": config.validation.split}
    return validate({**kept, "model": _model(model)}, str(config.name), needs_data=False, needs_model=False)


def _model(name: str) -> Json:
    family = likely_family(name).family
    return {"pretrained": name, **({"family": family} if family != FAMILIES[0].family else {})}


def base_of(place: Path) -> str:
    """Choose the base for pictures when none is named: the tiny model for those that come with simpletune, else the
    default one, whether a card is here or not."""
    names = tuple(f"{name.removeprefix(PREFIX)}-v" for name in DATA)
    return TINY_SD3 if place.parent.name == "demo" and place.name.startswith(names) else DEFAULT_MODEL


def _about(config: TrainConfig, assumed: bool, card: Card | None) -> str:
    model = config.model.pretrained
    title = DEFAULT_TITLE if model == DEFAULT_MODEL else model
    where = "" if card is None else f", on {card.name}"
    more = "; --model names another" if assumed and model == DEFAULT_MODEL else ""
    return f"sizes are for {title} at {config.resolution} px{where}{more}"
