"""Count what trains on the text side, from the encoders' configurations. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpletune.adapters.text.option import Text

if TYPE_CHECKING:
    from simpletune.models.shared.family import Family


def text_parameters(text: Text, model: Family) -> int:
    """The number of trained parameters of the text side, assuming one T5 piece per word. The family's encoders ship or
    are in local folders."""
    count, regions = 0, model.text_regions() if text.trains else {}
    if text.embeddings is not None:
        names = model.clip_encoders if text.embeddings.place == "input" else list(regions)
        count += text.embeddings.vectors * sum(regions[name].width for name in names)
    if text.lora is not None:
        for name in text.with_lora(model.clip_encoders):  # rank x (inputs + outputs) of every layer
            config = model.known_part(regions[name].part).config()
            width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            sides = 4 * 2 * width
            if text.lora.targets == "attention_and_mlp":
                sides += 2 * (width + int(config["intermediate_size"]))
            count += layers * text.lora.rank * sides
    return count
