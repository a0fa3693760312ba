"""klein's layers in LoRA files, and the named targets of ``adapter.targets``."""

from __future__ import annotations

import re

from simpletune.models.shared.fused import Fused, Rows
from simpletune.models.shared.lora_layout import Layout, LoraNames

FUSED = {
    **Fused("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")).rows(),
    **Fused("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")).rows(),
}
JOINT = {
    "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2",
}  # fmt: skip
PARALLEL = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
BLOCKS = {"transformer_blocks": ("double_blocks", JOINT), "single_transformer_blocks": ("single_blocks", PARALLEL)}
"""The original names of diffusers' blocks and of what is in them."""

# anchored at the start, because other families' names end in the same words
_JOINT, _PARALLEL = r"^transformer_blocks\.\d+\.", r"^single_transformer_blocks\.\d+\."
_OF_JOINT = rf"{_JOINT}attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)$"


class KleinNames(LoraNames):
    """Names of FLUX.2's transformer."""

    title = "FLUX.2 klein 4B"
    denoiser = "transformer"
    short = {"blocks": "transformer_blocks", "single": "single_transformer_blocks"}
    header = {"": {"modelspec.architecture": "Flux.2-klein-4b/lora"}}
    targets = {
        # A parallel block has one layer before and one after its attention and its network, which no target can part.
        "attention": re.compile(rf"{_OF_JOINT}|{_PARALLEL}attn\.to_(qkv_mlp_proj|out)$"),
        "all_linear": re.compile(rf"{_JOINT}|{_PARALLEL}"),
    }

    def shows(self, name: str, inputs: int) -> int:
        return int(bool(re.search(r"single_(transformer_)?blocks|linear_(in|out)|_attn[._]|_mlp[._]", name)))

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        for ours, (theirs, leaves) in BLOCKS.items():
            known = leaves | ({name: own for name, (own, _) in FUSED.items()} if leaves is JOINT else {})
            name = layout.spelt(theirs if layout.original else ours)
            found = re.fullmatch(rf"{name}[._](\d+)[._](.+)", module)
            if found is not None:
                spelt = {leaf: layout.spelt(own if layout.original else leaf) for leaf, own in known.items()}
                return tuple(f"{ours}.{found[1]}.{leaf}" for leaf, own in spelt.items() if own == found[2])
        return ()

    def original(self, layer: str) -> tuple[str, Rows | None]:
        start, number, inner = layer.split(".", 2)
        block, leaves = BLOCKS[start]
        fused, rows = FUSED[inner] if leaves is JOINT and inner in FUSED else (leaves[inner], None)
        return f"{block}.{number}.{fused}", rows


NAMES = KleinNames()
LAYOUTS = (  # the first is the one of a run's result
    Layout("diffusers", "transformer.", NAMES),
    Layout("kohya", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("bare", "", NAMES),
)
