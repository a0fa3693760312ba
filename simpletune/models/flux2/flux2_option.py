"""FLUX.2 klein: its option, and its prediction.

Shapes: b samples, c = 128 latent channels, h and w a sixteenth of the picture's, t = 512 text tokens, e = 7680 text
width (for klein 4B), m modulations of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.flux2.flux2_architecture import KleinArchitecture
from simpletune.models.flux2.flux2_files import HUB_NAMES, KLEIN, KleinFiles
from simpletune.models.flux2.flux2_lora import LAYOUTS
from simpletune.models.flux2.flux2_text import KleinText
from simpletune.models.objectives.conventions import FlowConventions, empirical_mu
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


class Klein(Family):
    """FLUX.2 klein base 4B, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["klein"] = "klein"
    """FLUX.2 klein 4B (joint and parallel transformer blocks with Qwen3 as text encoder)."""
    pretrained: Annotated[str, Field(min_length=1)] = KLEIN
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
    text_length: Annotated[int, Field(ge=16, le=512)] = 512
    """Length of every prompt in tokens, with the padding after it, which the model reads too. The published model
    knows 512 alone; fewer are for models that were trained so."""
    distilled: bool = False
    """Train the distilled model all the same, which draws in 4 steps without guidance and loses that by training. It
    reads LoRAs of the base model, too."""

    denoiser: ClassVar[str] = "transformer"
    files_class: ClassVar[type[FamilyFiles]] = KleinFiles
    architecture_class: ClassVar[type[Architecture]] = KleinArchitecture
    text_class: ClassVar[type[FamilyText[Any]]] = KleinText
    latents: ClassVar[Latents] = Latents(("AutoencoderKLFlux2",), 16)
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    flow: ClassVar[FlowConventions] = FlowConventions(time_at_1=1.0, mu=empirical_mu, from_one=True)
    words: ClassVar[Words] = Words(
        title="FLUX.2 klein",
        pipeline=DiffusersPipeline("Flux2KleinPipeline", "flux2-klein", negative_prompt=False),
        resolution=1024,
        guidance=4.0,
        steps=50,
        edits=True,
        published_as=r"(?i)flux[-_. ]?2|klein[-_. ]?(base[-_. ]?)?[49]b",  # those that are refused, too
        no_hypernetwork=(
            "in FLUX.2 one attention reads prompt and picture together. Use adapter.method lora with adapter.targets "
            '["attn.add_k_proj", "attn.add_v_proj"], which changes keys and values of the prompt in its joint blocks'
        ),
        templates=by_card("klein_lora_{card}"),
        licence=lambda hub_name: {"license": "apache-2.0"} if hub_name in HUB_NAMES else None,
        bases=(
            PublicBase(
                KLEIN,
                "FLUX.2 klein base 4B",
                3.9,
                (7.5, 7.2, 0.2),
                "Apache-2.0",
                "yes",
                "without rules of use",
                measured=False,
            ),
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
        import torch

        h, w = z_t.shape[2:]
        embeds = conditioning.embeds.to(dtype)

        def places(rows: int, columns: int, tokens: int) -> Tensor:  # [rows columns tokens, 4]: 0, row, column, token
            return torch.cartesian_prod(*(torch.arange(n, device=z_t.device) for n in (1, rows, columns, tokens)))

        predicted = model(
            hidden_states=z_t.to(dtype).flatten(2).transpose(1, 2),
            encoder_hidden_states=embeds,
            timestep=time,
            img_ids=places(h, w, 1),
            txt_ids=places(1, 1, embeds.shape[1]),
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2).unflatten(2, (h, w))
