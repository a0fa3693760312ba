"""FLUX.2's transformer.

Shapes: b samples, n tokens of the picture, t of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.flux2.flux2_lora import BLOCKS
from simpletune.models.shared.architecture import Architecture, AttentionShape
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.modulation import Modulation

if TYPE_CHECKING:
    from simpletune.engine.denoiser import Denoiser

OF_TEXT = (".add_", ".to_add_out", ".ff_context")
"""Parts of the names of a joint block's layers that see the text's tokens."""


class KleinArchitecture(Architecture):
    """Joint blocks, which have layers of their own for text and picture, then parallel ones, which have one set."""

    diffusers_class: ClassVar[str] = "Flux2Transformer2DModel"
    multiple: ClassVar[int] = 16
    largest_side: ClassVar[int] = 2048
    after_units: ClassVar[str] = "norm_out"
    starts_small: ClassVar[str] = r"modulation|norm_out\.linear|^proj_out\."
    modulation: ClassVar[Modulation | None] = Modulation(
        embed="time_guidance_embed",
        layers={r"_modulation(_img|_txt)?\.linear$": "act_fn", r"^norm_out\.linear$": "silu"},
        # As diffusers' forward pass does, in training as in drawing: in bf16, .7503 becomes .75, and 750 becomes 752.
        inputs=lambda time, pooled, dtype: (time.to(dtype) * 1000, None),
        reads_pooled=False,
    )
    ends_with_feed_forward: ClassVar[bool] = True  # joint blocks; parallel ones have no network by itself

    def units_among(self, names: Collection[str]) -> tuple[str, ...]:
        blocks = (name.split(".") for name in names if name.split(".")[0] in BLOCKS)
        return tuple(dict.fromkeys(f"{block}.{number}" for block, number, *_ in blocks))

    def image_tokens(self, size: Size) -> int:
        width, height = (side // self.family.latents.downsampling for side in size)
        return width * height

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        image, text = self.image_tokens(size), self.family.text.tokens

        def rows(layer: str) -> int:
            if re.match("single_", layer):
                return image + text
            return text if any(part in layer for part in OF_TEXT) else image

        return rows

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        config, tokens = self.family.files.known_config(), self.image_tokens(size) + self.family.text.tokens
        return [AttentionShape(config["num_attention_heads"], tokens, tokens, config["attention_head_dim"])]

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build the transformer on the meta device, with this package's modules."""
        from simpletune.models.flux2.klein_blocks import use_own_blocks

        model = super().empty_model(config)
        use_own_blocks(model)
        return model
