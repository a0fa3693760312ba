"""SD3's layers in LoRA files, and the named targets of ``adapter.targets``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from simpletune.models.sd3.sd3_files import FUSED, IN_BLOCK, OUTER
from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_encoders import LoraEncoder, clip_layer, t5_layer
from simpletune.models.shared.lora_layout import DOWN, UP, Layout, LoraNames
from simpletune.models.shared.lora_verdicts import (
    COMFYUI,
    DEPENDENT,
    DIFFUSERS,
    FORGE,
    FORMS,
    MERGE,
    ONLY_LORA,
    UNMATCHED,
    Fact,
    Note,
    Verdict,
)
from simpletune.models.shared.model_config import Shape
from simpletune.models.shared.recognise import JOINT

_BLOCK = r"^transformer_blocks\.\d+\."  # anchored at the start, because a U-Net's names end in the same words
# SD3.5 Medium has a second attention of the image stream alone.
_IMAGE, _TEXT = r"attn2?\.(to_[qkv]|to_out\.0)", r"attn\.(add_[qkv]_proj|to_add_out)"

MEDIUM = "Stable Diffusion 3 Medium"
MEDIUM_35, LARGE_35 = "Stable Diffusion 3.5 Medium", "Stable Diffusion 3.5 Large"
WIDTHS = {1536: MEDIUM, 2432: LARGE_35}
DUAL = re.compile(r"(transformer_blocks|joint_blocks)[._]\d+[._](x_block[._])?attn2[._]")
WIDE = re.compile(r"attn|norm1|adaLN|norm_out|net.0.proj|mlp.fc1")  # layers whose inputs are as wide as the model
MODULATION = re.compile(r"joint_blocks.*x_block.*adaLN|blocks[._]\d+[._]norm1[._]")
CLIP_READERS = {DIFFUSERS: ("diffusers",), COMFYUI: ("kohya", "diffusers", "comfy"), FORGE: ("kohya", "diffusers")}
T5_READERS = {DIFFUSERS: (), COMFYUI: ("kohya", "comfy"), FORGE: ("kohya",)}
ORIGINAL_ONLY = "knows only the original names for SD3: "

VERDICTS = (
    *FORMS,
    Verdict((DIFFUSERS,), "yes", layouts=("diffusers",), facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "yes", (Note("as plain LoRA, which is wrong: it drops dora_scale"),),
            layouts=("diffusers",), facts=(Fact.DORA,)),
    Verdict((FORGE,), "silently nothing", (Note(ORIGINAL_ONLY + MERGE),),
            layouts=("diffusers", "peft", "lycoris", "onetrainer"), facts=(Fact.OF_WEIGHT,)),
    *DEPENDENT,
    ONLY_LORA,
    Verdict((DIFFUSERS,), "refuses",
            (Note("rejects keys without 'lora' in their name, such as {}", Fact.KEY_WITHOUT_LORA),),
            facts=(Fact.KEY_WITHOUT_LORA,)),
    Verdict((DIFFUSERS,), "yes",
            (Note("scales by alpha / rank from the header's settings: {}", Fact.SETTINGS),
             Note("ranks differ: versions that use the first layer's rank as every alpha scale the others wrongly",
                  Fact.RANKS), UNMATCHED),
            layouts=("diffusers",)),
    Verdict((DIFFUSERS,), "silently nothing", (Note("no key starts with transformer.: convert it first"),)),
    Verdict((COMFYUI,), "partly", (Note("mixes layouts"),), layouts=(None,)),
    Verdict((COMFYUI,), "silently nothing", (Note("names without a prefix match no layer in ComfyUI"),),
            layouts=("bare",)),
    Verdict((COMFYUI,), "yes",
            (Note("applies it at scale 1 instead of {}, because it ignores alpha in the header", Fact.IGNORED),
             UNMATCHED),
            layouts=("diffusers", "peft", "onetrainer")),
    Verdict((COMFYUI,), "yes", (Note("modules without .alpha are applied at scale 1", Fact.NO_ALPHA), UNMATCHED),
            layouts=("kohya", "comfy")),
    Verdict((COMFYUI,), "yes", (UNMATCHED,)),
    Verdict((FORGE,), "yes", (UNMATCHED,), layouts=("kohya",)),
    Verdict((FORGE,), "yes", (Note("according to its source, untested; kohya's layout is safer"),),
            layouts=("comfy",)),
    Verdict((FORGE,), "silently nothing", (Note(f"{ORIGINAL_ONLY}export to kohya with --rank"),),
            facts=(Fact.OTHER_KINDS,)),
    Verdict((FORGE,), "silently nothing", (Note(f"{ORIGINAL_ONLY}export to kohya"),)),
)  # fmt: skip


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
    layers_of = {MEDIUM_35: DUAL}
    reorders = True
    verdicts = VERDICTS
    encoders = (
        LoraEncoder("text_encoder", "CLIP-L", "1", ("clip_l",), clip_layer, CLIP_READERS),
        LoraEncoder("text_encoder_2", "CLIP-G", "2", ("clip_g",), clip_layer, CLIP_READERS),
        LoraEncoder("text_encoder_3", "T5", "3", ("t5xxl",), t5_layer, T5_READERS),
    )
    targets = {
        "attention": re.compile(rf"{_BLOCK}({_IMAGE}|{_TEXT})$"),
        "attention_qv": re.compile(rf"{_BLOCK}(attn2?\.to_[qv]|attn\.add_[qv]_proj)$"),
        "attention_image": re.compile(rf"{_BLOCK}{_IMAGE}$"),
        "attention_mlp": re.compile(rf"{_BLOCK}({_IMAGE}|{_TEXT}|ff(_context)?\.net\.(0\.proj|2))$"),
        "all_linear": re.compile(_BLOCK),
    }

    def shows(self, name: str, inputs: int) -> int:
        """Tell by the width, which other transformers with layers of these names do not have."""
        return int(inputs in WIDTHS)

    def published(self, shapes: Mapping[str, Shape], roles: Mapping[str, str]) -> tuple[str, str] | None:
        """Tell by the second attention, the number of modulation vectors, or the width of attention and modulation."""
        if (key := next((key for key in shapes if DUAL.search(key)), None)) is not None:
            return MEDIUM_35, f"its second attention: {key}"
        widths: Counter[int] = Counter()
        for key, shape in shapes.items():
            if roles.get(key) == DOWN and len(shape) == 2 and WIDE.search(key):
                widths[shape[1]] += 1
            if roles.get(key) == UP and MODULATION.search(key):
                down = shapes.get(key.replace("lora_up", "lora_down").replace("lora_B", "lora_A"))
                if down and len(shape) == len(down) == 2 and shape[0] == 9 * down[1]:
                    return MEDIUM_35, f"nine modulation vectors: {key} {list(shape)}"
        if not widths:
            return f"{self.title} (unknown size)", "the names of its layers"
        width = widths.most_common(1)[0][0]
        if width in JOINT:
            return None
        note = f"attention of width {width}"
        shared = f"; {MEDIUM_35} has the same width in these layers" if width == 1536 else ""
        return WIDTHS.get(width, f"{self.title} of the unpublished width {width}"), note + shared

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

    def original(self, layer: str) -> tuple[str, Rows | None]:
        if layer in OUTER:
            return OUTER[layer], None
        start, number, inner = layer.split(".", 2)
        if start != "transformer_blocks":
            raise KeyError(layer)
        if inner in FUSED:
            fused, rows = FUSED[inner]
            return f"joint_blocks.{number}.{fused}", rows
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
