"""SD3's layers in LoRA files, and the named targets of ``adapter.targets``."""

from __future__ import annotations

import re

from simpletune.models.sd3.files import FUSED, IN_BLOCK, OUTER
from simpletune.models.shared.lora_names import Layout, LoraNames

_BLOCK = r"^transformer_blocks\.\d+\."  # anchored at the start, because a U-Net's names end in the same words
# SD3.5 Medium has a second attention of the image stream alone.
_IMAGE, _TEXT = r"attn2?\.(to_[qkv]|to_out\.0)", r"attn\.(add_[qkv]_proj|to_add_out)"

MEDIUM = "Stable Diffusion 3 Medium"
MEDIUM_35, LARGE_35 = "Stable Diffusion 3.5 Medium", "Stable Diffusion 3.5 Large"


class SD3Names(LoraNames):
    """Names of SD3's transformer."""

    title = "Stable Diffusion 3"
    denoiser = "transformer"
    header = {
        model: {
            "modelspec.architecture": f"stable-diffusion-3-{name}/lora",
            "ss_network_module": "networks.lora_sd3",
            "ss_base_model_version": f"sd3_{name}",
        }
        for model, name in ((MEDIUM, "m"), (MEDIUM_35, "5-medium"), (LARGE_35, "5-large"), ("", "m"))
    }
    short = {"blocks": "transformer_blocks"}
    reorders = True
    targets = {
        "attention": re.compile(rf"{_BLOCK}({_IMAGE}|{_TEXT})$"),
        "attention_qv": re.compile(rf"{_BLOCK}(attn2?\.to_[qv]|attn\.add_[qv]_proj)$"),
        "attention_image": re.compile(rf"{_BLOCK}{_IMAGE}$"),
        "attention_mlp": re.compile(rf"{_BLOCK}({_IMAGE}|{_TEXT}|ff(_context)?\.net\.(0\.proj|2))$"),
        "all_linear": re.compile(_BLOCK),
    }

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        blocks = "joint_blocks" if layout.original else "transformer_blocks"
        outer, in_block = (OUTER_BACK, IN_BLOCK_BACK) if layout.original else (OUTER_OWN, IN_BLOCK_OWN)
        found = {layout.spelt(name): layers for name, layers in outer.items()}
        if module in found:
            return found[module]
        separator = r"\." if layout.dots else "_"
        match = re.fullmatch(rf"{blocks}{separator}(\d+){separator}(.+)", module)
        if match is None:
            return ()
        leaves = {layout.spelt(name): layers for name, layers in in_block.items()}
        return tuple(f"transformer_blocks.{match[1]}.{name}" for name in leaves.get(match[2], ()))

    def original(self, layer: str) -> tuple[str, int | None]:
        if layer in OUTER:
            return OUTER[layer], None
        start, number, inner = layer.split(".", 2)
        if start != "transformer_blocks":
            raise KeyError(layer)
        if inner in FUSED:
            fused, third = FUSED[inner]
            return f"joint_blocks.{number}.{fused}", third
        return f"joint_blocks.{number}.{IN_BLOCK[inner]}", None

    def halves_swapped(self, layer: str, outputs: int, inputs: int) -> bool:
        # Modulations without gates are scale before shift in diffusers, but shift before scale in the original layout:
        # norm_out and the last block's norm1_context, which has two vectors where other blocks have six. So the number
        # of blocks, which a LoRA file does not contain, is not needed.
        return layer == "norm_out.linear" or layer.endswith(".norm1_context.linear") and outputs == 2 * inputs


OUTER_OWN = {name: (name,) for name in OUTER}
OUTER_BACK = {original: (name,) for name, original in OUTER.items()}
IN_BLOCK_OWN = {name: (name,) for name in (*IN_BLOCK, *FUSED)}
IN_BLOCK_BACK: dict[str, tuple[str, ...]] = {original: (name,) for name, original in IN_BLOCK.items()}
IN_BLOCK_BACK |= {  # three of diffusers' layers for a fused q, k, v
    fused: tuple(name for name, (own, _) in FUSED.items() if own == fused) for fused, _ in FUSED.values()
}

NAMES = SD3Names()
LAYOUTS = (  # the first is the one of a run's result
    Layout("diffusers", "transformer.", NAMES),
    Layout("kohya", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("peft", "base_model.model.", NAMES),
    Layout("onetrainer", "lora_transformer_", NAMES, dots=False, peft=False, alpha=True),
    # For methods other than LoRA, whose keys diffusers does not read: ComfyUI's names for diffusers' layers, as
    # LyCORIS's tools write them.
    Layout("lycoris", "lycoris_", NAMES, dots=False, peft=False, alpha=True),
    Layout("bare", "", NAMES),
)
