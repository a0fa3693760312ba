"""Z-Image's layers in LoRA files, how other tools read them, and the named targets of ``adapter.targets``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_layout import DOWN, Layout, LoraNames
from simpletune.models.shared.model_config import Shape
from simpletune.models.zimage.zimage_files import BLOCKS, FUSED, IN_BLOCK, OUTER, WIDTH

# anchored at the start, because other families' names end in the same words
_BLOCK = rf"^({'|'.join(BLOCKS)})\.\d+\."
_ATTENTION = rf"{_BLOCK}attention\.(to_[qkv]|to_out\.0)$"
LUMINA = 2304
"""The width of Lumina 2, whose original layers have the same names."""
OWN = re.compile(r"attention[._]to_(q|k|v|out)|adaLN_modulation[._]0|all_(x_embedder|final_layer)[._]2-1")
"""Occurs only in the names of Z-Image's layers; the other names are Lumina 2's, too."""
WIDE = re.compile(r"attention[._]|feed_forward[._]w[13]")
"""Layers that read the model's width."""
ALONE = ("attention.to_out.0", *(f"feed_forward.w{number}" for number in (1, 2, 3)), "adaLN_modulation.0")
LEAVES: Mapping[str, tuple[str, Rows | None]] = {**{name: (IN_BLOCK.get(name, name), None) for name in ALONE}, **FUSED}
"""The original name of each of a block's linear layers, and which rows of it the layer is."""
OUTSIDE = {**OUTER, **{name: name for name in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")}}


class ZImageNames(LoraNames):
    """Names of Z-Image's transformer."""

    title = "Z-Image"
    denoiser = "transformer"
    short = {"blocks": "layers"}
    header = {
        "": {
            "modelspec.architecture": "Z-Image/lora",
            "ss_network_module": "networks.lora_zimage",
            "ss_base_model_version": "zimage",
        }
    }
    targets = {
        "attention": re.compile(_ATTENTION),
        "attention_mlp": re.compile(rf"{_ATTENTION}|{_BLOCK}feed_forward\.w[123]$"),
        "all_linear": re.compile(_BLOCK),
    }

    def shows(self, name: str, inputs: int) -> int:
        """Tell by ``OWN``, or by the width."""
        return 2 if OWN.search(name) else int(bool(WIDE.search(name)) and inputs == WIDTH)

    def published(self, shapes: Mapping[str, Shape], roles: Mapping[str, str]) -> tuple[str, str] | None:
        """Tell the model by its width."""
        down = {key: shapes[key][1] for key, role in roles.items() if role == DOWN and shapes[key][1:]}
        key, width = next(((key, width) for key, width in down.items() if WIDE.search(key)), (None, WIDTH))
        if width == LUMINA:
            return None
        title = self.title if width == WIDTH else f"{self.title} of the unpublished width {width}"
        return title, f"its width, {width}: {key}" if key else "the names of its layers"

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        for ours, theirs in OUTSIDE.items():
            if module == layout.spelt(theirs if layout.original else ours):
                return (ours,)
        found = re.fullmatch(rf"({'|'.join(BLOCKS)})[._](\d+)[._](.+)", module)
        if found is None:
            return ()
        spelt = {name: layout.spelt(own if layout.original else name) for name, (own, _) in LEAVES.items()}
        return tuple(f"{found[1]}.{found[2]}.{name}" for name, own in spelt.items() if own == found[3])

    def original(self, layer: str) -> tuple[str, Rows | None]:
        if layer in OUTSIDE:
            return OUTSIDE[layer], None
        start, number, inner = layer.split(".", 2)
        if start not in BLOCKS:
            raise KeyError(layer)
        own, rows = LEAVES[inner]
        return f"{start}.{number}.{own}", rows


NAMES = ZImageNames()
LAYOUTS = (  # the first is the one of a run's result, and right in every tool
    Layout("diffusers", "transformer.", NAMES),
    Layout("kohya", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("comfy-split", "diffusion_model.", NAMES),  # of ai-toolkit
    Layout("peft", "base_model.model.", NAMES),
    Layout("kohya-split", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),  # of musubi-tuner
    Layout("onetrainer", "lora_transformer_", NAMES, dots=False, peft=False, alpha=True),
    Layout("lycoris", "lycoris_", NAMES, dots=False, peft=False, alpha=True),
    Layout("bare", "", NAMES),
)
