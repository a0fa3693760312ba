"""LoRA names of every family, and the family that layers belong to."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from simpletune.models.families import FAMILIES, family_of_config
from simpletune.models.shared.family import Family
from simpletune.models.shared.lora_layout import Layout, LoraNames
from simpletune.models.shared.model_config import Shape
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from torch import nn

Layers = Mapping[str, Sequence[int]]
"""Shapes of weights, [outputs, inputs, ...], by diffusers' names of their layers; no or 0 inputs: unknown."""

LAYOUTS: Mapping[LoraNames, Sequence[Layout]] = {family.lora[0].names: family.lora for family in FAMILIES}
"""Layouts of each family's files; the first is the one of a run's result."""
TARGETS = tuple(dict.fromkeys(name for names in LAYOUTS for name in names.targets))
SHORT = sorted({pair for names in LAYOUTS for pair in names.short.items()})
"""Short names of blocks with the whole ones; families may have the same short name for other blocks."""
INPUTS = frozenset(names.input for names in LAYOUTS if names.input is not None)
NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
"""Numbers of blocks in a pattern: ``3``, ``0-11`` or ``0,2,5-7``."""


def is_target(target: str, layer: str) -> bool:
    # Layers have other names in each family, so the family need not be known.
    return any(target in names.targets and names.targets[target].search(layer) for names in LAYOUTS)


@functools.cache  # of few layers, but several times for every trained tensor
def is_convolution(layer: str) -> bool:
    """Return whether a layer is a convolution with a kernel larger than 1x1 that can have an update."""
    return any(names.convolutions is not None and names.convolutions.search(layer) for names in LAYOUTS)


def is_residual(layer: str) -> bool:
    """Return whether ``adapter.conv_rank`` adds a layer to every named choice of layers."""
    return any(names.residual is not None and names.residual.search(layer) for names in LAYOUTS)


@functools.cache  # of few patterns and layers, but for every trained tensor
def matches_layer(pattern: str, layer: str) -> bool:
    """Return whether the words of a pattern, between its dots, are consecutive words of a layer's name. A word may have
    ``*`` or be ``NUMBERS``; the first may be a short name of blocks, with which a layer's name then begins."""
    (first, *wanted), words = pattern.split("."), layer.split(".")
    if whole := [name for short, name in SHORT if short == first]:
        return words[0] in whole and len(words) > len(wanted) and all(map(_fits, wanted, words[1:]))
    starts = range(len(words) - len(wanted))
    return any(all(map(_fits, [first, *wanted], words[start:])) for start in starts)


def _fits(wanted: str, word: str) -> bool:
    if not (word.isdecimal() and NUMBERS.fullmatch(wanted)):
        return fnmatchcase(word, wanted)
    ends = (part.partition("-") for part in wanted.split(","))
    return any(int(first) <= int(word) <= int(last or first) for first, _, last in ends)


def context_layers(layers: Iterable[str]) -> dict[str, bool]:
    """Find the projections to keys and values in attention that reads only the picture or only the prompt, as in a
    U-Net; return whether it reads the prompt, by the layer's name."""
    patterns = [names.contexts for names in LAYOUTS if names.contexts is not None]
    matches = ((layer, pattern.search(layer)) for layer in layers for pattern in patterns)
    return {layer: match["picture"] is None for layer, match in matches if match}


def context_widths(shapes: Mapping[str, Shape]) -> tuple[set[int], set[int]]:
    """Return the input widths of attention layers that read the prompt, and of those that read the picture, by the
    shapes of the base model's parameters."""
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    reads = context_layers(weights)
    text, image = ({weights[layer][1] for layer, own in reads.items() if own is prompt} for prompt in (True, False))
    return text, image


def families_of(*groups: Layers) -> dict[tuple[LoraNames, ...], str]:
    """Return the families that layers belong to, each with the first of its layers. Several in one entry share a
    layer's name, and no layer shows which of them it is."""
    found: dict[tuple[LoraNames, ...], str] = {}
    for layer, shape in ((layer, shape) for group in groups for layer, shape in group.items()):
        known = [names for names, layouts in LAYOUTS.items() if names.layers(layer, layouts[-1])]
        shown = {names: names.shows(layer, shape[1] if len(shape) > 1 else 0) for names in known}
        clearest = max(shown.values(), default=0)
        if fitting := tuple(names for names, clearness in shown.items() if clearness == clearest):
            found.setdefault(fitting, layer)
    certain = {fitting[0] for fitting in found if len(fitting) == 1}
    return {each: layer for each, layer in found.items() if len(each) == 1 or certain.isdisjoint(each)}


def title_of(*groups: Layers) -> str:
    """Return the title of the first family that has one of the layers, or of those that it may be, for messages."""
    found = next(iter(families_of(*groups)), ())
    return " or ".join(names.title for names in found) or "an unknown model"


def require_one(*groups: Layers) -> None:
    """Raise UserError if layers belong to several families."""
    found = families_of(*groups)
    if len(found) > 1:
        listed = ", ".join(f"{layer} of {' or '.join(n.title for n in names)}" for names, layer in found.items())
        raise UserError(f"a LoRA is for one model, but these are for several: {listed}. Use LoRAs for the same model")


def require_same_family(place: str, layers: Layers, base: Layers) -> None:
    """Raise UserError if the layers of a LoRA at a place, for the message, are not of the base's family."""
    require_family_of(place, layers, {names for each in families_of(base) for names in each})


def require_family_of(place: str, layers: Layers, own: Collection[LoraNames]) -> None:
    """Do the same for a base of one of the families with these names; any, if there are none."""
    found = families_of(layers)
    if own and found and not any(names in own for each in found for names in each):
        title = " or ".join(names.title for names in own)
        raise UserError(f"{place} is for {title_of(layers)}, and the base is {title}. Give a LoRA for {title}")


def names_of(layers: Layers) -> LoraNames:
    """Return the LoRA names of the family that layers belong to; of the first, if it may be several, whose files all
    tools read for the others, too. Raises UserError if they belong to none, or to families that share no names."""
    require_one(layers)
    for fitting in families_of(layers):
        return fitting[0]
    listed = ", ".join(list(layers)[:3])
    raise UserError(f"{listed}: no known model has these layers, so they have no names in LoRA files")


def family_of_names(names: LoraNames) -> Family:
    """Return the family whose LoRA files have these names."""
    return next(family for family in FAMILIES if family.lora[0].names is names)


def factor_layout(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of LoKr and LoHa files: that of a run's result, or LyCORIS's if that is for PEFT's factors."""
    lycoris = (layout for layout in layouts if layout.name == "lycoris")
    return next(lycoris, layouts[0]) if layouts[0].peft else layouts[0]


def suited_layouts(model: nn.Module) -> list[Layout]:
    """Return the layouts of a model's family, without original names that would differ from the published models'."""
    config = {**getattr(model, "config", {}), "_class_name": type(model).__name__}
    return [each for each in family_of_config(config).lora if not each.original or each.names.suits(config)]


def result_layout(model: nn.Module, name: str | None = None) -> Layout:
    """Return the suited layout of that name if the model's family has it, else that of a run's result, which most tools
    read."""
    layouts = suited_layouts(model)
    return next((layout for layout in layouts if layout.name == name), layouts[0])
