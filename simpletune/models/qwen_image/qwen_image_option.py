"""Qwen-Image: its option, and its prediction.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, n = h w / 4 picture tokens, t text
tokens, e = 3584 text width, m modulations of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.objectives.conventions import FlowConventions
from simpletune.models.qwen_image.qwen_image_architecture import QwenImageArchitecture
from simpletune.models.qwen_image.qwen_image_files import FIRST, HUB_NAMES, NEWEST, PATCH, QwenImageFiles
from simpletune.models.qwen_image.qwen_image_lora import LAYOUTS
from simpletune.models.qwen_image.qwen_image_text import QwenImageText
from simpletune.models.shared.architecture import Architecture
from simpletune.models.shared.autoencoder import Latents
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_files import FamilyFiles, LoraNames
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.words import DiffusersPipeline, PublicBase, Words, by_card
from simpletune.models.text.family_text import FamilyText

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning


class QwenImage(Family):
    """Qwen-Image, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["qwen_image"] = "qwen_image"
    """Qwen-Image (joint transformer blocks with Qwen2.5-VL as text encoder)."""
    pretrained: Annotated[str, Field(min_length=1)] = NEWEST
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
    text_length: Annotated[int, Field(ge=16, le=1024)] = 512
    """The most tokens of a prompt, of which its template takes 5; what is longer is cut at the end."""

    denoiser: ClassVar[str] = "transformer"
    files_class: ClassVar[type[FamilyFiles]] = QwenImageFiles
    architecture_class: ClassVar[type[Architecture]] = QwenImageArchitecture
    text_class: ClassVar[type[FamilyText[Any]]] = QwenImageText
    latents: ClassVar[Latents] = Latents(("AutoencoderKLQwenImage",), 8)
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    flow: ClassVar[FlowConventions] = FlowConventions(time_at_1=1.0, from_one=True)
    words: ClassVar[Words] = Words(
        title="Qwen-Image",
        pipeline=DiffusersPipeline("QwenImagePipeline", "qwen-image", guidance="true_cfg_scale"),
        resolution=1024,
        guidance=4.0,
        negative_prompt=" ",
        steps=50,
        published_as=r"(?i)qwen[-_. ]?image",
        no_hypernetwork=(
            "in Qwen-Image one attention reads prompt and picture together. Use adapter.method lora with "
            'adapter.targets ["attn.add_k_proj", "attn.add_v_proj"], which changes keys and values of the prompt'
        ),
        templates=by_card("qwen_image_lora_{card}"),
        licence=lambda hub_name: {"license": "apache-2.0"} if hub_name in HUB_NAMES else None,
        bases=tuple(
            PublicBase(
                name, title, 20.4, (15.4, 38.1, 0.2), "Apache-2.0", "yes", "without rules of use", measured=False
            )
            for name, title in ((NEWEST, "Qwen-Image 2512"), (FIRST, "Qwen-Image"))
        ),
    )

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: sigma
        conditioning: Conditioning,  # embeds [b, t, e]; with a modulation plan, modulation [b, m]
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict the velocity at z_t."""
        h, w = z_t.shape[2:]
        predicted: Tensor = model(
            hidden_states=tokens_of(z_t.to(dtype)),
            encoder_hidden_states=conditioning.embeds.to(dtype),
            encoder_hidden_states_mask=conditioning.mask,
            timestep=time,
            img_shapes=[[(1, h // PATCH, w // PATCH)]] * len(z_t),
            return_dict=False,
        )[0]
        return latents_of(predicted, h, w)

    def rescale(self, guided: Tensor, positive: Tensor) -> Tensor:
        """Give each token of a prediction with guidance the norm that it has without (diffusers' pipeline)."""
        h, w = guided.shape[2:]
        ours, theirs = tokens_of(guided), tokens_of(positive)
        return latents_of(ours * (theirs.norm(dim=-1, keepdim=True) / ours.norm(dim=-1, keepdim=True)), h, w)


def tokens_of(z: Tensor) -> Tensor:  # [b, c, h, w] -> [b, n, 4 c]
    """Make one token of 2 x 2 places, in the order (channel, row, column)."""
    from torch.nn.functional import pixel_unshuffle

    return pixel_unshuffle(z, PATCH).flatten(2).transpose(1, 2)


def latents_of(tokens: Tensor, h: int, w: int) -> Tensor:  # [b, n, 4 c] -> [b, c, h, w]
    """Invert ``tokens_of``."""
    from torch.nn.functional import pixel_shuffle

    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (h // PATCH, w // PATCH)), PATCH)
