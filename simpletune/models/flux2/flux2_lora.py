"""klein's layers in LoRA files, how other tools read them, and the named targets of ``adapter.targets``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from simpletune.models.flux2.flux2_files import BLOCKS, FUSED, JOINT, OUTER
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
from simpletune.models.shared.recognise import FLUX_2

# anchored at the start, because other families' names end in the same words
_JOINT, _PARALLEL = r"^transformer_blocks\.\d+\.", r"^single_transformer_blocks\.\d+\."
_OF_JOINT = rf"{_JOINT}attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)$"
OWN = re.compile(
    r"to_qkv_mlp_proj|[._]ff(_context)?[._]linear_(in|out)|(double|single)_stream_modulation|time_guidance_embed"
    r"|single_transformer_blocks[._]\d+[._]attn[._]to_out"
)
"""Occurs only in the names of FLUX.2's layers; the other names are Flux.1's or SD3's, too."""
WIDTHS = (
    (re.compile(r"single_(transformer_)?blocks[._]\d+[._](attn[._]to_out|linear2)"), 4),
    (re.compile(r"linear_out|_mlp[._]2"), 3),
    (re.compile(r"attn[._]|_attn|linear1|linear_in|_mlp[._]0|modulation|norm_out|adaLN|proj_out|final_layer"), 1),
)
"""How many widths of the model a layer reads."""
TARGET_OF_DIFFUSERS = re.compile(r"single_transformer_blocks\.2[0-3]\.attn\.to_out")
"""Blocks that klein 4B lacks, and that diffusers' training script asks for all the same."""

REJECTS_ALPHA = Note("rejects alpha tensors under these names: export to diffusers")
SPLIT = ("comfy-split", "peft")  # of which diffusers knows the blocks' layers alone
WRONG = Note("drops dora_scale, and is wrong without it", Fact.DORA)
VERDICTS = (  # of diffusers by runs of 0.42.1; of ComfyUI by its source
    Verdict((FORGE,), "refuses", (Note("has no FLUX.2"),)),
    Verdict((DIFFUSERS,), "silently nothing", (Note("reads no OFT: merge it into its base instead"),),
            layouts=("kohya", "kohya-split", "onetrainer"), facts=(Fact.OFT,)),
    Verdict((DIFFUSERS,), "refuses", (REJECTS_ALPHA,), layouts=("diffusers",), facts=(Fact.LOKR, Fact.ALPHA)),
    Verdict((DIFFUSERS,), "refuses", (Note("reads LoKr of the blocks alone, and not of {}", Fact.OUTSIDE),),
            layouts=("lycoris",), facts=(Fact.LOKR, Fact.OUTSIDE)),
    Verdict((DIFFUSERS,), "yes", (WRONG,), layouts=("lycoris", "comfy", "diffusers", "bare"), facts=(Fact.LOKR,)),
    Verdict((DIFFUSERS,), "refuses", (Note("reads LoKr under lycoris_ or ComfyUI's names: export to lycoris"),),
            facts=(Fact.LOKR,)),
    FORMS[0],
    Verdict((DIFFUSERS,), "refuses", (REJECTS_ALPHA,), layouts=("diffusers", "comfy", "bare", *SPLIT),
            facts=(Fact.ALPHA,)),
    Verdict((DIFFUSERS,), "refuses", (Note("reads this name without its block under transformer. alone: {}",
                                           Fact.OUTSIDE),),
            layouts=SPLIT, facts=(Fact.OUTSIDE,)),
    Verdict((DIFFUSERS,), "yes", layouts=("diffusers", *SPLIT), facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "refuses", (Note("reads DoRA under its own names alone: export to diffusers"),),
            layouts=("comfy",), facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "yes", (WRONG,), layouts=("diffusers", "kohya", "comfy", *SPLIT), facts=(Fact.DORA,)),
    Verdict((DIFFUSERS,), "silently nothing", (Note("no key starts with transformer.: convert it first"),),
            layouts=("onetrainer", "lycoris", "kohya-split", "bare"), facts=(Fact.DORA,)),
    *(row for row in DEPENDENT if row.tools != (FORGE,)),
    ONLY_LORA,
    Verdict((DIFFUSERS,), "refuses", (Note("{}", Fact.UNMATCHED),), layouts=("comfy", *SPLIT),
            facts=(Fact.UNMATCHED,)),
    Verdict((DIFFUSERS,), "yes",
            (Note("scales by alpha / rank from the header's settings: {}", Fact.SETTINGS), UNMATCHED),
            layouts=("diffusers", "comfy", *SPLIT)),
    Verdict((DIFFUSERS,), "yes", (Note("drops {}: export to diffusers", Fact.DROPPED, partly=True), UNMATCHED),
            layouts=("kohya",), drops=r"_stream_modulation_|_adaLN_"),
    Verdict((DIFFUSERS,), "silently nothing", (Note("no key starts with transformer.: convert it first"),)),
    Verdict((COMFYUI,), "partly", (UNTESTED, Note("mixes layouts")), layouts=(None,)),
    Verdict((COMFYUI,), "silently nothing", (UNTESTED, Note("its source names none of these: export to diffusers")),
            layouts=("kohya-split", *SPLIT)),
    Verdict((COMFYUI,), "yes",
            (UNTESTED,
             Note("applies it at scale 1 instead of {}, because it ignores alpha in the header", Fact.IGNORED),
             Note("drops {}: export to kohya", Fact.DROPPED, partly=True), UNMATCHED),
            layouts=("diffusers", "bare", "lycoris", "onetrainer"), drops=r"_stream_modulation|time_guidance_embed"),
    Verdict((COMFYUI,), "yes", (UNTESTED, UNMATCHED)),
)  # fmt: skip


