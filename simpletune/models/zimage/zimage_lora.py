"""Z-Image's layers in LoRA files, how other tools read them, and the named targets of ``adapter.targets``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_layout import DOWN, Layout, LoraNames
from simpletune.models.shared.lora_verdicts import (
    COMFYUI,
    DEPENDENT,
    DIFFUSERS,
    FORGE,
    FORMS,
    ONLY_LORA,
    UNMATCHED,
    UNTESTED,
    Fact,
    Note,
    Verdict,
)
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

NO_ALPHA = Note("rejects alpha tensors under these names: export to diffusers")
NOT_READ = Note("no key starts with transformer.: convert it first")
READ = ("kohya", "kohya-split", "comfy", "comfy-split")  # what diffusers converts, besides its own
UNREAD = ("peft", "onetrainer", "lycoris")
IN_FUSED = r"attention\.(qkv|out)$|^diffusion_model\.(x_embedder|final_layer)\."
VERDICTS = (  # of diffusers by runs of 0.42.1; of ComfyUI by its source
    Verdict((FORGE,), "refuses", (Note("has no Z-Image"),)),
    Verdict((DIFFUSERS,), "silently nothing", (Note("reads no OFT: merge it into its base instead"),),
            layouts=("onetrainer",), facts=(Fact.OFT,)),
    FORMS[0],
    Verdict((DIFFUSERS,), "refuses", (NO_ALPHA,), layouts=("diffusers", *UNREAD), facts=(Fact.ALPHA,)),
    Verdict((DIFFUSERS,), "refuses", (Note("reads LoKr under ComfyUI's names: export to comfy-split"),),
            layouts=("kohya", "kohya-split"), facts=(Fact.LOKR, Fact.ALPHA)),
    Verdict((DIFFUSERS,), "silently nothing", (Note("reads LoKr under ComfyUI's names: export to comfy-split"),),
            layouts=("kohya", "kohya-split", *UNREAD), facts=(Fact.LOKR,)),
    Verdict((DIFFUSERS,), "yes",
            (Note("drops {}: export to comfy-split", Fact.DROPPED, partly=True), UNMATCHED),
            layouts=("diffusers", "comfy", "comfy-split"), facts=(Fact.LOKR,), drops=IN_FUSED),
    Verdict((DIFFUSERS,), "yes", (UNMATCHED,), layouts=("bare",), facts=(Fact.LOKR, Fact.ALPHA)),
    Verdict((DIFFUSERS,), "refuses", (NO_ALPHA,), layouts=("comfy",), facts=(Fact.ALPHA,)),
    Verdict((DIFFUSERS,), "yes", layouts=("diffusers",), facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "refuses", (Note("reads DoRA under its own names alone: export to diffusers"),),
            layouts=READ, facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "yes", (Note("drops dora_scale, and is wrong without it", Fact.DORA),),
            layouts=("diffusers", *READ), facts=(Fact.DORA,)),
    Verdict((DIFFUSERS,), "silently nothing", (NOT_READ,), layouts=("bare", *UNREAD), facts=(Fact.DORA,)),
    Verdict((COMFYUI,), "partly", (UNTESTED, Note("mixes layouts")), layouts=(None,)),
    # As musubi-tuner writes them (ComfyUI#11487), among others.
    Verdict((COMFYUI,), "silently nothing", (UNTESTED, Note("its source names none of these: export to diffusers")),
            layouts=("kohya-split", "peft", "onetrainer")),
    *(row for row in DEPENDENT if row.tools != (FORGE,)),
    ONLY_LORA,
    Verdict((DIFFUSERS,), "yes",
            (Note("scales by alpha / rank from the header's settings: {}", Fact.SETTINGS), UNMATCHED),
            layouts=("diffusers", "comfy-split")),
    Verdict((DIFFUSERS,), "yes", (Note("drops {}: export to diffusers", Fact.DROPPED, partly=True), UNMATCHED),
            layouts=("comfy",), drops=IN_FUSED),
    Verdict((DIFFUSERS,), "yes", (Note("drops {}: export to diffusers", Fact.DROPPED, partly=True), UNMATCHED),
            layouts=("kohya", "kohya-split"), drops=r"^lora_unet_(x_embedder|final_layer)"),
    Verdict((DIFFUSERS,), "yes", (UNMATCHED,), layouts=("bare",), facts=(Fact.ALPHA,)),
    Verdict((DIFFUSERS,), "silently nothing", (NOT_READ,)),
    Verdict((COMFYUI,), "yes",
            (UNTESTED,
             Note("applies it at scale 1 instead of {}, because it ignores alpha in the header", Fact.IGNORED),
             UNMATCHED),
            layouts=("diffusers", "comfy-split", "bare", "lycoris")),
    Verdict((COMFYUI,), "yes", (UNTESTED, UNMATCHED)),
)  # fmt: skip


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
    verdicts = VERDICTS
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
    Layout("comfy", "diffusion_model.", NAMES, original=True),  # diffusers refuses alpha here
    Layout("comfy-split", "diffusion_model.", NAMES),  # of ai-toolkit
    Layout("peft", "base_model.model.", NAMES),
    Layout("kohya-split", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),  # of musubi-tuner
    Layout("onetrainer", "lora_transformer_", NAMES, dots=False, peft=False, alpha=True),
    Layout("lycoris", "lycoris_", NAMES, dots=False, peft=False, alpha=True),
    Layout("bare", "", NAMES),
)
