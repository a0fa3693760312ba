"""Stable Diffusion XL's layers in LoRA files. kohya's scripts train a UNet with the original names, so their keys
contain those with underscores; OneTrainer's contain diffusers' names."""

from __future__ import annotations

import re

from simpletune.models.sdxl.sdxl_config import bundled_configs
from simpletune.models.shared.lora_encoders import LoraEncoder, clip_layer
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.unet.unet_lora import CLIP_READERS, UNetNames

TITLE = "Stable Diffusion XL"


class SDXLNames(UNetNames):
    """Names of the UNet of Stable Diffusion XL, the only one here with several transformer blocks in an attention."""

    title = TITLE
    by_text_width = {2048: TITLE}
    kohya_blocks = (1, 9, 3, 9, 1)
    encoders = (
        LoraEncoder("text_encoder", "CLIP-L", "1", ("clip_l",), clip_layer, CLIP_READERS),
        LoraEncoder("text_encoder_2", "CLIP-G", "2", ("clip_g",), clip_layer, CLIP_READERS),
    )
    header = {
        TITLE: {
            "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
            "ss_network_module": "networks.lora",
            "ss_base_model_version": "sdxl_base_v1-0",
            "ss_v2": "False",
        }
    }
    own = re.compile(
        r"^lora_te[12]_|^text_encoder_2\.|^lora_unet_(input|output|middle)_block|add_embedding|label_emb"
        r"|transformer_blocks[._][1-9]\d?[._]|up_blocks[._]0[._]attentions"
        r"|output_blocks[._][0-2][._]1[._](transformer|proj)"
    )


NAMES = SDXLNames(bundled_configs()["sdxl"]["unet"])
LAYOUTS = (  # the first is the one of a run's result; the second suits a UNet whose blocks have other numbers, too
    Layout("kohya", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("onetrainer", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),
    Layout("diffusers", "unet.", NAMES),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("peft", "base_model.model.", NAMES),
    Layout("lycoris", "lycoris_", NAMES, dots=False, peft=False, alpha=True),  # SimpleTuner's and LyCORIS's own
    Layout("bare", "", NAMES),
)
