"""LoRA names of every family, and the family that layers belong to."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from simpletune.models.families import FAMILIES
from simpletune.models.shared.family import Family
from simpletune.models.shared.lora_names import Layout, LoraNames
from simpletune.models.shared.model_config import Shape
from simpletune.system.options import UserError

LAYOUTS: Mapping[LoraNames, Sequence[Layout]] = {family.lora[0].names: family.lora for family in FAMILIES}
"""Layouts of each family's files; the first is the one of a run's result."""
TARGETS = tuple(dict.fromkeys(name for names in LAYOUTS for name in names.targets))
SHORT = {short: whole for names in LAYOUTS for short, whole in names.short.items()}
NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
"""Numbers of blocks in a pattern: ``3``, ``0-11`` or ``0,2,5-7``."""


def is_target(target: str, layer: str) -> bool:
    # Layers have other names in each family, so the family need not be known.
    return any(target in names.targets and names.targets[target].search(layer) for names in LAYOUTS)


@functools.cache  # of few patterns and layers, but for every trained tensor
def matches_layer(pattern: str, layer: str) -> bool:
    """Whether the words of a pattern, between its dots, are consecutive words of a layer's name. A word may have ``*``
    or be ``NUMBERS``; the first may be a short name of blocks, with which a layer's name then begins."""
    wanted, words = pattern.split("."), layer.split(".")
    starts = range(len(words) - len(wanted) + 1)
    if wanted[0] in SHORT:
        wanted[0], starts = SHORT[wanted[0]], starts[:1]
    return any(all(map(_fits, wanted, words[start:])) for start in starts)


def _fits(wanted: str, word: str) -> bool:
    if not (word.isdecimal() and NUMBERS.fullmatch(wanted)):
        return fnmatchcase(word, wanted)
    ends = (part.partition("-") for part in wanted.split(","))
    return any(int(first) <= int(word) <= int(last or first) for first, _, last in ends)


def context_layers(layers: Iterable[str]) -> dict[str, bool]:
    """The projections to keys and values among layers, in attention that reads only the picture or only the prompt, as
    in a U-Net: whether it reads the prompt, by the layer's name."""
    patterns = [names.contexts for names in LAYOUTS if names.contexts is not None]
    matches = ((layer, pattern.search(layer)) for layer in layers for pattern in patterns)
    return {layer: match["picture"] is None for layer, match in matches if match}


def context_widths(shapes: Mapping[str, Shape]) -> tuple[set[int], set[int]]:
    """The input widths of attention layers that read the prompt, and of those that read the picture, by the shapes of
    the base model's parameters."""
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    reads = context_layers(weights)
    text, picture = ({weights[layer][1] for layer, own in reads.items() if own is prompt} for prompt in (True, False))
    return text, picture


def families_of(layers: Iterable[str]) -> dict[LoraNames, str]:
    """The families that have any of the layers, each with the first of its layers."""
    found: dict[LoraNames, str] = {}
    for layer in layers:
        for names, layouts in LAYOUTS.items():
            bare = layouts[-1]
            if layer in names.layers(layer, bare):
                found.setdefault(names, layer)
    return found


def title_of(layers: Iterable[str]) -> str:
    """The title of the first family that has one of the layers, for messages."""
    return next((names.title for names in families_of(layers)), "an unknown model")


def require_one(layers: Iterable[str]) -> None:
    """UserError: layers belong to several families."""
    found = families_of(layers)
    if len(found) > 1:
        listed = ", ".join(f"{layer} of {names.title}" for names, layer in found.items())
        raise UserError(f"a LoRA is for one model, but these are for several: {listed}. Use LoRAs for the same model")


def names_of(layers: Iterable[str]) -> LoraNames:
    """The LoRA names of the family that layers belong to. UserError: they belong to none, or to several."""
    layers = list(layers)
    require_one(layers)
    for names in families_of(layers):
        return names
    raise UserError(f"{', '.join(layers[:3])}: no known model has these layers, so they have no names in LoRA files")


def result_layout(layers: Iterable[str], name: str | None = None) -> Layout:
    """The layout of that name if the layers' family has it, else that of a run's result, which most tools read."""
    layouts = LAYOUTS[names_of(layers)]
    return next((layout for layout in layouts if layout.name == name), layouts[0])


def family_of_class(name: str) -> Family:
    """The family whose denoiser has this class in diffusers. UserError: none has."""
    for family in FAMILIES:
        if family.diffusers.model == name:
            return family
    wanted = " or ".join(family.diffusers.model for family in FAMILIES)
    raise UserError(f"{name} is not the class of a known model. Use {wanted}")
