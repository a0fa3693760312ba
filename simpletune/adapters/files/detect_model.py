"""Identify the model of a LoRA by its keys and shapes, and the kind of any other file, without torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from simpletune.adapters.files.keys import layout_of, split_key
from simpletune.models.lora_names import LAYOUTS
from simpletune.models.sd3.lora_names import LARGE_35, MEDIUM, MEDIUM_35
from simpletune.models.sd3.lora_names import NAMES as SD3
from simpletune.models.shared.lora_names import LoraNames

ARCHITECTURE_FIELDS = ("modelspec.architecture", "ss_base_model_version")
SD3_WIDTHS = {1536: MEDIUM, 2432: LARGE_35}
DUAL = re.compile(r"(transformer_blocks|joint_blocks)[._]\d+[._](x_block[._])?attn2[._]")

# LoRA keys of other models, most specific first.
LORAS = (
    (r"single_transformer_blocks|double_blocks|single_blocks", "Flux"),
    (r"joint_transformer_blocks|double_layers", "AuraFlow"),
    (r"img_mlp|txt_mlp|add_k_proj.*img_mod", "Qwen-Image"),
    (r"(^|[._])blocks[._]\d+[._](self_attn|cross_attn)", "Wan"),
    (r"noise_refiner|context_refiner", "Lumina 2"),
    (r"transformer_blocks[._]\d+[._]attn1[._].*", "PixArt or LTX"),
    (r"lora_prior_|prior\.", "Stable Cascade"),
)
UNET = re.compile(r"(down_blocks|up_blocks|mid_block|input_blocks|output_blocks|middle_block)")
TEXT_ALONE = "text encoders alone"
UNET_NAMES = tuple(names for names in LAYOUTS if names.by_text_width)
# Keys of other methods, which are refused by name because plain LoRA arithmetic would be wrong for them.
OTHER_METHODS = (
    (r"\.oft_diag$|\.oft_R\.|\.rescale$", "OFT on the inputs, diagonal or rescaled"),
    (r"\.(diff|diff_b|w_norm|b_norm|set_weight)$", "full weight differences (.diff)"),
    (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA"),
    (r"\.lora_B(\.default)?\.bias$", "LoRA with biases"),
    (r"\.lora_embedding_[AB]", "LoRA of embeddings"),
)
# Whole models: names of tensors.
MODELS = (
    (r"(^|\.)joint_blocks\.\d+\.x_block\.attn2\.", f"{MEDIUM_35}, in the original layout"),
    (r"(^|\.)joint_blocks\.\d+\.x_block\.attn\.ln_q", "Stable Diffusion 3.5, in the original layout"),
    (r"(^|\.)joint_blocks\.\d+\.x_block\.", "Stable Diffusion 3, in the original layout"),
    (r"double_blocks\.\d+\.img_attn", "Flux"),
    (r"^single_transformer_blocks\.\d+", "Flux, in diffusers' names"),
    (r"^transformer_blocks\.\d+\.attn2\.norm_q", f"the transformer of {MEDIUM_35}"),
    (r"^transformer_blocks\.\d+\.attn\.norm_added_q", "the transformer of Stable Diffusion 3.5 or Flux"),
    (r"^transformer_blocks\.\d+\.attn\.add_q_proj", "the transformer of Stable Diffusion 3, in diffusers' names"),
    (r"^conditioner\.embedders\.|diffusion_model\.label_emb\.", "Stable Diffusion XL"),
    (r"^cond_stage_model\.model\.", "Stable Diffusion 2"),
    (r"^cond_stage_model\.transformer\.|diffusion_model\.input_blocks\.", "Stable Diffusion 1.5"),
    (r"^(down_blocks|up_blocks|mid_block)\.", "a U-Net in diffusers' names (Stable Diffusion 1, 2 or XL)"),
    (r"^double_layers\.\d+\.attn", "AuraFlow"),
    (r"^(encoder|decoder)\.(conv_in|down|up|mid)", "an autoencoder"),
    (r"^(encoder|decoder)\.layers\.\d+\.", "a small autoencoder (TAESD)"),
    (r"^encoder\.block\.\d+\.layer", "the text encoder T5"),
    (r"^text_model\.", "a CLIP text encoder"),
    (r"^(em[bp]_params|string_to_param)|^clip_[lg](_out)?$|^t5(xxl|_out)?$|^bundle_emb\.", "a textual inversion"),
)  # fmt: skip


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

    @property
    def of_unet(self) -> bool:
        """Whether every family that it may be of has a U-Net."""
        return bool(self.names) and all(names in UNET_NAMES for names in self.names)


def models_of_text_width(width: int) -> dict[LoraNames, str]:
    """The published models whose U-Net reads text of a width, by their family's names."""
    return {names: names.by_text_width[width] for names in UNET_NAMES if width in names.by_text_width}


