"""Stable Diffusion XL: the option, facts about its shapes and parts, and its prediction.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, t = 77 text tokens, e = 2048 text width,
p = 1280 pooled width, to which ``framed`` appends six numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.models.sdxl import config
from simpletune.models.sdxl.config import HUB_NAMES, SDXL_NAME
from simpletune.models.sdxl.files import LAYOUT
from simpletune.models.sdxl.lora_names import LAYOUTS
from simpletune.models.shared.buckets import Framing
from simpletune.models.shared.family_facts import DiffusersNames, Licence, TextRegion
from simpletune.models.shared.lora_names import Layout
from simpletune.models.shared.parts import TextEncoder
from simpletune.models.shared.single_file import FileLayout
from simpletune.models.shared.sources import pipeline_index
from simpletune.models.unet.family import UNetFamily
from simpletune.models.unet.shapes import single_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.sdxl.text import SDXLPrompts

NUMBERS = 6
"""The numbers of a framing: height and width before scaling, top and left of the crop, height and width after it."""


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
    clip: ClassVar[Sequence[TextEncoder]] = (
        TextEncoder("clip_l", "tokenizer", "text_encoder", "CLIP-L", penultimate=True),
        TextEncoder("clip_g", "tokenizer_2", "text_encoder_2", "CLIP-G", projected=True, penultimate=True),
    )
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
    reads_framing: ClassVar[bool] = True
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

    @property
    def pooled_width(self) -> int:
        """p, without the six numbers."""
        known = self.known_config()
        return int(known["projection_class_embeddings_input_dim"]) - NUMBERS * int(known["addition_time_embed_dim"])

    def steered_from(self, negative_prompt: str | None) -> str | None:
        """As diffusers' pipeline, which takes zeros for none unless its ``model_index.json`` says no. Without one, as
        for a single file, it takes them, too."""
        if negative_prompt is None and pipeline_index(self).get("force_zeros_for_empty_prompt", True):
            return None
        return super().steered_from(negative_prompt)

    def describe_text(self) -> str:
        return "CLIP-L and CLIP-G"

    def text_regions(self) -> dict[str, TextRegion]:
        """CLIP-L and CLIP-G side by side."""
        first = self.text_width - self.pooled_width
        return {
            "clip_l": TextRegion("text_encoder", first),
            "clip_g": TextRegion("text_encoder_2", self.pooled_width, first, (0, self.pooled_width)),
        }

    def prompts(self, dtype: torch.dtype) -> SDXLPrompts:
        from simpletune.models.sdxl.text import SDXLPrompts

        return SDXLPrompts(self.part, self.encoders(), dtype)

    def framed(self, pooled: Tensor, framings: Sequence[Framing]) -> Tensor:
        """Pooled prompts [b, p + 6] in fp32, because bf16 lacks some of the sizes."""
        import torch

        numbers = [[size for pair in framing for size in reversed(pair)] for framing in framings]
        return torch.cat([pooled.float(), torch.tensor(numbers, dtype=torch.float32)], dim=-1)

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: whole numbers from 0 to 999
        prompt_embeds: Tensor,  # [b, t, e]
        pooled: Tensor,  # [b, p + 6], fp32
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict noise or v at z_t."""
        text, numbers = pooled[:, :-NUMBERS].to(dtype), pooled[:, -NUMBERS:]
        return model(
            sample=z_t.to(dtype), timestep=time, encoder_hidden_states=prompt_embeds.to(dtype),
            added_cond_kwargs={"text_embeds": text, "time_ids": numbers}, return_dict=False,
        )[0]  # fmt: skip
