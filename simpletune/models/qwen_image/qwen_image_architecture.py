"""Qwen-Image's transformer.

Shapes: b samples, n tokens of the picture, t of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.qwen_image.qwen_image_files import BLOCKS, CLASS
from simpletune.models.shared.architecture import Architecture, AttentionShape
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.modulation import Modulation

if TYPE_CHECKING:
    from simpletune.engine.denoiser import Denoiser

PATCH = 2  # places of a latent a side that one token reads
OF_TEXT = (".add_", ".to_add_out", ".txt_mlp")
"""Parts of the names of a block's layers that see the text's tokens."""


class QwenImageArchitecture(Architecture):
    """Blocks with layers of their own for text and picture, which one attention reads together."""

    diffusers_class: ClassVar[str] = CLASS
    multiple: ClassVar[int] = 16
    largest_side: ClassVar[int] = 2048
    after_units: ClassVar[str] = "norm_out"
    starts_small: ClassVar[str] = r"(img|txt)_mod\.1|norm_out\.linear|^proj_out\."
    modulation: ClassVar[Modulation | None] = Modulation(
        embed="time_text_embed",
        layers={r"\.(img|txt)_mod\.1$": "0", r"^norm_out\.linear$": "silu"},
        inputs=lambda time, pooled, dtype: (time.to(dtype),) * 2,  # of the second only the type counts
        reads_pooled=False,
    )
    ends_with_feed_forward: ClassVar[bool] = True
    fp16_overflows: ClassVar[str | None] = "its tokens leave the range of fp16, at whose end diffusers clips them"

    @property
    def in_channels(self) -> int:
        return super().in_channels // PATCH**2

    def units_among(self, names: Collection[str]) -> tuple[str, ...]:
        blocks = (name.split(".") for name in names if name.split(".")[0] == BLOCKS)
        return tuple(dict.fromkeys(f"{block}.{number}" for block, number, *_ in blocks))

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build it on the meta device, with this package's blocks."""
        from simpletune.models.qwen_image.qwen_image_block import use_blocks

        model = super().empty_model(config)
        use_blocks(model)
        return model

    def image_tokens(self, size: Size) -> int:
        return size[0] // self.multiple * (size[1] // self.multiple)

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        image, text = self.image_tokens(size), self.family.text.tokens
        return lambda layer: text if any(part in layer for part in OF_TEXT) else image

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        config, tokens = self.family.files.known_config(), self.image_tokens(size) + self.family.text.tokens
        return [AttentionShape(config["num_attention_heads"], tokens, tokens, config["attention_head_dim"])]
