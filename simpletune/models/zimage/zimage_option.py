"""Z-Image: its option, and its prediction.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, t text tokens with their padding to a
multiple of 32, e = 2560 text width, m modulations of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.objectives.conventions import FlowConventions
from simpletune.models.shared.architecture import Architecture
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, Latents
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_files import FamilyFiles, LoraNames
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.words import DiffusersPipeline, FewSteps, PublicBase, Words, by_card
from simpletune.models.text.family_text import FamilyText
from simpletune.models.zimage.zimage_architecture import ZImageArchitecture
from simpletune.models.zimage.zimage_files import BASE, HUB_NAMES, IS_TURBO, TURBO, ZImageFiles
from simpletune.models.zimage.zimage_lora import LAYOUTS
from simpletune.models.zimage.zimage_text import TOKENS, ZImageText

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning

ASSISTANT = "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"
"""A LoRA that Turbo is trained under; the same repository has an older one."""


class ZImage(Family):
    """Z-Image, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["zimage"] = "zimage"
    """Z-Image (one sequence of picture and text, with Qwen3 as text encoder)."""
    pretrained: Annotated[str, Field(min_length=1)] = BASE
    """A Hub name (owner/name), a folder in diffusers' layout, or a single .safetensors file, which has the transformer
    alone."""
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
    """Folder or Hub name of a pipeline with tokenizer and text encoder; of a single file's autoencoder, too."""
    text_length: Annotated[int, Field(ge=32, le=1024)] = 512
    """The most tokens of a prompt, of which its template takes 8; what is longer is cut at the end."""
    turbo: bool | None = None
    """Whether the weights are Turbo's, which draw in 8 steps without guidance, and lose that by ordinary training:
    train them under an assistant (model.loras, training:). null: their name says it, since nothing in a file does."""

    denoiser: ClassVar[str] = "transformer"
    files_class: ClassVar[type[FamilyFiles]] = ZImageFiles
    architecture_class: ClassVar[type[Architecture]] = ZImageArchitecture
    text_class: ClassVar[type[FamilyText[Any]]] = ZImageText
    latents: ClassVar[Latents] = STABLE_DIFFUSION
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    flow: ClassVar[FlowConventions] = FlowConventions(time_at_0=1.0, time_at_1=0.0, sign=-1, from_one=True)
    words: ClassVar[Words] = Words(
        title="Z-Image",
        pipeline=DiffusersPipeline("ZImagePipeline", "z-image", guidance_offset=-1.0),
        resolution=1024,
        guidance=5.0,
        steps=50,
        few_steps=(FewSteps(IS_TURBO, "Z-Image-Turbo", 8, assistant=ASSISTANT),),
        published_as=r"(?i)z[-_. ]?image",
        no_hypernetwork=(
            "in Z-Image one attention reads prompt and picture together, by the same layers. Use adapter.method lora"
        ),
        templates=by_card("zimage_lora_{card}"),
        licence=lambda hub_name: {"license": "apache-2.0"} if hub_name in HUB_NAMES else None,
        bases=tuple(
            PublicBase(
                name,
                title,
                6.2,
                (7.5, 11.5, 0.2),
                "Apache-2.0",
                "yes",
                "without rules of use",
                measured=False,
            )
            for name, title in ((BASE, "Z-Image"), (TURBO, "Z-Image-Turbo, in 8 steps"))
        ),
    )

    @property
    def few_steps(self) -> FewSteps | None:
        return self.words.few_steps_of(self.files.weights_from, self.turbo)

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: 1 - sigma
        conditioning: Conditioning,  # embeds [b, t, e]; with a modulation plan, modulation [b, m]
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict z_0 - noise at z_t."""
        text = conditioning
        found: Tensor = model(z_t.to(dtype), time, text.embeds.to(dtype), text.extra[TOKENS], text.mask)
        return found
