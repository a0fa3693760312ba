"""The layers of a U-Net (Stable Diffusion 1.5, 2) in LoRA files, and the named targets of ``adapter.targets``.

kohya's scripts train diffusers' U-Net, so their keys contain diffusers' names with underscores. ComfyUI's own files
contain the original names, which number blocks consecutively: three for each level, two of them with a layer.
"""

from __future__ import annotations

import re

from simpletune.models.shared.lora_names import Layout, LoraNames
from simpletune.system.options import UserError

ATTENTION = tuple(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))
IN_TRANSFORMER = {name.replace(".", "_"): name for name in (*ATTENTION, "ff.net.0.proj", "ff.net.2")}
LEAVES = {
    "attentions": ("proj_in", "proj_out"),
    "resnets": ("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
    "downsamplers": ("conv",),
    "upsamplers": ("conv",),
}
OUTER = {name.replace(".", "_"): name for name in ("conv_in", "conv_out")}
OUTER |= {f"time_embedding_linear_{n}": f"time_embedding.linear_{n}" for n in (1, 2)}
PLACE = re.compile(
    r"(?:(down|up)_blocks_(\d+)_(attentions|resnets|downsamplers|upsamplers)|mid_block_(attentions|resnets))_(\d+)_(.+)"
)
ORIGINAL_PLACE = re.compile(r"(?:(in|out)put_blocks_(\d+)|middle_block)_1_(.+)")
_BLOCK = r"\.attentions\.\d+\.transformer_blocks\.\d+\."


class UNetNames(LoraNames):
    """Names of ``UNet2DConditionModel``."""

    title = "Stable Diffusion 1.5 or 2"
    denoiser = "unet"
    short = {"down": "down_blocks", "mid": "mid_block", "up": "up_blocks"}
    targets = {
        "attention": re.compile(rf"{_BLOCK}attn[12]\.(to_[qkv]|to_out\.0)$"),
        "attention_qv": re.compile(rf"{_BLOCK}attn[12]\.to_[qv]$"),
        "attention_mlp": re.compile(rf"{_BLOCK}(attn[12]\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2))$"),
        "all_linear": re.compile(r"^((down|up)_blocks\.\d+|mid_block)\.attentions\."),
    }

    contexts = re.compile(rf"{_BLOCK}attn(?:(?P<picture>1)|2)\.to_[kv]$")

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        """As for ``LoraNames``; also knows the attention processors of old diffusers."""
        if layout.dots:
            module = re.sub(r"\.processor\.(to_[qkv])$", r".\1", module)
            module = re.sub(r"(\.processor)?\.to_out$", ".to_out.0", module)
        flat = module.replace(".", "_")
        if layout.original:
            flat = _from_original(flat)
            layer = _layer(flat)
            return (layer,) if layer else ()
        layer = _layer(flat)
        return (layer,) if layer and layout.spelt(layer) == module else ()

    def original(self, layer: str) -> tuple[str, int | None]:
        """UserError, always: the number of blocks in a level depends on the model."""
        raise UserError(
            f"{layer}: a U-Net's original names depend on the number of its layers. Use --format kohya, which ComfyUI, "
            "A1111, Forge and diffusers load"
        )


def _layer(flat: str) -> str | None:
    """Diffusers' name of a layer from its name with underscores for dots; None if there is no such layer."""
    if flat in OUTER:
        return OUTER[flat]
    match = PLACE.fullmatch(flat)
    if match is None:
        return None
    side, level, kind, middle, number, leaf = match.groups()
    place = f"mid_block.{middle}.{number}" if middle else f"{side}_blocks.{level}.{kind}.{number}"
    if leaf in LEAVES[middle or kind]:
        return f"{place}.{leaf}"
    inner = re.fullmatch(r"transformer_blocks_(\d+)_(.+)", leaf)
    if inner is None or (middle or kind) != "attentions" or inner[2] not in IN_TRANSFORMER:
        return None
    return f"{place}.transformer_blocks.{inner[1]}.{IN_TRANSFORMER[inner[2]]}"


def _from_original(flat: str) -> str:
    """Diffusers' flat name of an attention layer from its flat original name, for U-Nets with two layers per level."""
    match = ORIGINAL_PLACE.fullmatch(flat)
    if match is None:
        return ""
    side, block, leaf = match.groups()
    if side is None:
        return f"mid_block_attentions_0_{leaf}"
    level, number = divmod(int(block) - (side == "in"), 3)
    return f"{'down' if side == 'in' else 'up'}_blocks_{level}_attentions_{number}_{leaf}"


NAMES = UNetNames()
LAYOUTS = (  # the first is the one of a run's result, which every tool loads
    Layout("kohya", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),
    Layout("diffusers", "unet.", NAMES),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("original", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("peft", "base_model.model.", NAMES),
    Layout("bare", "", NAMES),
)
XL_LAYOUTS = LAYOUTS  # TODO
