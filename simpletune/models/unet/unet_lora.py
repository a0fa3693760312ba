"""The layers of a U-Net in LoRA files, and the named targets of ``adapter.targets``.

Keys contain diffusers' names, or the original ones, which number steps rather than levels (``unet.files``). A level has
as many steps as its model has layers, so they are those of the family's published models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_layout import Layout, LoraNames
from simpletune.models.shared.lora_verdicts import (
    COMFYUI,
    DEPENDENT,
    DIFFUSERS,
    FORGE,
    FORMS,
    MERGE,
    ONLY_LORA,
    UNMATCHED,
    UNTESTED,
    Fact,
    Note,
    Verdict,
)
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.unet.unet_config import INPUT
from simpletune.models.unet.unet_files import original_modules, origins

ATTENTION = tuple(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))
IN_TRANSFORMER = {name.replace(".", "_"): name for name in (*ATTENTION, "ff.net.0.proj", "ff.net.2")}
LEAVES = {
    "attentions": ("proj_in", "proj_out"),
    "resnets": ("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
    "downsamplers": ("conv",),
    "upsamplers": ("conv",),
}
OUTER = {name.replace(".", "_"): name for name in ("conv_in", "conv_out")}
OUTER |= {f"{part}_embedding_linear_{n}": f"{part}_embedding.linear_{n}" for part in ("time", "add") for n in (1, 2)}
PLACE = re.compile(
    r"(?:(down|up)_blocks_(\d+)_(attentions|resnets|downsamplers|upsamplers)|mid_block_(attentions|resnets))_(\d+)_(.+)"
)
READS_TEXT = re.compile(r"attn2[._](processor[._])?to_[kv](_lora)?($|[._])")
CLIP_READERS = {
    DIFFUSERS: ("kohya", "diffusers"), COMFYUI: ("kohya", "diffusers", "comfy"), FORGE: ("kohya", "diffusers")
}  # fmt: skip
PROJECTIONS = r"^(?!.*\.processor\.).*\.to_"
"""Modules under diffusers' names that ComfyUI and Forge know only as those of a processor."""
DROPPED = Note("drops {}: export to kohya", Fact.DROPPED, partly=True)

VERDICTS = (
    *FORMS,
    Verdict((FORGE,), "silently nothing", (Note(f"knows no names with lycoris_: {MERGE}"),), layouts=("lycoris",),
            facts=(Fact.OF_WEIGHT,)),
    Verdict((FORGE,), "silently nothing", (Note("knows no names with lycoris_: export to lycoris, which has others"),),
            layouts=("lycoris",), facts=(Fact.OTHER_KINDS,)),
    Verdict((FORGE,), "silently nothing", (Note("knows no names with lycoris_: export to kohya"),),
            layouts=("lycoris",)),
    Verdict((COMFYUI, FORGE), "silently nothing", (Note("drops all of these names: export to kohya"),),
            layouts=("peft",), facts=(Fact.OF_WEIGHT,), drops=""),
    Verdict((COMFYUI, FORGE), "partly", (Note("drops the projections under these names: export to kohya"),),
            layouts=("diffusers",), facts=(Fact.OF_WEIGHT,), drops=PROJECTIONS),
    *DEPENDENT,
    ONLY_LORA,
    Verdict((DIFFUSERS,), "refuses", (Note("reads no lora_mid (Tucker form): export to kohya, without it"),),
            facts=(Fact.TUCKER,)),
    Verdict((DIFFUSERS,), "refuses", (Note("original names with lora_unet_ name no module: export to kohya"),),
            layouts=("original",)),
    Verdict((DIFFUSERS,), "yes",
            (Note("modules have different alphas: the most common one is applied to all attention layers",
                  Fact.ALPHAS), UNMATCHED),
            layouts=("kohya", "onetrainer")),
    Verdict((DIFFUSERS,), "refuses", (Note("rejects alpha tensors outside kohya's layout: export to kohya"),),
            facts=(Fact.ALPHA,)),
    Verdict((DIFFUSERS,), "yes", (UNMATCHED,), layouts=("diffusers",)),
    Verdict((DIFFUSERS,), "silently nothing", (Note("no key starts with unet. or lora_unet_: export to kohya"),)),
    # Forge uses ComfyUI's names for a U-Net's layers
    *(row for tool, notes in ((COMFYUI, ()), (FORGE, (UNTESTED,))) for row in (
        Verdict((tool,), "yes", (*notes, DROPPED, UNMATCHED), layouts=("peft",), drops=""),
        Verdict((tool,), "yes", (*notes, DROPPED, UNMATCHED), layouts=("diffusers", "bare"), drops=PROJECTIONS),
        Verdict((tool,), "partly", (*notes, UNMATCHED), layouts=(None,)),
        Verdict((tool,), "yes", (*notes, UNMATCHED)),
    )),
)  # fmt: skip
_BLOCK = r"\.attentions\.\d+\.transformer_blocks\.\d+\."


