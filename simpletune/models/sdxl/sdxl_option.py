"""Stable Diffusion XL: the option, and its prediction.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, t = 77 text tokens, e = 2048 text width,
p = 1280 pooled width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.sdxl.sdxl_config import HUB_NAMES, SDXL_NAME
from simpletune.models.sdxl.sdxl_files import LAYOUT, SDXLFiles
from simpletune.models.sdxl.sdxl_lora import LAYOUTS
from simpletune.models.sdxl.sdxl_text import SDXLText
from simpletune.models.shared.architecture import Architecture
from simpletune.models.shared.family_files import FamilyFiles
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.words import DiffusersPipeline, FewSteps, PublicBase, Words, by_card
from simpletune.models.text.family_text import FamilyText
from simpletune.models.unet.unet_family import UNetArchitecture, UNetFamily
from simpletune.models.unet.unet_shapes import single_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning


class SDXLArchitecture(UNetArchitecture):
    """Its attentions have up to ten transformer blocks, each of which is a unit."""

    units_among: ClassVar = staticmethod(single_blocks)


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

    files_class: ClassVar[type[FamilyFiles]] = SDXLFiles
    architecture_class: ClassVar[type[Architecture]] = SDXLArchitecture
    text_class: ClassVar[type[FamilyText[Any]]] = SDXLText
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    words: ClassVar[Words] = Words(
        title=LAYOUT.family,
        pipeline=DiffusersPipeline(
            "StableDiffusionXLPipeline",
            "stable-diffusion-xl",
            "StableDiffusionXLInpaintPipeline",
            reads_embeddings=True,
        ),
        resolution=1024,
        guidance=5.0,
        few_steps=(
            FewSteps(r"(?i)lightning(.*?(?P<steps>[1248])[-_ ]?steps?)?", "SDXL Lightning", 4),
            FewSteps(r"(?i)dmd2", "SDXL with DMD2", 4),
            FewSteps(r"(?i)turbo", "SDXL Turbo", 4),
        ),
        negative_prompt=None,
        published_as=(  # XL ends a word, or begins one in capitals; T5 XXL has another one before it
            r"(?<![xX])((?i:xl)(?![A-Za-z])|(?<![A-Z])XL(?![a-z]))|(?i:sd_?xl|pony|illustrious|noobai)"
        ),
        # its modules/ui.py offers the widths 768, 1024, 320, 640 and 1280
        no_hypernetwork=(
            f"AUTOMATIC1111's web UI, whose format it has, makes them for text of width 768 or 1024, and "
            f"{LAYOUT.family}'s has 2048. Use adapter.method lora with adapter.targets "
            '["attn2.to_k", "attn2.to_v"], which changes the same keys and values'
        ),
        templates=by_card("sdxl_lora_{card}"),
        # CreativeML Open RAIL++-M
        licence=lambda hub_name: {"license": "openrail++"} if hub_name in HUB_NAMES else None,
        bases=(
            PublicBase(
                SDXL_NAME, "SDXL", 2.6, (3.1, 9.6, 0.3), "Open RAIL++-M", "yes", "within the licence's rules of use"
            ),
        ),
    )

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b]: whole numbers from 0 to 999, or by flow 1000 sigma in fp32
        conditioning: Conditioning,  # embeds [b, t, e], pooled [b, p], time_ids [b, 6] in fp32
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict noise, v or velocity at z_t."""
        assert conditioning.pooled is not None
        return model(
            sample=z_t.to(dtype),
            timestep=time,
            encoder_hidden_states=conditioning.embeds.to(dtype),
            added_cond_kwargs={"text_embeds": conditioning.pooled.to(dtype), **conditioning.extra},
            return_dict=False,
        )[0]
