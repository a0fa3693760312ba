"""Qwen-Image's layers in LoRA files, how other tools read them, and the named targets of ``adapter.targets``.

The original names are diffusers', so there is one set of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from simpletune.models.qwen_image.qwen_image_files import BLOCKS
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

WIDTH, TEXT = 3072, 3584  # of the published model, and of the text that it reads
# anchored at the start, because other families' names end in the same words
_BLOCK = rf"^{BLOCKS}\.\d+\."
_IMAGE, _PROMPT = r"attn\.(to_[qkv]|to_out\.0)", r"attn\.(add_[qkv]_proj|to_add_out)"
IN_BLOCK = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj",
                                  "to_add_out")),
    *(f"{stream}_{name}" for stream in ("img", "txt") for name in ("mod.1", "mlp.net.0.proj", "mlp.net.2")),
)  # fmt: skip
OUTSIDE = (
    "img_in", "txt_in", "proj_out", "norm_out.linear",
    *(f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)),
)  # fmt: skip
OWN = re.compile(rf"(img|txt)_(mlp[._]net[._]|mod[._]1)|{BLOCKS}[._](3[89]|[45]\d)[._]attn[._](to_|add_)")
"""Occurs only in the names of Qwen-Image's layers: other models with layers of the other names have at most 38 blocks
(SD3.5 Large; Flux.1 has 19)."""
WIDE = re.compile(r"[._](attn[._]|(img|txt)_(mlp[._]net[._]0|mod))")
"""Layers that read the model's width."""

NO_ALPHA = Note("rejects alpha tensors under these names: export to diffusers")
NOT_READ = Note("no key starts with transformer.: convert it first")
NO_OFT = Note("reads no OFT: merge it into its base instead")
OWN_NAMES = Note("reads DoRA under its own names alone: export to diffusers")
WRONG = Note("drops dora_scale, and is wrong without it", Fact.DORA)
READ = ("kohya", "comfy")  # what diffusers converts, besides its own
UNREAD = ("peft", "onetrainer", "lycoris")
VERDICTS = (  # of diffusers by runs of 0.42.1; of ComfyUI by its source
    Verdict((FORGE,), "refuses", (Note("has no Qwen-Image"),)),
    Verdict((DIFFUSERS,), "refuses", (NO_ALPHA,), layouts=("diffusers", *UNREAD), facts=(Fact.ALPHA,)),
    Verdict((DIFFUSERS,), "silently nothing", (NO_OFT,), layouts=("onetrainer",), facts=(Fact.OFT,)),
    Verdict((DIFFUSERS,), "silently nothing", (NOT_READ,), layouts=("onetrainer",), facts=(Fact.LOKR,)),
    FORMS[0],
    Verdict((DIFFUSERS,), "yes", layouts=("diffusers",), facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "refuses", (OWN_NAMES,), layouts=READ, facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "refuses", (OWN_NAMES,), layouts=("bare",),
            facts=(Fact.DORA, Fact.ALL_MAGNITUDES, Fact.ALPHA)),
    Verdict((DIFFUSERS,), "yes", (WRONG,), layouts=("diffusers", *READ), facts=(Fact.DORA,)),
    Verdict((DIFFUSERS,), "yes", (WRONG,), layouts=("bare",), facts=(Fact.DORA, Fact.ALPHA)),
    Verdict((DIFFUSERS,), "silently nothing", (NOT_READ,), layouts=("bare", *UNREAD), facts=(Fact.DORA,)),
    Verdict((COMFYUI,), "partly", (UNTESTED, Note("mixes layouts")), layouts=(None,)),
    Verdict((COMFYUI,), "silently nothing", (UNTESTED, Note("its source names none of these: export to diffusers")),
            layouts=("peft", "onetrainer")),
    *(row for row in DEPENDENT if row.tools != (FORGE,)),
    ONLY_LORA,
    Verdict((DIFFUSERS,), "refuses", (Note("{}", Fact.UNMATCHED),), layouts=("kohya",), facts=(Fact.UNMATCHED,)),
    Verdict((DIFFUSERS,), "yes",
            (Note("scales by alpha / rank from the header's settings: {}", Fact.SETTINGS), UNMATCHED),
            layouts=("diffusers", "comfy")),
    Verdict((DIFFUSERS,), "yes", (UNMATCHED,), layouts=("kohya",)),
    Verdict((DIFFUSERS,), "yes", (UNMATCHED,), layouts=("bare",), facts=(Fact.ALPHA,)),
    Verdict((DIFFUSERS,), "silently nothing", (NOT_READ,)),
    Verdict((COMFYUI,), "yes",
            (UNTESTED,
             Note("applies it at scale 1 instead of {}, because it ignores alpha in the header", Fact.IGNORED),
             UNMATCHED)),
)  # fmt: skip


class QwenImageNames(LoraNames):
    """Names of Qwen-Image's transformer."""

    title = "Qwen-Image"
    denoiser = "transformer"
    short = {"blocks": BLOCKS}
    header = {
        "": {
            "modelspec.architecture": "Qwen-Image/lora",
            "ss_network_module": "networks.lora_qwen_image",
            "ss_base_model_version": "qwen_image",
        }
    }
    verdicts = VERDICTS
    targets = {
        "attention": re.compile(rf"{_BLOCK}({_IMAGE}|{_PROMPT})$"),
        "attention_image": re.compile(rf"{_BLOCK}{_IMAGE}$"),
        "attention_mlp": re.compile(rf"{_BLOCK}({_IMAGE}|{_PROMPT}|(img|txt)_mlp\.net\.(0\.proj|2))$"),
        "all_linear": re.compile(_BLOCK),
    }
    usual_targets = "attention_image"

    def shows(self, name: str, inputs: int) -> int:
        """Tell by ``OWN``, or by the width of layers whose names other models have, too."""
        return 2 if OWN.search(name) else int(bool(WIDE.search(name)) and inputs == WIDTH)

    def published(self, shapes: Mapping[str, Shape], roles: Mapping[str, str]) -> tuple[str, str] | None:
        """Tell the model by its width."""
        down = {key: shapes[key][1] for key, role in roles.items() if role == DOWN and shapes[key][1:]}
        key, width = next(((key, width) for key, width in down.items() if WIDE.search(key)), (None, WIDTH))
        title = self.title if width == WIDTH else f"{self.title} of the unpublished width {width}"
        return title, f"its width, {width}: {key}" if key else "the names of its layers"

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        for layer in OUTSIDE:
            if module == layout.spelt(layer):
                return (layer,)
        found = re.fullmatch(rf"{BLOCKS}[._](\d+)[._](.+)", module)
        if found is None:
            return ()
        return tuple(f"{BLOCKS}.{found[1]}.{name}" for name in IN_BLOCK if layout.spelt(name) == found[2])

    def original(self, layer: str) -> tuple[str, Rows | None]:
        if layer not in OUTSIDE and layer.split(".", 2)[2:] not in [[name] for name in IN_BLOCK]:
            raise KeyError(layer)
        return layer, None


NAMES = QwenImageNames()
LAYOUTS = (  # the first is the one of a run's result, and right in every tool
    Layout("diffusers", "transformer.", NAMES),
    Layout("kohya", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),  # of musubi-tuner
    Layout("comfy", "diffusion_model.", NAMES),  # of ai-toolkit and diffusion-pipe
    Layout("peft", "base_model.model.", NAMES),
    Layout("onetrainer", "lora_transformer_", NAMES, dots=False, peft=False, alpha=True),
    Layout("lycoris", "lycoris_", NAMES, dots=False, peft=False, alpha=True),
    Layout("bare", "", NAMES),
)
