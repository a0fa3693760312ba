"""Stable Diffusion 1.5's and 2's layers in LoRA files. kohya's scripts train diffusers' UNet, so their keys contain
diffusers' names with underscores; files of the original names are rare."""

from __future__ import annotations

import re

from simpletune.models.sd15.sd15_config import bundled_configs
from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_encoders import LoraEncoder, clip_layer
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.unet.unet_lora import CLIP_READERS, UNetNames
from simpletune.system.options import UserError

SD15, SD2 = "Stable Diffusion 1.5", "Stable Diffusion 2"

KOHYA = {"ss_network_module": "networks.lora"}


class SD15Names(UNetNames):
    """Names of the UNet of Stable Diffusion 1 and 2."""

    title = "Stable Diffusion 1.5 or 2"
    by_text_width = {768: SD15, 1024: SD2}
    kohya_blocks = (0, 12, 1, 12, 0)
    encoders = (LoraEncoder("text_encoder", "CLIP-L", "", ("clip_l", "clip_h"), clip_layer, CLIP_READERS),)
    header = {  # A1111 recognises SD 2 by ss_v2; layers and widths do not reveal which of SD 2's architectures it is
        SD15: KOHYA | {"modelspec.architecture": "stable-diffusion-v1/lora", "ss_base_model_version": "sd_v1",
                       "ss_v2": "False"},
        SD2: KOHYA | {"ss_base_model_version": "sd_v2", "ss_v2": "True"},
        "": KOHYA,
    }  # fmt: skip
    own = re.compile(
        r"^lora_te_|down_blocks[._]0[._]attentions|(down|up)_blocks[._]3[._]|up_blocks[._]2[._]attentions"
        r"|input_blocks[._][12][._]1[._]|output_blocks[._]([6-9]|1[01])[._]1[._]"
    )

    def kernel(self, layer: str, model: str) -> tuple[int, ...]:
        projects = model == SD15 and layer.endswith((".proj_in", ".proj_out"))
        return (1, 1) if projects else super().kernel(layer, model)

    def original(self, layer: str) -> tuple[str, Rows | None]:
        """Raise UserError, because diffusers does not know these names, and who does knows kohya's, too."""
        raise UserError(
            f"{layer}: LoRAs for {self.title} do not have the original names. Use --format kohya, which ComfyUI, "
            "A1111, Forge and diffusers load"
        )


NAMES = SD15Names(bundled_configs()["sd15"]["unet"])
LAYOUTS = (  # the first is the one of a run's result, which every tool loads
    Layout("kohya", "lora_unet_", NAMES, dots=False, peft=False, alpha=True),
    Layout("diffusers", "unet.", NAMES),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("original", "lora_unet_", NAMES, original=True, dots=False, peft=False, alpha=True),
    Layout("peft", "base_model.model.", NAMES),
    Layout("lycoris", "lycoris_", NAMES, dots=False, peft=False, alpha=True),  # SimpleTuner's and LyCORIS's own
    Layout("bare", "", NAMES),
)
