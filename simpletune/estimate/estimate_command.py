"""``simpletune estimate``: from files and words to predictions in text, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from simpletune.cards import Card, card_of
from simpletune.config.load import read_config
from simpletune.config.modulation import settle_modulation
from simpletune.config.resolve import require_model_rules, resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.estimate.auto_checkpointing import choose
from simpletune.estimate.chart import write_picture
from simpletune.estimate.predict import Estimate, estimate
from simpletune.estimate.terminal import as_text, comparison
from simpletune.models.buckets import Size
from simpletune.options import UserError
from simpletune.system.console import note, silent

REFERENCE = "L4"  # whose libraries' workspaces are counted where no card is named
GIB = 2**30


def read_for_estimate(file: Path, overrides: Sequence[str]) -> TrainConfig:
    """A configuration whose data need not be there, its model's demo name and ``memory.modulation: auto`` resolved.

    What an estimate is for is a card, so auto is chosen for one.

    Raises:
        ConfigError: it is wrong.
        UserError: its model's configuration cannot be read.
    """
    config, notices = read_config(file, list(overrides), needs_data=False)
    note(notices)
    config = resolve_model_folder(config)
    require_model_rules(config)
    return settle_modulation(config, on_host=False)


def estimate_config(
    file: Path, overrides: Sequence[str], device: str | None, reserve: float = 0.0, as_json: bool = False
) -> str:
    """What ``simpletune estimate CONFIG`` prints.

    Args:
        file: the configuration.
        overrides: of it.
        device: a card by name or memory, or None.
        reserve: GiB of it that other programs hold.
        as_json: figures for programs.
    """
    card = card_of(device) if device else None
    reserved = int(reserve * GIB)
    with silent() if as_json else nullcontext():
        config = read_for_estimate(file, overrides)
        config = choose(config, square(config), card, reserved)
    prediction = estimate(config, (card or card_of(REFERENCE)).capability)
    if as_json:
        return json.dumps({"name": config.name, **prediction.as_json(card, reserved)}, indent=2)
    return "\n".join([as_text(config.name, prediction, card, reserved), *unfit(config, card)])


def square(config: TrainConfig) -> Size:
    """The pictures that an estimate without data is for."""
    return config.data.resolution, config.data.resolution


def unfit(config: TrainConfig, card: Card | None) -> list[str]:
    """Why a card cannot run a configuration, but for its memory."""
    if card is None or card.has_bf16 or config.precision.compute != "bf16":
        return []
    return [f"  {card.name} has no bf16: use precision.compute=fp32 precision.weights=int8"]


def compare_configs(
    files: Sequence[Path],
    overrides: Sequence[str],
    device: str | None,
    picture: Path | None = None,
    as_json: bool = False,
) -> str:
    """What ``simpletune estimate --compare A B ...`` prints.

    Args:
        files: the configurations.
        overrides: of all of them.
        device: a card by name or memory, or None.
        picture: where to draw stacked bars, ``.svg`` or ``.png``.
        as_json: figures for programs.
    """
    card = card_of(device) if device else None
    predictions: dict[str, Estimate] = {}
    for file in files:
        with silent():  # a line of the table says it all
            config = read_for_estimate(file, overrides)
        name = config.name if config.name not in predictions else str(file)
        if name in predictions:
            raise UserError(f"--compare: {file} is named twice")
        with silent() if as_json else nullcontext():
            config = choose(config, square(config), card)
        predictions[name] = estimate(config, (card or card_of(REFERENCE)).capability)
    lines = [comparison(predictions)]
    if picture is not None:
        lines.append(str(write_picture(picture, predictions, card)))
    if as_json:
        return json.dumps({name: each.as_json(card) for name, each in predictions.items()}, indent=2)
    return "\n".join(lines)
