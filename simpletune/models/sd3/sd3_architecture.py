"""Stable Diffusion 3's transformer.

Shapes: b samples, e hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.sd3.sd3_shapes import CLASS, OF_TEXT, TABLE, parameter_shapes, unit_names
from simpletune.models.shared.architecture import Architecture, AttentionShape
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.shared.modulation import Modulation

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.denoiser import Denoiser
    from simpletune.models.shared.weights import TensorSource


class SD3Architecture(Architecture):
    """MMDiT (arXiv:2403.03206)."""

    diffusers_class: ClassVar[str] = CLASS
    multiple: ClassVar[int] = 16
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

    shapes_of: ClassVar = staticmethod(parameter_shapes)
    units_among: ClassVar = staticmethod(unit_names)

    @property
    def largest_side(self) -> int:
        """The longest side that the transformer has positions for, in pixels."""
        config = self.family.files.known_config()
        return int(config["pos_embed_max_size"]) * int(config["patch_size"]) * self.family.latents.downsampling

    def image_tokens(self, size: Size) -> int:
        """Return the number of image tokens of a picture of this size."""
        pixels = self.family.latents.downsampling * int(self.family.files.known_config()["patch_size"])
        return math.prod(side // pixels for side in size)

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        image, text = self.image_tokens(size), self.family.text.tokens
        return lambda layer: text if any(part in layer for part in OF_TEXT) else image

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """Return joint attention, and image-only attention for blocks that have it (SD3.5 Medium)."""
        config, image = self.family.files.known_config(), self.image_tokens(size)
        heads, width = config["num_attention_heads"], config["attention_head_dim"]
        joint = self.family.text.tokens + image
        both = (joint, image) if config.get("dual_attention_layers") else (joint,)
        return [AttentionShape(heads, tokens, tokens, width) for tokens in both]

    def tensor_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Add the position table."""
        found = parameter_shapes(config)
        return {**found, TABLE: (1, config["pos_embed_max_size"] ** 2, found["pos_embed.proj.bias"][0])}

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build the transformer on the meta device, with this package's blocks."""
        from simpletune.models.sd3.joint_block import use_joint_blocks

        model = super().empty_model(config)
        use_joint_blocks(model.transformer_blocks)  # type: ignore[arg-type]
        return model

    def random_tensors(self, config: ModelConfig, seed: int, folder: Path | None = None) -> TensorSource:
        """Add the position table, a constant: the folder's, or the one that the configuration implies."""
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
        """Return the position table [1, S * S, e], read again from the model's source; empty if it was not cropped."""
        read = getattr(getattr(model, "pos_embed", None), "whole_table", None)
        return {} if read is None else {TABLE: read()}
