"""Stable Diffusion XL: the option, facts about its shapes and parts, and its prediction.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, t = 77 text tokens, e = 2048 text width,
p = 1280 pooled width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.sdxl import config
from simpletune.models.sdxl.config import HUB_NAMES, SDXL_NAME
from simpletune.models.sdxl.files import LAYOUT
from simpletune.models.sdxl.lora_names import LAYOUTS
from simpletune.models.sdxl.text import SDXLText
from simpletune.models.shared.family_facts import DiffusersNames, Licence
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.single_file import FileLayout
from simpletune.models.text.family_text import FamilyText
from simpletune.models.unet.family import UNetFamily
from simpletune.models.unet.shapes import single_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning


class SDXL(UNetFamily):
    """Stable Diffusion XL base 1.0 and models made from it, from a folder in diffusers' layout, a single file or the
    Hub."""

    family: Literal["sdxl"] = "sdxl"
    """Stable Diffusion XL (UNet with two text encoders, which is also told the sizes of pictures)."""
    pretrained: Annotated[str, Field(min_length=1)] = SDXL_NAME
    """A Hub name (owner/name), a folder in diffusers' layout, a single .safetensors file, or demo:tiny-sdxl."""
    text_encoders: str | None = None
    """Folder or Hub name of a pipeline with tokenizers for a single file, and with text encoders if the file has none.
    Its scheduler says what a file without marks predicts."""

    title: ClassVar[str] = LAYOUT.family
    layout: ClassVar[FileLayout] = LAYOUT
    scheduler_tells: ClassVar[bool] = True
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    resolution: ClassVar[int] = 1024
    guidance: ClassVar[float] = 5.0
    negative_prompt: ClassVar[str | None] = None
    templates: ClassVar[Mapping[str, str]] = {
        "subject": "sdxl_lora_{card}", "style": "sdxl_lora_{card}", "general": "sdxl_lora_{card}",
    }  # fmt: skip
    text_side: ClassVar[type[FamilyText[Any]]] = SDXLText
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES
    published_as: ClassVar[str] = (  # XL ends a word, or begins one in capitals; T5 XXL has another one before it
        r"(?<![xX])((?i:xl)(?![A-Za-z])|(?<![A-Z])XL(?![a-z]))|(?i:sd_?xl|pony|illustrious|noobai)"
    )
    # its modules/ui.py offers the widths 768, 1024, 320, 640 and 1280
    no_hypernetwork: ClassVar[str | None] = (
        f"AUTOMATIC1111's web UI, whose format it has, makes them for text of width 768 or 1024, and {LAYOUT.family}'s "
        "has 2048. Use adapter.method lora with adapter.targets "
        '["attn2.to_k", "attn2.to_v"], which changes the same keys and values'
    )
    diffusers: ClassVar[DiffusersNames] = DiffusersNames(
        "UNet2DConditionModel", "StableDiffusionXLPipeline", "stable-diffusion-xl", "StableDiffusionXLInpaintPipeline"
    )

    bundled_configs: ClassVar = staticmethod(config.bundled_configs)
    units_among: ClassVar = staticmethod(single_blocks)
    require_supported: ClassVar = staticmethod(config.require_supported)

    def file_version(self) -> str:
        return "sdxl"

    def licence_of(self, hub_name: str) -> Licence | None:
        """CreativeML Open RAIL++-M."""
        return {"license": "openrail++"} if hub_name in HUB_NAMES else None

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: whole numbers from 0 to 999
        conditioning: Conditioning,  # embeds [b, t, e], pooled [b, p], time_ids [b, 6] in fp32
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict noise or v at z_t."""
        assert conditioning.pooled is not None
        return model(
            sample=z_t.to(dtype),
            timestep=time,
            encoder_hidden_states=conditioning.embeds.to(dtype),
            added_cond_kwargs={"text_embeds": conditioning.pooled.to(dtype), **conditioning.extra},
            return_dict=False,
        )[0]
