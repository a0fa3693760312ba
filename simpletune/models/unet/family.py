"""What all families with a ``UNet2DConditionModel`` share.

Shapes: b samples, c latent channels, h and w an eighth of the picture's, t = 77 text tokens, e text width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.models.shared.buckets import Size
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_facts import AttentionShape, LoraNames
from simpletune.models.shared.flops import Flops, TrainedParameters
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.shared.sources import provider
from simpletune.models.unet.config import DEFAULTS, INPUT, inpainting_channels, inpainting_config, levels_of
from simpletune.models.unet.flops import unet_flops
from simpletune.models.unet.shapes import ATTENTION, parameter_shapes, pixels, unet_units
from simpletune.system.hub import is_hub_name
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.models.shared.weights import TensorSource

CLIP_WIDTH = 512  # transformers' default, which its files may leave out


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
    """LoRAs to train on top of, merged into the UNet before it is quantised: each a file in any layout, a run,
    RUN@STEP or a hub name, with a strength as in style.safetensors:0.8. Same weights as those of simpletune merge; the
    result holds only what is trained. Takes no device memory."""
    unet: str | None = None
    """Replaces the UNet: its folder or single file, or the folder or Hub name of a pipeline."""
    vae: str | None = None
    """Replaces the autoencoder: its folder, or the folder or Hub name of a pipeline."""

    inpainting: bool = False
    """Give a UNet of four input channels the five of an inpainting model, a mask and a masked picture: their weights
    begin at zero, so that it first predicts what it did without them, and have to train (adapter.method full, or
    partial with conv_in.weight). A UNet that has nine channels already stays as it is, with or without this."""

    denoiser: ClassVar[str] = "unet"
    pipeline_reads_embeddings: ClassVar[bool] = True
    multiple: ClassVar[int] = 64
    largest_side: ClassVar[int] = 4096
    """A bound for requests; the UNet has no limit of positions. Self-attention takes 2^36 products per head here."""
    text_tokens: ClassVar[int] = 77
    objective: ClassVar[str] = "ddpm"
    hub_bytes: ClassVar[int] = 4  # SDXL's unet/diffusion_pytorch_model.safetensors has 10,270,077,736 bytes
    after_units: ClassVar[str] = "conv_norm_out"
    starts_small: ClassVar[str] = r"(proj_out|conv2|conv_out)\.weight$"

    shapes_of: ClassVar = staticmethod(parameter_shapes)

    def problems(self) -> Iterator[Problem]:
        """Also report text encoders of another model than the UNet's, as far as both are known without a download."""
        found = list(super().problems())
        yield from found
        try:
            known = not found and self.denoiser_config(fetch=False) is not None
        except (UserError, KeyError, TypeError):
            return  # reported where the shapes are read
        given = [] if not known else [provider(self, encoder.model)[1] or "" for encoder in self.encoders()]
        if not given or any(is_hub_name(each) and self.bundled_config(each) is None for each in given):
            return
        texts = [(encoder, self.known_part(encoder.model).config()) for encoder in self.encoders()]
        widths = [int(text.get("hidden_size", CLIP_WIDTH)) for _, text in texts]
        pooled = sum(int(text.get("projection_dim", CLIP_WIDTH)) for encoder, text in texts if encoder.projected)
        named = "a text encoder of width" if len(texts) == 1 else "text encoders of widths"
        field, source = ("text_encoders", self.text_encoders) if self.text_encoders else ("pretrained", self.pretrained)
        for has, width, reads in (
            (f"{named} {' + '.join(map(str, widths))}", sum(widths), self.text_width),
            (f"a pooled prompt of width {pooled}", pooled, self.pooled_width),
        ):
            if width != reads:
                remedy = "Use the pipeline of the UNet's own version"
                yield Problem(f"model.{field}", f"{source} has {has}, and the UNet reads {reads}. {remedy}")
                return

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        """As for ``Family``. UserError: the UNet is of another family."""
        config = super().denoiser_config(fetch)
        if config is None:
            return None
        self.require_supported(config, self.weights_from)
        return inpainting_config(config) if self.inpainting else config

    @staticmethod
    def complete(config: ModelConfig) -> ModelConfig:
        return {**DEFAULTS, **config}

    def stored_shapes(self) -> dict[str, Shape]:
        return self.model_copy(update={"inpainting": False}).known_shapes()

    @property
    def new_weights(self) -> str | None:
        if not self.inpainting or self.init == "random":
            return None
        return INPUT if self.stored_shapes()[INPUT] != self.known_shapes()[INPUT] else None

    def widened(self, tensors: TensorSource) -> TensorSource:
        return WidenedTensors(tensors, inpainting_channels(self.known_config())) if self.inpainting else tensors

    @property
    def text_width(self) -> int:
        return levels_of(self.known_config())[0].text

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        """By level; the text's layers have its tokens, and the time's a single row."""
        levels = [(f"{unit.name}.", pixels(size, unit.halvings)) for unit in unet_units(self.known_config())]

        def rows(layer: str) -> int:
            if ".time_emb_proj" in layer:
                return 1
            if ".attn2.to_k" in layer or ".attn2.to_v" in layer:
                return self.text_tokens
            return next(rows for name, rows in levels if layer.startswith(name))

        return rows

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """Self-attention and attention to the text at each level that has attention."""
        found: dict[AttentionShape, None] = {}
        for unit in unet_units(self.known_config()):
            if unit.kind == ATTENTION:
                heads, queries = unit.level.heads, pixels(size, unit.halvings)
                for keys in (queries, self.text_tokens):
                    found[AttentionShape(heads, queries, keys, unit.outputs // heads)] = None
        return sorted(found, key=lambda shape: -shape.heads * shape.queries * shape.keys)

    def skipped_steps(self, steps: int, strength: float) -> int:
        return steps - min(int(steps * strength), steps)

    def flops(self, trained: TrainedParameters, size: Size, batch: int, checkpointed: int = 0) -> Flops:
        config = self.known_config()
        recomputed = frozenset(self.units_among(self.shapes_of(config))[:checkpointed])
        return unet_flops(config, trained, size, batch, self.text_tokens, recomputed)


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
