"""Count what trains on the text side, from the encoders' configurations. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpletune.adapters.text.option import Text

if TYPE_CHECKING:
    from simpletune.models.shared.family import Family


def text_parameters(text: Text, model: Family) -> int:
    """The number of trained parameters of the text side, assuming one T5 piece per word.

    Args:
        text: what trains.
        model: the family; its encoders' configurations ship or are in local folders.
    """
    return _embeddings(text, model) + _lora(text, model) if text.trains else 0


def _embeddings(text: Text, model: Family) -> int:
    option = text.embeddings
    if option is None:
        return 0
    regions = model.text_regions()
    names = model.clip_encoders if option.place == "input" else list(regions)
    return option.vectors * sum(regions[name].width for name in names)


def _lora(text: Text, model: Family) -> int:
    """rank x (inputs + outputs) of every layer."""
    option, count = text.lora, 0
    if option is None:
        return 0
    for name in text.with_lora(model.clip_encoders):
        config = model.known_part(model.text_regions()[name].part).config()
        width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        sides = 4 * 2 * width
        if option.targets == "attention_and_mlp":
            sides += 2 * (width + int(config["intermediate_size"]))
        count += layers * option.rank * sides
    return count