class UNetNames(LoraNames):
    """Names of ``UNet2DConditionModel``, by a configuration of the family's published models."""

    denoiser = "unet"
    short = {"down": "down_blocks", "mid": "mid_block", "up": "up_blocks"}
    targets = {
        "attention": re.compile(rf"{_BLOCK}attn[12]\.(to_[qkv]|to_out\.0)$"),
        "attention_qv": re.compile(rf"{_BLOCK}attn[12]\.to_[qv]$"),
        "attention_mlp": re.compile(rf"{_BLOCK}(attn[12]\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2))$"),
        "all_linear": re.compile(r"^((down|up)_blocks\.\d+|mid_block)\.attentions\."),
    }
    convolutions = re.compile(r"(^|\.)(conv[12]?|conv_in|conv_out)$")
    # kohya's networks.lora takes the linear layers and 1x1 convolutions of these modules, too, at the rank of others
    residual = re.compile(r"^((down|up)_blocks\.\d+|mid_block)\.(resnets|downsamplers|upsamplers)\.")
    contexts = re.compile(rf"{_BLOCK}attn(?:(?P<picture>1)|2)\.to_[kv]$")
    input = INPUT.removesuffix(".weight")
    one_alpha = True
    verdicts = VERDICTS
    own: ClassVar[re.Pattern[str]]
    """Occurs only in names that no other family with a UNet has: layers, modules in files, and text encoders' keys."""

    def __init__(self, config: ModelConfig):
        self.config = config

    def shows(self, name: str, inputs: int) -> int:
        """Tell by the width of the text that an attention reads, which is certain, or by ``own``."""
        if READS_TEXT.search(name) and inputs in self.by_text_width:
            return 2
        return 1 if self.own.search(name) else 0

    def kernel(self, layer: str, model: str) -> tuple[int, ...]:
        if self.convolutions.search(layer):
            return (3, 3)
        return (1, 1) if layer.endswith(".conv_shortcut") else ()

    def suits(self, config: ModelConfig) -> bool:
        known = original_modules(self.config)
        return all(known.get(unit) == name for unit, name in original_modules(config).items())

    @cached_property
    def originals(self) -> Mapping[str, str]:
        """The original name of each layer, by diffusers' name."""
        weights = ((name.removesuffix(".weight"), origin) for name, origin in origins(self.config).items())
        known = {layer: origin.name.removesuffix(".weight") for layer, origin in weights}
        return {layer: name for layer, name in known.items() if _layer(layer.replace(".", "_"))}

    @cached_property
    def _from_original(self) -> Mapping[str, str]:
        return {name.replace(".", "_"): layer for layer, name in self.originals.items()}

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        """Return what ``LoraNames`` does; also recognise the attention processors of old diffusers."""
        if layout.dots:
            module = re.sub(r"\.processor\.(to_[qkv])$", r".\1", module)
            module = re.sub(r"(\.processor)?\.to_out$", ".to_out.0", module)
        flat = module.replace(".", "_")
        layer = self._from_original.get(flat) if layout.original else _layer(flat)
        return (layer,) if layer and (layout.original or layout.spelt(layer) == module) else ()

    def original(self, layer: str) -> tuple[str, Rows | None]:
        return self.originals[layer], None

    def block_numbers(self, config: ModelConfig) -> dict[str, int]:
        """Return the numbers of the original layout, those on the way up after the middle, which is one block or as
        many as it has modules."""
        assert self.kohya_blocks is not None, "every family with a UNet states them"
        before, down, middle, _, _ = self.kohya_blocks
        first = {"input_blocks": before, "middle_block": before + down, "output_blocks": before + down + middle}
        found = {}
        for name, original in original_modules(config).items():
            way, number = original.split(".")[:2]
            if ".attentions." in name:
                found[name] = first[way] + (0 if way == "middle_block" and middle == 1 else int(number))
        return found


def _layer(flat: str) -> str | None:
    """Return diffusers' name of a layer from its name with underscores for dots; None if there is no such layer."""
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
