"""Stable Diffusion 1.5's and 2's layers in LoRA files. kohya's scripts train diffusers' UNet, so their keys contain
diffusers' names with underscores; files of the original names are rare."""

from __future__ import annotations

import re

from simpletune.models.sd15.config import bundled_configs
from simpletune.models.shared.lora_names import Layout
from simpletune.models.unet.lora_names import UNetNames

SD15, SD2 = "Stable Diffusion 1.5", "Stable Diffusion 2"


class SD15Names(UNetNames):
    """Names of the UNet of Stable Diffusion 1 and 2."""

    title = "Stable Diffusion 1.5 or 2"
    by_text_width = {768: SD15, 1024: SD2}
    architectures = {SD15: ("stable-diffusion-v1", "sd_v1"), SD2: (None, "sd_v2")}
    own = re.compile(
        r"^lora_te_|down_blocks[._]0[._]attentions|(down|up)_blocks[._]3[._]|up_blocks[._]2[._]attentions"
        r"|input_blocks[._][12][._]1[._]|output_blocks[._]([6-9]|1[01])[._]1[._]"
    )


NAMES = SD15Names(bundled_configs()["sd15"]["unet"])
LAYOUTS = (  # the first is the one of a run's result, which every tool loads
    Layout("kohya", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),
    Layout("diffusers", "unet.", NAMES),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("original", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("peft", "base_model.model.", NAMES),
    Layout("bare", "", NAMES),
)
