"""Read the configuration of a ``UNet2DConditionModel``: its levels, and settings that no family here supports.

diffusers' ``attention_head_dim`` is, despite its name, the number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.options import join_names

CLASS = "UNet2DConditionModel"
INPUT = "conv_in.weight"
"""The weight of the layer that reads the latents, and in an inpainting model a mask and a masked picture."""
OTHER_INPUTS = {5: "a depth map", 8: "another picture (InstructPix2Pix)"}
"""What a UNet with so many input channels for latents of four reads beside them, and cannot be trained with here."""

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
"""Settings of diffusers' UNet of which only the default is supported, unless a family says otherwise (SDXL)."""
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


def levels_of(config: ModelConfig) -> list[Level]:
    """Return the UNet's levels, from the finest to the coarsest."""
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


def difference(config: ModelConfig, family: str, needed: Mapping[str, object] = NEEDED) -> str | None:
    """Say what distinguishes a configuration, whose sizes are within the limits, from a UNet of a family of this name;
    None: nothing. ``needed``: settings of which the family supports only this value."""
    name = config.get("_class_name")
    if name != CLASS:
        return f"is a {name}; family {family} needs a {CLASS}"
    odd = list(_unsupported({**DEFAULTS, **config}, needed))
    return f"not a UNet of family {family}: {join_names(odd)}" if odd else None


def inpainting_channels(config: ModelConfig) -> int:
    """Return the input channels of the inpainting model: z_t, a mask, the latents of the masked picture."""
    return 2 * int({**DEFAULTS, **config}["out_channels"]) + 1


def inpainting_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the inpainting model beside a UNet."""
    return {**config, "in_channels": inpainting_channels(config)}


def _unsupported(config: ModelConfig, needed: Mapping[str, object]) -> Iterator[str]:
    """List the settings of a complete configuration that a family does not support, and what it needs instead."""
    for name, value in needed.items():
        if config.get(name, value) != value:
            yield f"{name} {config[name]!r} (must be {value!r})"
    levels = len(config["block_out_channels"])
    for name, kinds in (("down_block_types", ("DownBlock2D",)), ("up_block_types", ("UpBlock2D",))):
        known = {*kinds, *(f"CrossAttn{kind}" for kind in kinds)}
        if len(config[name]) != levels or not set(config[name]) <= known:
            yield f"{name} {config[name]!r} (must be {levels} of {', '.join(sorted(known))})"
    for name in PER_LEVEL:
        if isinstance(config[name], (list, tuple)) and len(config[name]) != levels:
            yield f"{name} {config[name]!r} (must be one number, or {levels})"
    channels, read = config["out_channels"], config["in_channels"]
    if read not in (channels, inpainting_channels(config)):
        extra = OTHER_INPUTS.get(read, "anything else") if channels == 4 else "anything else"
        allowed = f"{channels}, or {inpainting_channels(config)} of an inpainting model"
        yield f"in_channels {read} (must be {allowed}; models that read {extra} cannot be trained)"
    groups, heads = config["norm_num_groups"], _per_level(config["attention_head_dim"], levels)
    for channels, count in zip(config["block_out_channels"], heads, strict=False):
        if channels % groups or channels % count:
            yield f"block_out_channels {channels} (must be a multiple of {groups} groups and of {count} heads)"