def other_methods(names: list[str]) -> dict[str, list[str]]:
    """Methods other than plain LoRA, with the keys that identify them."""
    found: dict[str, list[str]] = {}
    for pattern, method in OTHER_METHODS:
        if keys := [name for name in names if re.search(pattern, name)]:
            found[method] = keys
    return found


def is_lora(names: list[str]) -> bool:
    """Whether a file contains updates, for any model and by any method, rather than a model."""
    factors = [name for name in names if (split := split_key(name)) and split[1] != "alpha"]
    telling = [keys for method, keys in other_methods(names).items() if "LoRA of" not in method]
    return bool(factors) or any(2 * len(keys) >= len(names) for keys in telling)


def family_of_lora(
    shapes: Mapping[str, tuple[int, ...]],
    layers: Mapping[str, tuple[int, int]] = {},
    metadata: Mapping[str, str] = {},
) -> Detected:
    """The model that a LoRA is for.

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
    for pattern, family in LORAS:
        if (key := _first(pattern, names)) is not None:
            return Detected(family, key)
    # SD3, if a module's name is that of one of its layers in any layout; a file may mix layouts
    modules = sorted({split[0] for name in names if (split := split_key(name))})
    prefixes = "transformer.", "lora_unet_", "diffusion_model.", "base_model.model.", "lora_transformer_", "lycoris_"
    groups = [[m for m in modules if m.startswith(prefix)] for prefix in prefixes]
    groups.append([m for m in modules if not m.startswith(prefixes)])
    if not any((layout := layout_of(group)) and any(layout.layers(m) for m in group) for group in groups):
        return Detected("an unknown model", names[0] if names else "no keys")
    if (key := _first(DUAL.pattern, names)) is not None:
        return Detected(MEDIUM_35, f"its second attention: {key}", (SD3,))
    return _sd3_by_shape(shapes)


def kind_of_model(names: list[str]) -> str | None:
    """The kind of a file that is not a LoRA; None if unknown."""
    return next((kind for pattern, kind in MODELS if _first(pattern, names) is not None), None)


def _first(pattern: str, names: list[str]) -> str | None:
    return next((name for name in names if re.search(pattern, name)), None)


def _sd3_by_shape(shapes: Mapping[str, tuple[int, ...]]) -> Detected:
    """Identify the SD3 model by the widths of its attention and modulation."""
    widths: Counter[int] = Counter()
    for name, shape in shapes.items():
        split = split_key(name)
        if (
            split
            and split[1] == "down"
            and len(shape) == 2
            and re.search(r"attn|norm1|adaLN|norm_out|net.0.proj|mlp.fc1", name)
        ):
            widths[shape[1]] += 1
        if split and split[1] == "up" and re.search(r"joint_blocks.*x_block.*adaLN|blocks[._]\d+[._]norm1[._]", name):
            down = shapes.get(name.replace("lora_up", "lora_down").replace("lora_B", "lora_A"))
            if down and len(shape) == len(down) == 2 and shape[0] == 9 * down[1]:
                return Detected(MEDIUM_35, f"nine modulation vectors: {name} {list(shape)}", (SD3,))
    if not widths:
        return Detected("Stable Diffusion 3 (unknown size)", "the names of its layers", (SD3,))
    width = widths.most_common(1)[0][0]
    if width == 3072:
        return Detected("Flux or Qwen-Image", "attention of width 3072 under names that SD3 also uses")
    name = SD3_WIDTHS.get(width, f"Stable Diffusion 3 of the unpublished width {width}")
    note = f"attention of width {width}"
    shared = f"; {MEDIUM_35} has the same width in these layers" if width == 1536 else ""
    return Detected(name, note + shared, (SD3,))


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
    """A U-Net that may be of several models, or of none."""
    return f"a U-Net ({' or '.join(models)})" if models else "a U-Net"
