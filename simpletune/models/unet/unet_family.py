"""What all families with a ``UNet2DConditionModel`` share.

Shapes: b samples, c latent channels, h and w an eighth of the picture's, t = 77 text tokens, e text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.models.objectives.conventions import FlowConventions
from simpletune.models.shared.architecture import Architecture, AttentionShape
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, Latents
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_files import FamilyFiles, LoraNames
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.unet.unet_config import CLASS, DEFAULTS, INPUT, inpainting_config
from simpletune.models.unet.unet_shapes import ATTENTION, pixels, unet_units

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.models.shared.weights import TensorSource


TRAILING: ModelConfig = {"timestep_spacing": "trailing"}


class UNetFamily(Family):
    """A family with a UNet, from a folder in diffusers' layout, a single file or the Hub."""

    family: str
    pretrained: Annotated[str, Field(min_length=1)]
    """A Hub name (owner/name), a folder in diffusers' layout, or a single .safetensors file."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start from the pretrained UNet, or from random weights (training from scratch; reads only its config)."""
    loras: LoraNames = []
    """LoRAs to train on top of, merged into the UNet before it is quantised: each a file in any layout, a run, RUN@STEP
    or a hub name (owner/name, or owner/name/FILE), with a strength as in style.safetensors:0.8. Same weights as those
    of simpletune lora merge; the result holds only what is trained. Takes no device memory. One that begins with
    training: is used only while training, such as the assistant of a model that draws in few steps: pictures are drawn
    without it."""
    unet: str | None = None
    """Replaces the UNet: its folder or single file, or the folder or Hub name of a pipeline."""
    vae: str | None = None
    """Replaces the autoencoder: its folder, or the folder or Hub name of a pipeline."""
    vae_scale: Annotated[float, Field(gt=0, le=100)] | None = None
    """Scaling factor of latents, for an autoencoder of its own in a single file, such as EQ-VAE's 0.1406; null: what
    vae/config.json says, or that of the family's own autoencoder."""
    vae_shift: Annotated[float, Field(ge=-100, le=100)] | None = None
    """Shift that latents lose before they are scaled, such as EQ-VAE's -0.4743; null: likewise, usually 0."""
    vae_padding: Literal["zeros", "reflect"] | None = None
    """Padding of the autoencoder's convolutions: reflect for one that was trained with it, as EQ-VAE's; null: what
    padding_mode in vae/config.json says, or zeros."""

    inpainting: bool = False
    """Give a UNet of four input channels the five of an inpainting model, a mask and a masked picture: their weights
    begin at zero, so that it first predicts what it did without them, and have to train (adapter.method full, or
    partial with conv_in.weight). A UNet that has nine channels already stays as it is, with or without this."""

    denoiser: ClassVar[str] = "unet"
    latents: ClassVar[Latents] = STABLE_DIFFUSION
    objectives: ClassVar[tuple[str, ...]] = ("ddpm", "flow")
    # of NoobAI-RF; the time as in ComfyUI's ModelSamplingSD3, the levels as in diffusers' scheduler for these pipelines
    flow: ClassVar[FlowConventions] = FlowConventions(from_one=True, shift=2.5)

    def skipped_steps(self, steps: int, strength: float) -> int:
        return steps - min(int(steps * strength), steps)


class UNetFiles(FamilyFiles):
    """Where the parts of a model with a UNet come from."""

    family: UNetFamily
    scheduler_tells: ClassVar[bool] = True
    hub_bytes: ClassVar[int] = 4  # SDXL's unet/diffusion_pytorch_model.safetensors has 10,270,077,736 bytes

    def changes_of(self, part: str) -> ModelConfig:
        if part == "scheduler":  # a base that draws in few steps was distilled at trailing timesteps
            return TRAILING if self.family.few_steps is not None else {}
        told = {
            "scaling_factor": self.family.vae_scale,
            "shift_factor": self.family.vae_shift,
            "padding_mode": self.family.vae_padding,
        }
        return {key: value for key, value in told.items() if value is not None} if part == "vae" else {}

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        """Return what ``FamilyFiles`` does. Raises UserError if the UNet is of another family."""
        config = super().denoiser_config(fetch)
        if config is None:
            return None
        self.require_supported(config, self.weights_from)
        return inpainting_config(config) if self.family.inpainting else config


class UNetArchitecture(Architecture):
    """A UNet, in which units and levers are the modules of ``unet_units`` or parts of them."""

    family: UNetFamily
    diffusers_class: ClassVar[str] = CLASS
    defaults: ClassVar[ModelConfig] = DEFAULTS
    multiple: ClassVar[int] = 64
    largest_side: ClassVar[int] = 4096
    """A bound for requests; the UNet has no limit of positions. Self-attention takes 2^36 products per head here."""
    after_units: ClassVar[str] = "conv_norm_out"
    starts_small: ClassVar[str] = r"(proj_out|conv2|conv_out)\.weight$"

    @property
    def generated_multiple(self) -> int:
        return 8  # diffusers' UNet rounds odd halves up, and its pipelines ask for 8

    def stored_shapes(self) -> dict[str, Shape]:
        return self.family.model_copy(update={"inpainting": False}).architecture.known_shapes()

    @property
    def new_weights(self) -> str | None:
        if not self.family.inpainting or self.family.init == "random":
            return None
        return INPUT if self.stored_shapes()[INPUT] != self.known_shapes()[INPUT] else None

    def widened(self, tensors: TensorSource) -> TensorSource:
        return WidenedTensors(tensors, self.in_channels) if self.family.inpainting else tensors

    def per_sample(self, layer: str) -> bool:
        """Return True for the time's layer in each resnet, which shifts its channels."""
        return layer.endswith(".time_emb_proj")

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        """Return rows by level; the text's layers have its tokens, and the time's a single row."""
        levels = [
            (f"{unit.name}.", pixels(size, unit.halvings)) for unit in unet_units(self.family.files.known_config())
        ]

        def rows(layer: str) -> int:
            if ".time_emb_proj" in layer:
                return 1
            if ".attn2.to_k" in layer or ".attn2.to_v" in layer:
                return self.family.text.tokens
            return next(rows for name, rows in levels if layer.startswith(name))

        return rows

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """Return self-attention and attention to the text at each level that has attention."""
        found: dict[AttentionShape, None] = {}
        for unit in unet_units(self.family.files.known_config()):
            if unit.kind == ATTENTION:
                heads, queries = unit.level.heads, pixels(size, unit.halvings)
                for keys in (queries, self.family.text.tokens):
                    found[AttentionShape(heads, queries, keys, unit.outputs // heads)] = None
        return sorted(found, key=lambda shape: -shape.heads * shape.queries * shape.keys)


class WidenedTensors:
    """A UNet's tensors of which the first layer's weight reads ``channels`` channels: those that it was stored without
    have zero weights, as the training of SDXL's inpainting model began (its card,
    huggingface.co/diffusers/stable-diffusion-xl-1.0-inpainting-0.1)."""

    def __init__(self, tensors: TensorSource, channels: int):
        self._tensors, self._channels, self.names = tensors, channels, tensors.names

    def get(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if name != INPUT:
            return tensor
        from torch.nn.functional import pad

        return pad(tensor, (0, 0, 0, 0, 0, self._channels - tensor.shape[1]))  # of [o, i, k, k]
