"""The layers of every family's text encoders in LoRA files of every layout, without torch.

An update with a name of ``shared.lora_encoders`` changes a text encoder; every other one changes the denoiser.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.shared.lora_encoders import LoraEncoder
from simpletune.models.shared.lora_layout import DOWN, UP

ENCODERS: tuple[LoraEncoder, ...] = tuple(encoder for names in LAYOUTS for encoder in names.encoders)
"""Of all families; the first that has a layer stands for the others where the family is unknown."""
FIRST, T5 = "text_encoder", "text_encoder_3"
"""The folders of a model's first or only text encoder, and of SD3's T5."""
FOLDERS = tuple(dict.fromkeys(encoder.folder for encoder in ENCODERS))
"""The folders of text encoders in pipelines."""
TEXT_KEY = re.compile(
    rf"^(({'|'.join(FOLDERS)})\.|lora_te\d?_|(text_encoders\.)?({'|'.join(n for e in ENCODERS for n in e.comfy)})\.)"
)
BUNDLED = "bundle_emb."
"""The prefix of the keys of embeddings inside a LoRA file: ``bundle_emb.NAME.clip_l``."""


def is_text(layer: str) -> bool:
    """Return whether a layer is a text encoder's, by its name in this package."""
    return layer.partition(".")[0] in FOLDERS


def encoder_of(layer: str) -> tuple[str, str]:
    """Return a text layer's encoder, and its name in it."""
    encoder, _, name = layer.partition(".")
    return encoder, name


def encoder_with(layer: str, encoders: Iterable[LoraEncoder] = ()) -> LoraEncoder:
    """Return the text encoder that a text layer is of: of these, a family's, or else the first known one. Its folder
    alone does not tell: in another family, it may hold another encoder."""
    folder, name = encoder_of(layer)
    return next(each for each in (*encoders, *ENCODERS) if each.folder == folder and each.layer(name))


def text_layer(module: str) -> str | None:
    """Return this package's name for a module (a key without its role) in a file of any layout; None if no text encoder
    has such a layer."""
    for encoder in ENCODERS:
        if (match := encoder.prefix.match(module)) and (inner := encoder.layer(module[match.end() :])):
            return f"{encoder.folder}.{inner}"
    return None


def text_key(layer: str, role: str, layout: str, single: bool = False, encoders: Iterable[LoraEncoder] = ()) -> str:
    """Return the key of a text layer's tensor in a file; ``role`` is as for ``Layout.key``. ``single``: the model has
    one text encoder, whose keys kohya's scripts do not number. ``encoders``: the family's, if it is known."""
    name = encoder_of(layer)[1]
    encoder = encoder_with(layer, (*encoders, *(each for each in ENCODERS if single and not each.kohya)))
    peft = layout in ("diffusers", "comfy")
    ending = {DOWN: "lora_A.weight" if peft else "lora_down.weight", UP: "lora_B.weight" if peft else "lora_up.weight"}
    if layout == "diffusers":
        module = layer
    elif layout == "comfy":
        module = f"text_encoders.{encoder.comfy[0]}.transformer.{name}"
    else:  # kohya's, and lycoris
        module = f"lora_te{encoder.kohya}_{name.replace('.', '_')}"
    return f"{module}.{ending.get(role, role)}"


Value = TypeVar("Value")


def style_of(key: str) -> str:
    """Return the layout of a text encoder's key: ``diffusers``, ``kohya`` or ``comfy``."""
    if key.startswith("lora_te"):
        return "kohya"
    return "diffusers" if key.startswith("text_encoder") and not key.startswith("text_encoders.") else "comfy"


def split_text(updates: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Split values by layer into those of the denoiser and those of the text encoders."""
    text = {layer: update for layer, update in updates.items() if is_text(layer)}
    return {layer: update for layer, update in updates.items() if layer not in text}, text


def layers_by_title(layers: Iterable[str], encoders: Iterable[LoraEncoder] = ()) -> dict[str, int]:
    """Count how many of these layers each text encoder has, by its title; ``encoders`` as for ``encoder_with``."""
    known = (*encoders, *ENCODERS)
    found = Counter(encoder_with(layer, known) for layer in layers)
    return {each.title: found[each] for each in sorted(found, key=known.index)}


def encoders_in(layers: Iterable[str], encoders: Iterable[LoraEncoder] = ()) -> str:
    """Name the text encoders that have these layers: ``CLIP-L and CLIP-G``."""
    return " and ".join(layers_by_title(layers, encoders))
