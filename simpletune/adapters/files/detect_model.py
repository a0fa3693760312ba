"""Identify the model of a LoRA by its keys and shapes, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from simpletune.adapters.files.keys import layout_of, split_key
from simpletune.models.families import FAMILIES
from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.shared.lora_layout import DOWN, LoraNames
from simpletune.models.shared.recognise import JOINT, LORAS, matches

ARCHITECTURE_FIELDS = ("modelspec.architecture", "ss_base_model_version")
UNET = re.compile(r"(down_blocks|up_blocks|mid_block|input_blocks|output_blocks|middle_block)")
TEXT_ALONE = "text encoders alone"
UNKNOWN = "an unknown model"
UNET_NAMES = tuple(names for names in LAYOUTS if names.by_text_width)
# Keys of other methods, which are refused by name because plain LoRA arithmetic would be wrong for them.
OTHER_METHODS = (
    (r"\.oft_diag$|\.oft_R\.|\.rescale$", "OFT on the inputs, diagonal or rescaled"),
    (r"\.(diff|set_weight)$", "full weight differences (.diff)"),
    (r"\.diff_b$", "with changes of biases (.diff_b)"),
    (r"\.(w_norm|b_norm)$", "with changes of norms (LyCORIS: train_norm)"),
    (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA"),
    (r"\.lora_B(\.default)?\.bias$", "LoRA with biases"),
    (r"\.lora_embedding_[AB]", "LoRA of embeddings"),
)


class Detected(NamedTuple):
    """The model that a LoRA is for.

    Args:
        model: its name.
        shown_by: the evidence.
        names: of the families that it may be of; none: simpletune does not apply the LoRA.
    """

    model: str
    shown_by: str
    names: tuple[LoraNames, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether simpletune applies such a LoRA."""
        return bool(self.names) or self.model == TEXT_ALONE


def models_of_text_width(width: int) -> dict[LoraNames, str]:
    """Return the published models whose U-Net reads text of a width, by their family's names."""
    return {names: names.by_text_width[width] for names in UNET_NAMES if width in names.by_text_width}


def other_methods(names: list[str]) -> dict[str, list[str]]:
    """Find the methods other than plain LoRA, with the keys that identify them."""
    found: dict[str, list[str]] = {}
    for pattern, method in OTHER_METHODS:
        if keys := [name for name in names if re.search(pattern, name)]:
            found[method] = keys
    return found


def is_lora(names: list[str]) -> bool:
    """Return whether a file contains updates, for any model and by any method, rather than a model."""
    factors = [name for name in names if (split := split_key(name)) and split[1] != "alpha"]
    telling = [keys for method, keys in other_methods(names).items() if "LoRA of" not in method]
    return bool(factors) or any(2 * len(keys) >= len(names) for keys in telling)


def family_of_lora(
    shapes: Mapping[str, tuple[int, ...]],
    layers: Mapping[str, tuple[int, int]] = {},
    metadata: Mapping[str, str] = {},
) -> Detected:
    """Determine the model that a LoRA is for.

    Args:
        shapes: of the file's tensors, by key.
        layers: (outputs, inputs) of layers that are known by their size only, by module.
        metadata: the file's header, which decides only between models that the keys do not tell apart.
    """
    downs = {f"{module}.lora_A.weight": (1, inputs) for module, (_, inputs) in layers.items()}
    ups = {f"{module}.lora_B.weight": (outputs, 1) for module, (outputs, _) in layers.items()}
    shapes = {**shapes, **downs, **ups}
    names = list(shapes)
    if (key := _first(UNET.pattern, names)) is not None:  # first, because others share the names of its attention
        return _unet(shapes, key, metadata)
    # a family's, if a module's name is that of one of its layers in any layout; a file may mix layouts
    roles = {name: split for name in names if (split := split_key(name))}
    modules = sorted({module for module, _ in roles.values()})
    prefixes = tuple({layout.prefix for layouts in LAYOUTS.values() for layout in layouts} - {""})
    groups = [[m for m in modules if m.startswith(prefix)] for prefix in sorted(prefixes)]
    groups.append([m for m in modules if not m.startswith(prefixes)])
    kind, shown = next(matches(LORAS, shapes), (None, ""))
    named = {names for names in LAYOUTS if _says(metadata, names) or kind and kind.title == names.title}
    layouts = ((group, layout_of(group, families=named)) for group in groups)
    fitting = [layout for group, layout in layouts if layout and any(map(layout.layers, group))]
    own = dict.fromkeys(layout.names for layout in fitting)
    certain = any(names in named or any(names.shows(module, 0) for module in modules) for names in own)
    for family in own if certain or kind is None else ():
        if found := family.published(shapes, {name: role for name, (_, role) in roles.items()}):
            return Detected(*found, (family,))
    if kind is not None:
        return Detected(kind.title, shown)
    widths = (shapes[name][1] for name, (_, role) in roles.items() if role == DOWN and len(shapes[name]) > 1)
    if (width := next((width for width in widths if width in JOINT), None)) is not None and fitting:
        return Detected(JOINT[width], f"attention of width {width} under names that {fitting[0].names.title} also uses")
    return Detected(UNKNOWN, names[0] if names else "no keys")


def _says(metadata: Mapping[str, str], names: LoraNames) -> bool:
    """Return whether a file's header names a published model of a family, or has the configuration of a run on one."""
    fields = [(field, metadata[field]) for field in ARCHITECTURE_FIELDS if field in metadata]
    config = metadata.get("simpletune_config", "")
    own = (family.family for family in FAMILIES if family.lora[0].names is names)
    return any(f'"family":"{family}"' in config for family in own) or any(
        model.get(field) == value for field, value in fields for model in names.header.values()
    )


def _first(pattern: str, names: list[str]) -> str | None:
    return next((name for name in names if re.search(pattern, name)), None)


def _unet(shapes: Mapping[str, tuple[int, ...]], key: str, metadata: Mapping[str, str]) -> Detected:
    """Identify the U-Net by the text width of its cross-attention, by keys that only one U-Net has, or by the file's
    header."""
    models = {names: names.title for names in UNET_NAMES}  # that it may be of
    for name, shape in shapes.items():
        split = split_key(name)
        if split and split[1] == "down" and re.search(r"attn2.*to_[kv]", name) and len(shape) >= 2:
            if fitting := models_of_text_width(shape[1]):
                models, key = fitting, f"cross-attention over text of width {shape[1]}: {name}"
                break
    if len(models) == 1:
        return Detected(next(iter(models.values())), key, tuple(models))
    for names in models:
        if (only := next((name for name in shapes if names.shows(name, 0)), None)) is not None:
            return Detected(models[names], only, (names,))
    for field in ARCHITECTURE_FIELDS:
        for names in models:
            for model, fields in names.header.items():
                if field in metadata and metadata[field] == fields.get(field):
                    return Detected(model, f"{field} in its header: {metadata[field]}", (names,))
    return Detected(some_unet(models.values()), key, tuple(models))


def some_unet(models: Iterable[str]) -> str:
    """Describe a U-Net that may be of several models, or of none."""
    return f"a U-Net ({' or '.join(models)})" if models else "a U-Net"
