"""The layers of text encoders in LoRA files of every layout, without torch.

This package names a layer as diffusers' files do: the encoder's folder in a pipeline, then the layer's name in the
published checkpoint, as in ``text_encoder.text_model.encoder.layers.0.self_attn.q_proj``. An update with such a name
changes a text encoder; every other one changes the denoiser.

| layout | CLIP-L | CLIP-G | T5 |
|---|---|---|---|
| diffusers | ``text_encoder.`` | ``text_encoder_2.`` | ``text_encoder_3.`` (diffusers does not read it) |
| kohya, OneTrainer | ``lora_te1_`` (SD 1.5 and 2: ``lora_te_``) | ``lora_te2_`` | ``lora_te3_`` |
| ComfyUI | ``text_encoders.clip_l.transformer.`` | ``...clip_g...`` | ``...t5xxl...`` |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from simpletune.models.shared.lora_names import DOWN, UP

CLIP_L, CLIP_G, T5 = "text_encoder", "text_encoder_2", "text_encoder_3"
TITLES = {CLIP_L: "CLIP-L", CLIP_G: "CLIP-G", T5: "T5"}
NUMBERS = {CLIP_L: "1", CLIP_G: "2", T5: "3"}
COMFY = {CLIP_L: "clip_l", CLIP_G: "clip_g", T5: "t5xxl"}
TEXT_KEY = re.compile(r"^(text_encoder(_[23])?\.|lora_te\d?_|(text_encoders\.)?(clip_[lgh]|t5xxl)\.)")
BUNDLED = "bundle_emb."
"""The prefix of the keys of embeddings inside a LoRA file: ``bundle_emb.NAME.clip_l``."""

_PROJECTIONS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}  # of old diffusers
_CLIP = re.compile(
    r"(?:text_model[._])?encoder[._]layers[._](\d+)[._](self_attn|mlp)[._]"
    r"((?:q|k|v|out)_proj|fc[12]|to_(?:q|k|v|out))"
)
_T5 = re.compile(r"encoder[._]block[._](\d+)[._]layer[._](\d+)[._](SelfAttention|DenseReluDense)[._](\w+)")
_PREFIXES = (
    (re.compile(r"text_encoder_([23])\."), None),
    (re.compile(r"text_encoder(\.)"), "1"),
    (re.compile(r"lora_te([123])_"), None),
    (re.compile(r"lora_te(_)"), "1"),
    (re.compile(r"(?:text_encoders\.)?clip_([lh])\.(?:transformer\.)?"), "1"),
    (re.compile(r"(?:text_encoders\.)?clip_(g)\.(?:transformer\.)?"), "2"),
    (re.compile(r"(?:text_encoders\.)?(t5xxl)\.(?:transformer\.)?"), "3"),
)


def is_text(layer: str) -> bool:
    """Whether a layer is a text encoder's, by its name in this package."""
    return layer.partition(".")[0] in TITLES


def encoder_of(layer: str) -> tuple[str, str]:
    """A text layer's encoder, and its name in it."""
    encoder, _, name = layer.partition(".")
    return encoder, name


def text_layer(module: str) -> str | None:
    """This package's name for a module (a key without its role) in a file of any layout; None if no text encoder has
    such a layer."""
    for pattern, number in _PREFIXES:
        if match := pattern.match(module):
            wanted = number or match[1]
            encoder = next(name for name, own in NUMBERS.items() if own == wanted)
            inner = _inner(module[match.end() :], encoder)
            return f"{encoder}.{inner}" if inner else None
    return None


def _inner(rest: str, encoder: str) -> str | None:
    """A layer's name in its encoder, from its name with dots or underscores."""
    if encoder == T5:
        found = _T5.fullmatch(rest)
        return f"encoder.block.{found[1]}.layer.{found[2]}.{found[3]}.{found[4]}" if found else None
    if rest == "text_projection":
        return rest
    found = _CLIP.fullmatch(rest)
    if found is None:
        return None
    number, part, leaf = found.groups()
    leaf = _PROJECTIONS.get(leaf, leaf)
    if (part == "mlp") != leaf.startswith("fc"):
        return None
    return f"text_model.encoder.layers.{number}.{part}.{leaf}"


def text_key(layer: str, role: str, layout: str, single: bool = False) -> str:
    """The key of a text layer's tensor in a file; ``role`` is as for ``Layout.key``. ``single``: the model has
    one text encoder, whose keys kohya's scripts do not number."""
    encoder, name = encoder_of(layer)
    peft = layout in ("diffusers", "comfy")
    ending = {DOWN: "lora_A.weight" if peft else "lora_down.weight", UP: "lora_B.weight" if peft else "lora_up.weight"}
    if layout == "diffusers":
        module = layer
    elif layout == "comfy":
        module = f"text_encoders.{COMFY[encoder]}.transformer.{name}"
    else:  # kohya's, and lycoris
        module = f"lora_te{'' if single else NUMBERS[encoder]}_{name.replace('.', '_')}"
    return f"{module}.{ending.get(role, role)}"


Value = TypeVar("Value")


def style_of(key: str) -> str:
    """The layout of a text encoder's key: ``diffusers``, ``kohya`` or ``comfy``."""
    if key.startswith("lora_te"):
        return "kohya"
    return "diffusers" if key.startswith("text_encoder") and not key.startswith("text_encoders.") else "comfy"


def split_text(updates: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Split values by layer into those of the denoiser and those of the text encoders."""
    text = {layer: update for layer, update in updates.items() if is_text(layer)}
    return {layer: update for layer, update in updates.items() if layer not in text}, text


def encoders_in(layers: Iterable[str]) -> str:
    """The text encoders that have these layers, in words: ``CLIP-L and CLIP-G``."""
    found = {encoder_of(layer)[0] for layer in layers}
    return " and ".join(title for encoder, title in TITLES.items() if encoder in found)
