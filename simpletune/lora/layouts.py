"""The layouts of LoRA files for SD3 and the meaning of their keys, without torch.

A key consists of a prefix, a module and a role. Layouts differ in all three: diffusers' names or the original ones,
with dots or underscores; ``lora_A`` or ``lora_down``; alpha in a tensor, in the header, or missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from simpletune.families.sd3.original_names import FUSED, IN_BLOCK, OUTER

DOWN, UP, ALPHA = "down", "up", "alpha"
ROLES = {
    "lora_A.weight": DOWN,
    "lora_B.weight": UP,
    "lora_A.default.weight": DOWN,
    "lora_B.default.weight": UP,
    "lora_down.weight": DOWN,
    "lora_up.weight": UP,
    "lora.down.weight": DOWN,
    "lora.up.weight": UP,
    "alpha": ALPHA,
}
# Keys of other methods, which are refused by name because plain LoRA arithmetic would be wrong for them.
OTHER_METHODS = (
    (r"\.(dora_scale|lora_magnitude_vector(\.default)?(\.weight)?)$", "DoRA"),
    (r"\.hada_[wt]\d(_[ab])?$", "LoHa"),
    (r"\.lokr_[wt]\d(_[ab])?$", "LoKr"),
    (r"\.oft_(blocks|diag)$|\.oft_R\.", "OFT"),
    (r"\.lora_mid\.weight$", "LoCon with a middle convolution (lora_mid)"),
    (r"\.(diff|diff_b|w_norm|b_norm|set_weight)$", "whole differences of weights (.diff)"),
    (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA"),
    (r"\.lora_B(\.default)?\.bias$", "LoRA with biases"),
    (r"\.lora_embedding_[AB]", "LoRA of embeddings"),
)
TEXT_ENCODERS = re.compile(r"^(text_encoder(_[23])?\.|lora_te\d?_|clip_[lg]\.|t5xxl\.)")


@dataclass(frozen=True)
class Layout:
    """The naming scheme of a kind of file.

    Args:
        name: its name in commands and messages.
        prefix: the prefix of every key.
        original: whether modules have the original names (with fused q, k, v) instead of diffusers'.
        dots: whether module names contain dots rather than underscores.
        down: key ending of the first factor, [rank, inputs].
        up: key ending of the second factor, [outputs, rank].
    """

    name: str
    prefix: str
    original: bool
    dots: bool
    down: str
    up: str

    def key(self, module: str, role: str) -> str:
        """The key of a module's tensor; ``module`` contains dots."""
        ending = {DOWN: self.down, UP: self.up, ALPHA: "alpha"}[role]
        return f"{self.prefix}{module if self.dots else module.replace('.', '_')}.{ending}"


DIFFUSERS = Layout("diffusers", "transformer.", False, True, "lora_A.weight", "lora_B.weight")
KOHYA = Layout("kohya", "lora_unet_", True, False, "lora_down.weight", "lora_up.weight")
COMFY = Layout("comfy", "diffusion_model.", True, True, "lora_A.weight", "lora_B.weight")
WRITTEN = {layout.name: layout for layout in (DIFFUSERS, KOHYA, COMFY)}
PEFT = Layout("peft", "base_model.model.", False, True, "lora_A.weight", "lora_B.weight")
ONETRAINER = Layout("onetrainer", "lora_transformer_", False, False, "lora_down.weight", "lora_up.weight")
BARE = Layout("bare", "", False, True, "lora_A.weight", "lora_B.weight")
LAYOUTS = (DIFFUSERS, KOHYA, COMFY, PEFT, ONETRAINER, BARE)
TITLES = {
    "diffusers": "diffusers (transformer.*)",
    "kohya": "kohya (lora_unet_*)",
    "comfy": "ComfyUI native (diffusion_model.*)",
    "peft": "PEFT (base_model.model.*)",
    "onetrainer": "OneTrainer (lora_transformer_*)",
    "bare": "diffusers' names without a prefix",
}


def split_key(key: str) -> tuple[str, str] | None:
    """Split a key into its module (with prefix) and role; None if it is not a LoRA key."""
    for ending, role in ROLES.items():
        if key.endswith("." + ending):
            return key.removesuffix("." + ending), role
    return None


def layout_of(modules: list[str]) -> Layout | None:
    """The layout of modules (with prefixes); None if they have no common layout."""
    for layout in LAYOUTS[:-1]:
        if modules and all(module.startswith(layout.prefix) for module in modules):
            return layout
    prefixed = any(module.startswith(layout.prefix) for layout in LAYOUTS[:-1] for module in modules)
    return BARE if modules and not prefixed else None


def layers_of(layout: Layout, module: str) -> tuple[str, ...]:
    """Diffusers' names of the layers that a file's module updates: one, three for a fused q, k, v, or none.

    Args:
        layout: the file's layout.
        module: the name in the file, with its prefix.
    """
    inner = module.removeprefix(layout.prefix)
    if not layout.original:
        return _diffusers_layer(inner, layout.dots)
    outer = {(v if layout.dots else v.replace(".", "_")): k for k, v in OUTER.items()}
    if inner in outer:
        return (outer[inner],)
    match = re.fullmatch(r"joint_blocks\.(\d+)\.(.+)" if layout.dots else r"joint_blocks_(\d+)_(.+)", inner)
    if match is None:
        return ()
    number, leaf = match.groups()
    found = _IN_BLOCK_BACK if layout.dots else {k.replace(".", "_"): v for k, v in _IN_BLOCK_BACK.items()}
    return tuple(f"transformer_blocks.{number}.{name}" for name in found.get(leaf, ()))


def original_module(layer: str) -> tuple[str, int | None]:
    """The original module of one of diffusers' layers, and which third of it the layer is; None for all of it.

    Raises:
        KeyError: SD3 has no such layer.
    """
    if layer in OUTER:
        return OUTER[layer], None
    start, number, inner = layer.split(".", 2)
    if start != "transformer_blocks":
        raise KeyError(layer)
    if inner in FUSED:
        fused, third = FUSED[inner]
        return f"joint_blocks.{number}.{fused}", third
    return f"joint_blocks.{number}.{IN_BLOCK[inner]}", None


def halves_swapped(layer: str, outputs: int, inputs: int) -> bool:
    """Whether a layer's outputs are scale before shift in diffusers, but shift before scale in the original layout.

    True for modulations without gates: ``norm_out`` and the last block's ``norm1_context``, which has two vectors where
    other blocks have six. So the number of blocks, which a LoRA file does not contain, is not needed.
    """
    return layer == "norm_out.linear" or layer.endswith(".norm1_context.linear") and outputs == 2 * inputs


def _diffusers_layer(inner: str, dots: bool) -> tuple[str, ...]:
    outer = {k if dots else k.replace(".", "_"): k for k in OUTER}
    if inner in outer:
        return (outer[inner],)
    match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)" if dots else r"transformer_blocks_(\d+)_(.+)", inner)
    if match is None:
        return ()
    number, leaf = match.groups()
    known = {name if dots else name.replace(".", "_"): name for name in (*IN_BLOCK, *FUSED)}
    return (f"transformer_blocks.{number}.{known[leaf]}",) if leaf in known else ()


def _backwards() -> dict[str, tuple[str, ...]]:
    """Map original names inside a block to diffusers': one each, three for a fused q, k, v."""
    found: dict[str, tuple[str, ...]] = {original: (name,) for name, original in IN_BLOCK.items()}
    for name, (fused, _) in FUSED.items():
        found[fused] = (*found.get(fused, ()), name)
    return found


_IN_BLOCK_BACK = _backwards()
