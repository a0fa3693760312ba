"""Stable Diffusion 3: its option, facts about its shapes and parts, and its prediction.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, t text tokens (77 + T5's), e = 4096 text
width, p = 2048 pooled width (for SD3 Medium; the configs give other sizes), m modulations of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.sd3 import files, shapes
from simpletune.models.sd3.files import HUB_NAMES, LAYOUT, SD3_MEDIUM
from simpletune.models.sd3.lora_names import LAYOUTS
from simpletune.models.sd3.shapes import TABLE, parameter_shapes
from simpletune.models.sd3.text import SD3Text
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, Latents
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_facts import AttentionShape, DiffusersNames, Licence, LoraNames
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.shared.modulation import Modulation
from simpletune.models.shared.single_file import FileLayout
from simpletune.models.text.family_text import FamilyText

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.denoiser import Denoiser
    from simpletune.models.shared.conditioning import Conditioning
    from simpletune.models.shared.weights import TensorSource

STABILITY_LICENCE = "stabilityai-ai-community"
MEDIUM_LICENCE = "https://huggingface.co/stabilityai/stable-diffusion-3-medium/blob/main/LICENSE.md"


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
    RUN@STEP or a hub name, with a strength as in style.safetensors:0.8. Same weights as those of simpletune merge; the
    result holds only what is trained. Takes no device memory."""
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

    title: ClassVar[str] = "SD3"
    denoiser: ClassVar[str] = "transformer"
    layout: ClassVar[FileLayout] = LAYOUT
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    latents: ClassVar[Latents] = STABLE_DIFFUSION
    multiple: ClassVar[int] = 16
    resolution: ClassVar[int] = 1024
    guidance: ClassVar[float] = 4.5
    published_as: ClassVar[str] = r"(?i)(sd|stable.?diffusion)[-_ .]?v?3"
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    no_hypernetwork: ClassVar[str | None] = (
        "in SD3 one attention reads prompt and picture together. Use adapter.method lora with "
        'adapter.targets ["attn.add_k_proj", "attn.add_v_proj"], which changes the same keys and values'
    )
    diffusers: ClassVar[DiffusersNames] = DiffusersNames(
        "SD3Transformer2DModel", "StableDiffusion3Pipeline", "stable-diffusion-3"
    )
    templates: ClassVar[Mapping[str, str]] = {
        "subject": "sd3_medium_dreambooth_lora", "style": "sd3_medium_lora_8gb", "general": "sd3_medium_lora_8gb",
    }  # fmt: skip
    text_side: ClassVar[type[FamilyText[Any]]] = SD3Text
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES
    after_units: ClassVar[str] = "norm_out"
    starts_small: ClassVar[str] = r"norm.*\.linear\.|^proj_out\."  # as DiT does (arXiv:2212.09748, section 3.2)
    modulation: ClassVar[Modulation | None] = Modulation(
        embed="time_text_embed",
        layers={r"\.norm1(_context)?\.linear$": "silu", r"^norm_out\.linear$": "silu"},
        inputs=lambda time, pooled, dtype: (time, pooled),
        reads_pooled=True,
    )
    ends_with_feed_forward: ClassVar[bool] = True
    supports_fsdp: ClassVar[bool] = True

    bundled_configs: ClassVar = staticmethod(files.bundled_configs)
    shapes_of: ClassVar = staticmethod(parameter_shapes)
    units_among: ClassVar = staticmethod(shapes.unit_names)

    def file_version(self) -> str:
        return "sd3_medium"  # whose parts other than the transformer SD3.5 shares

    @property
    def largest_side(self) -> int:
        """That the transformer has positions for."""
        config = self.known_config()
        return int(config["pos_embed_max_size"]) * int(config["patch_size"]) * self.latents.downsampling

    def image_tokens(self, size: Size) -> int:
        """The number of image tokens of a picture of this size."""
        pixels = self.latents.downsampling * int(self.known_config()["patch_size"])
        return math.prod(side // pixels for side in size)

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        image, text = self.image_tokens(size), self.text.tokens
        return lambda layer: text if any(part in layer for part in shapes.OF_TEXT) else image

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """Joint attention, and image-only attention for blocks that have it (SD3.5 Medium)."""
        config, image = self.known_config(), self.image_tokens(size)
        heads, width, joint = config["num_attention_heads"], config["attention_head_dim"], self.text.tokens + image
        both = (joint, image) if config.get("dual_attention_layers") else (joint,)
        return [AttentionShape(heads, tokens, tokens, width) for tokens in both]

    def skipped_steps(self, steps: int, strength: float) -> int:
        return int(max(steps - steps * strength, 0))

    def licence_of(self, hub_name: str) -> Licence | None:
        """Stability AI's community licence."""
        if not hub_name.startswith("stabilityai/stable-diffusion-3"):
            return None
        link = MEDIUM_LICENCE if hub_name == SD3_MEDIUM else f"https://huggingface.co/{hub_name}/blob/main/LICENSE.md"
        return {"license": "other", "license_name": STABILITY_LICENCE, "license_link": link}

    def pipeline_arguments(self) -> dict[str, str]:
        """Leave out T5 if it is not in use."""
        return {} if self.t5 else {"text_encoder_3": "None", "tokenizer_3": "None"}

    def call_arguments(self) -> dict[str, object]:
        return {"max_sequence_length": self.t5_length}

    def tensor_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Also the position table."""
        found = parameter_shapes(config)
        return {**found, TABLE: (1, config["pos_embed_max_size"] ** 2, found["pos_embed.proj.bias"][0])}

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build the transformer on the meta device, with this package's blocks."""
        from simpletune.models.sd3.joint_block import use_joint_blocks

        model = super().empty_model(config)
        use_joint_blocks(model.transformer_blocks)  # type: ignore[arg-type]
        return model

    def random_tensors(self, config: ModelConfig, seed: int, folder: Path | None = None) -> TensorSource:
        """Also the position table, a constant: the folder's, or the one that the configuration implies."""
        from simpletune.models.sd3.positions import whole_table
        from simpletune.models.shared.weights import MadeTensors

        drawn = super().random_tensors(config, seed, folder)
        return MadeTensors(
            self.tensor_shapes(config),
            lambda name, _: whole_table(config, folder) if name == TABLE else drawn.get(name),
        )

    def fit_to(
        self, model: nn.Module, sizes: Collection[Size], whole: Callable[[], TensorSource], dtype: torch.dtype
    ) -> None:
        """Crop the position table."""
        from simpletune.models.sd3.positions import crop_positions

        crop_positions(model.pos_embed, sizes, lambda: whole().get(TABLE).to(dtype))  # type: ignore[arg-type]

    def whole_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The position table [1, S * S, e], read again from the model's source; empty if it was not cropped."""
        read = getattr(getattr(model, "pos_embed", None), "whole_table", None)
        return {} if read is None else {TABLE: read()}

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
