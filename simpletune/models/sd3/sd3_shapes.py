"""The parameters of Stable Diffusion 3's transformer, and what the names of its layers say."""

from __future__ import annotations

from collections.abc import Iterable

from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.shared.parameter_shapes import shapes_of_class

CLASS = "SD3Transformer2DModel"
SIZES = (
    "num_layers", "num_attention_heads", "attention_head_dim", "patch_size", "in_channels", "out_channels",
    "joint_attention_dim", "caption_projection_dim", "pooled_projection_dim", "pos_embed_max_size",
)  # fmt: skip
"""What every published ``config.json`` states, so one without it is damaged: diffusers would take another model's."""
TABLE = "pos_embed.pos_embed"
"""The position table, a constant that files store (``positions.py``)."""

OF_TEXT = (".add_", ".to_add_out", ".ff_context")
"""Parts of the names of a block's layers that see the text's tokens."""


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return every parameter's shape by name, from a transformer's ``config.json``. Raises KeyError if a size is
    absent."""
    _ = [config[name] for name in SIZES]
    return shapes_of_class(CLASS, config)


def unit_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the blocks among the names of parameters, in order."""
    blocks = (name.split(".")[:2] for name in names if name.startswith("transformer_blocks."))
    return tuple(dict.fromkeys(".".join(block) for block in blocks))
