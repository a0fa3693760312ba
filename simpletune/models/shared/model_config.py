"""A model's configuration, the shapes of its parameters, and limits on the sizes in a part's configuration, which is
downloaded and decides what is built and allocated. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletune.system import strict_json
from simpletune.system.options import UserError, join_names
from simpletune.system.strict_json import JsonError, JsonValue

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Parameter shapes by name."""
ModelConfig = Mapping[str, Any]
"""A model's ``config.json``."""

WIDTH = (1, 16_384)
CHANNELS = (1, 256)
VOCABULARY = (1, 2**20)
MAX_LIST = 64  # such as the blocks of an autoencoder
MAX_BLOCKS = 4096  # transformer blocks of a UNet, which diffusers makes in 10 s and 0.5 GB; SDXL's has 70
MAX_POSITIONS = 2**29  # numbers in the position table, 2 GiB in fp32; SD3.5 Medium's has 2^27.8

Range = tuple[int, int]
_CLIP: Mapping[str, Range] = {
    "hidden_size": WIDTH, "intermediate_size": (1, 2**17), "projection_dim": WIDTH, "num_hidden_layers": (1, 128),
    "num_attention_heads": (1, 256), "max_position_embeddings": (1, 2**18), "vocab_size": VOCABULARY,
}  # fmt: skip
LIMITS: Mapping[str, Mapping[str, Range]] = {
    "transformer": {
        "num_layers": (1, 128), "num_single_layers": (0, 128), "num_attention_heads": (1, 256),
        "attention_head_dim": (1, 1024), "patch_size": (1, 16),
        "in_channels": CHANNELS, "out_channels": CHANNELS, "joint_attention_dim": WIDTH, "sample_size": (1, 8192),
        "caption_projection_dim": WIDTH, "pooled_projection_dim": WIDTH, "pos_embed_max_size": (1, 1024),
    },
    "unet": {
        "in_channels": CHANNELS, "out_channels": CHANNELS, "block_out_channels": WIDTH, "layers_per_block": (1, 16),
        "transformer_layers_per_block": (1, 64), "attention_head_dim": (1, 1024), "cross_attention_dim": WIDTH,
        "norm_num_groups": (1, 1024), "sample_size": (1, 8192),
    },
    "vae": {
        "block_out_channels": WIDTH, "layers_per_block": (1, 16), "norm_num_groups": (1, 1024), "in_channels": CHANNELS,
        "out_channels": CHANNELS, "latent_channels": CHANNELS, "encoder_block_out_channels": WIDTH,
        "decoder_block_out_channels": WIDTH, "num_encoder_blocks": (1, 64), "num_decoder_blocks": (1, 64),
        "upsampling_scaling_factor": (1, 16), "sample_size": (1, 8192),
    },
    "text_encoder": _CLIP,
    "text_encoder_2": _CLIP,
    "text_encoder_3": {
        "d_model": WIDTH, "d_ff": (1, 2**17), "d_kv": (1, 1024), "num_layers": (1, 128), "num_heads": (1, 256),
        "num_decoder_layers": (0, 128), "vocab_size": VOCABULARY, "relative_attention_num_buckets": (1, 4096),
        "relative_attention_max_distance": (1, 2**20),
    },
    "scheduler": {
        "num_train_timesteps": (1, 100_000), "base_image_seq_len": (1, 2**20), "max_image_seq_len": (1, 2**20),
    },
}  # fmt: skip


UNET_BLOCKS = ("block_out_channels", "layers_per_block", "transformer_layers_per_block")


def read_config(file: Path, part: str) -> ModelConfig:
    """Read the ``config.json`` of a part such as ``vae``. Raises UserError if it is unreadable or a size too large."""
    try:
        config = strict_json.read(file)
    except (OSError, JsonError) as error:
        raise UserError(f"{file} cannot be read ({error}). It describes the {part}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} cannot be read (it is not a JSON object). It describes the {part}")
    require_sizes(config, part, str(file))
    return config


def require_sizes(config: Mapping[str, JsonValue], part: str, place: str) -> None:
    """Raise UserError if a size of a part, from ``place``, is beyond its limits. Sizes may be missing."""
    odd = []
    for name, (low, high) in LIMITS.get(part, {}).items():
        value = config.get(name)
        if value is not None and not _fits(value, low, high):
            text = repr(value)
            odd.append(f"{name} {text if len(text) <= 60 else f'{text[:57]}...'} (from {low:,} to {high:,})")
    if odd:
        raise UserError(
            f"{place}: sizes outside the allowed range for a {part}: {join_names(odd)}. "
            "Download the model again, or use another"
        )
    if part == "unet":
        levels, layers, depth = (config.get(name) or 1 for name in UNET_BLOCKS)
        blocks = len(levels) * (2 * _largest(layers) + 1) * _largest(depth) if isinstance(levels, list) else 0
        if blocks > MAX_BLOCKS:
            raise UserError(
                f"{place}: the UNet may have {blocks:,} transformer blocks; the limit is {MAX_BLOCKS:,}. "
                "Download the model again, or use another"
            )
    if part == "transformer":
        side, heads, width = (
            config.get(n) for n in ("pos_embed_max_size", "num_attention_heads", "attention_head_dim")
        )
        if isinstance(side, int) and isinstance(heads, int) and isinstance(width, int):
            if side**2 * heads * width > MAX_POSITIONS:
                raise UserError(
                    f"{place}: the position table would have {side} x {side} x {heads * width} numbers; "
                    f"the limit is {MAX_POSITIONS:,}. Download the model again, or use another"
                )


def _fits(value: JsonValue, low: int, high: int) -> bool:
    if isinstance(value, list):
        return 1 <= len(value) <= MAX_LIST and all(_fits(each, low, high) for each in value)
    return type(value) is int and low <= value <= high


def _largest(value: JsonValue) -> int:
    """Return the largest of a size, or a list of sizes for levels or layers."""
    return max(map(_largest, value)) if isinstance(value, list) else value  # type: ignore[return-value]
