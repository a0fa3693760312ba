"""Stable Diffusion 3: its option, and its prediction.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, t text tokens (77 + T5's), e = 4096 text
width, p = 2048 pooled width (for SD3 Medium; the configs give other sizes), m modulations of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.sd3.sd3_architecture import SD3Architecture
from simpletune.models.sd3.sd3_files import SD3_MEDIUM, SD3Files
from simpletune.models.sd3.sd3_lora import LAYOUTS
from simpletune.models.sd3.sd3_text import SD3Text
from simpletune.models.shared.architecture import Architecture
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, Latents
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_files import FamilyFiles, LoraNames
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.words import DiffusersPipeline, FewSteps, Licence, PublicBase, Words, by_card
from simpletune.models.text.family_text import FamilyText

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning

STABILITY_LICENCE = "stabilityai-ai-community"
MEDIUM_LICENCE = "https://huggingface.co/stabilityai/stable-diffusion-3-medium/blob/main/LICENSE.md"
# Stability AI Community License Agreement, 5 July 2024, section II.2
COMMUNITY: tuple[str, Literal["limit"], str] = (
    "Stability AI Community",
    "limit",
    "free below 1 million USD of revenue a year",
)
BASES = (
    PublicBase(SD3_MEDIUM, "SD3 Medium", 2.0, (10.3, 3.8, 0.2), *COMMUNITY, gated=True),
    PublicBase(
        "stabilityai/stable-diffusion-3.5-medium", "SD3.5 Medium", 2.2, (10.3, 4.2, 0.2), *COMMUNITY, gated=True,
        templates=by_card("sd35_medium_lora_{card}"),
    ),
    PublicBase(
        "stabilityai/stable-diffusion-3.5-large", "SD3.5 Large", 8.1, (10.3, 15.0, 0.2), *COMMUNITY, gated=True,
        templates=by_card("sd35_large_lora_{card}"),
    ),
)  # fmt: skip


def licence_of(hub_name: str) -> Licence | None:
    """Return Stability AI's community licence."""
    if not hub_name.startswith("stabilityai/stable-diffusion-3"):
        return None
    link = MEDIUM_LICENCE if hub_name == SD3_MEDIUM else f"https://huggingface.co/{hub_name}/blob/main/LICENSE.md"
    return {"license": "other", "license_name": STABILITY_LICENCE, "license_link": link}


class SD3(Family):
    """Stable Diffusion 3 Medium, 3.5 Medium and Large, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["sd3"] = "sd3"
    """Stable Diffusion 3 (MMDiT)."""
    pretrained: Annotated[str, Field(min_length=1)] = SD3_MEDIUM
    """A Hub name (owner/name), a folder in diffusers' layout, a single .safetensors file, or demo:tiny-sd3."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start from the pretrained transformer, or from random weights (training from scratch; reads only its config)."""
    loras: LoraNames = []
    """LoRAs to train on top of, merged into the transformer before it is quantised: each a file in any layout, a run,
    RUN@STEP or a hub name (owner/name, or owner/name/FILE), with a strength as in style.safetensors:0.8. Same weights
    as those of simpletune lora merge; the result holds only what is trained. Takes no device memory. One that begins
    with training: is used only while training, such as the assistant of a model that draws in few steps: pictures are
    drawn without it."""
    transformer: str | None = None
    """Replaces the transformer: its folder or single file, or the folder or Hub name of a pipeline."""
    vae: str | None = None
    """Replaces the autoencoder: its folder, or the folder or Hub name of a pipeline."""
    text_encoders: str | None = None
    """Folder or Hub name of a pipeline with tokenizers and text encoders; a single file's own encoders take
    precedence."""
    t5: bool = True
    """Use the T5 text encoder. Without it, zeros replace its embeddings, which saves a download of 8.9 GiB."""
    t5_length: Annotated[int, Field(ge=1, le=512)] = 256
    """Length of the T5 prompt in tokens; 77 to 256 are common."""
    t5_cached: Literal["plain", "int8"] = "plain"
    """Type of T5's embeddings in the cache. plain: that of the encoders, 2.0 MiB for 256 tokens; int8: a byte a number
    and a scale for each 64 of them, 1.06 MiB. int8 changes the embeddings by 0.6% or more, in training and in drawing
    (docs/how-to/large-data-sets.md)."""

    denoiser: ClassVar[str] = "transformer"
    files_class: ClassVar[type[FamilyFiles]] = SD3Files
    architecture_class: ClassVar[type[Architecture]] = SD3Architecture
    text_class: ClassVar[type[FamilyText[Any]]] = SD3Text
    latents: ClassVar[Latents] = STABLE_DIFFUSION
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    words: ClassVar[Words] = Words(
        title="SD3",
        pipeline=DiffusersPipeline("StableDiffusion3Pipeline", "stable-diffusion-3"),
        resolution=1024,
        guidance=4.5,
        few_steps=(FewSteps(r"(?i)turbo", "SD3.5 Large Turbo", 4),),
        published_as=r"(?i)(sd|stable.?diffusion)[-_ .]?v?3",
        no_hypernetwork=(
            "in SD3 one attention reads prompt and picture together. Use adapter.method lora with "
            'adapter.targets ["attn.add_k_proj", "attn.add_v_proj"], which changes the same keys and values'
        ),
        templates={
            "subject": "sd3_medium_dreambooth_lora",
            "style": "sd3_medium_lora_8gb",
            "general": "sd3_medium_lora_8gb",
        },
        licence=licence_of,
        bases=BASES,
    )

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: 1000 sigma
        conditioning: Conditioning,  # embeds [b, t, e], pooled [b, p] or modulation [b, m]
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict the velocity at z_t."""
        pooled = conditioning.pooled  # None under a modulation plan, where nothing reads it
        return model(
            hidden_states=z_t.to(dtype),
            timestep=time,
            encoder_hidden_states=conditioning.embeds.to(dtype),
            pooled_projections=None if pooled is None else pooled.to(dtype),
            return_dict=False,
        )[0]