class KleinNames(LoraNames):
    """Names of FLUX.2's transformer."""

    title = "FLUX.2 klein 4B"
    denoiser = "transformer"
    short = {"blocks": "transformer_blocks", "single": "single_transformer_blocks"}
    header = {
        "": {
            "modelspec.architecture": "Flux.2-klein-4b/lora",
            "ss_network_module": "networks.lora_flux_2",
            "ss_base_model_version": "flux_2_klein_4b",
        }
    }
    reorders = True
    verdicts = VERDICTS
    targets = {
        # A parallel block has one layer before and one after its attention and its network, which no target can part.
        "attention": re.compile(rf"{_OF_JOINT}|{_PARALLEL}attn\.to_(qkv_mlp_proj|out)$"),
        "all_linear": re.compile(rf"{_JOINT}|{_PARALLEL}"),
    }

    def shows(self, name: str, inputs: int) -> int:
        """Tell by ``OWN``, or by the width of a layer that other models of ours have in other widths."""
        return 2 if OWN.search(name) else int(_width(name, inputs) == dict(FLUX_2)["klein 4B"])

    def published(self, shapes: Mapping[str, Shape], roles: Mapping[str, str]) -> tuple[str, str] | None:
        """Tell the model by its width."""
        widths = {key: _width(key, shapes[key][1]) for key, role in roles.items() if role == DOWN and shapes[key][1:]}
        key, width = next(((key, width) for key, width in widths.items() if width), (None, 0))
        if width in {width for name, width in FLUX_2 if name != "klein 4B"}:
            return None
        title = self.title if width in (0, dict(FLUX_2)["klein 4B"]) else f"FLUX.2 of the unpublished width {width}"
        return title, f"its width, {width}: {key}" if key else "the names of its layers"

    def caution(self, targets: Collection[str]) -> str | None:
        if not any(map(TARGET_OF_DIFFUSERS.fullmatch, targets)):
            return None
        return (
            "seems to be from diffusers' training script, which reads layers 10, 20 and 30 of the text encoder unless "
            "told otherwise, and klein reads 9, 18 and 27 (huggingface/diffusers#13445): if so, pictures with it are "
            "worse than they could be, and it has to be trained again with --text_encoder_out_layers 9 18 27"
        )

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        for ours, theirs in OUTER.items():
            if module == layout.spelt(theirs if layout.original else ours):
                return (ours,)
        for ours, (theirs, leaves) in BLOCKS.items():
            known = leaves | ({name: own for name, (own, _) in FUSED.items()} if leaves is JOINT else {})
            name = layout.spelt(theirs if layout.original else ours)
            found = re.fullmatch(rf"{name}[._](\d+)[._](.+)", module)
            if found is not None:
                spelt = {leaf: layout.spelt(own if layout.original else leaf) for leaf, own in known.items()}
                return tuple(f"{ours}.{found[1]}.{leaf}" for leaf, own in spelt.items() if own == found[2])
        return ()

    def original(self, layer: str) -> tuple[str, Rows | None]:
        if layer in OUTER:
            return OUTER[layer], None
        start, number, inner = layer.split(".", 2)
        block, leaves = BLOCKS[start]
        fused, rows = FUSED[inner] if leaves is JOINT and inner in FUSED else (leaves[inner], None)
        return f"{block}.{number}.{fused}", rows

    def halves_swapped(self, layer: str, outputs: int, inputs: int) -> bool:
        return layer == "norm_out.linear"


def _width(name: str, inputs: int) -> int:
    """Return the model's width by the inputs of one of its layers; 0 if the layer does not tell."""
    return next((inputs // times for pattern, times in WIDTHS if pattern.search(name)), 0)


NAMES = KleinNames()
LAYOUTS = (  # the first is the one of a run's result, and right in every tool
    Layout("diffusers", "transformer.", NAMES),
    Layout("kohya", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("comfy", "diffusion_model.", NAMES, original=True),  # diffusers refuses alpha here
    Layout("comfy-split", "diffusion_model.", NAMES),
    Layout("peft", "base_model.model.", NAMES),
    Layout("kohya-split", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),
    Layout("onetrainer", "lora_transformer_", NAMES, dots=False, peft=False, alpha=True),
    Layout("lycoris", "lycoris_", NAMES, dots=False, peft=False, alpha=True),
    Layout("bare", "", NAMES),
)
