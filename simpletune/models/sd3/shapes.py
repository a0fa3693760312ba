"""Derive the parameters of Stable Diffusion 3's transformer from its configuration, without torch or weights.

Names and shapes are diffusers' (``SD3Transformer2DModel``); a test compares them with diffusers and with SD3 Medium.
"""

from __future__ import annotations

from collections.abc import Iterable

from simpletune.engine.quant.precision import is_block_modulation
from simpletune.models.shared.model_config import ModelConfig, Shape, linear

TABLE = "pos_embed.pos_embed"
"""The position table, a constant that files store (``positions.py``)."""

OF_TEXT = (".add_", ".to_add_out", ".ff_context")
"""Parts of the names of a block's layers that see the text's tokens."""


def is_adaln(module: str) -> bool:
    """Whether a module is an adaLN layer, which maps timestep and pooled prompt to scales, shifts and gates."""
    return is_block_modulation(module) or module == "norm_out.linear"


def is_conditioning(module: str) -> bool:
    """Whether a module only serves to compute modulations."""
    return is_adaln(module) or module.startswith("time_text_embed.")


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of every parameter, by name, from a transformer's ``config.json``."""
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    shapes: dict[str, Shape] = {
        "pos_embed.proj.weight": (hidden, config["in_channels"], config["patch_size"], config["patch_size"]),
        "pos_embed.proj.bias": (hidden,),
    }
    shapes |= linear("time_text_embed.timestep_embedder.linear_1", 256, hidden)
    shapes |= linear("time_text_embed.timestep_embedder.linear_2", hidden, hidden)
    shapes |= linear("time_text_embed.text_embedder.linear_1", config["pooled_projection_dim"], hidden)
    shapes |= linear("time_text_embed.text_embedder.linear_2", hidden, hidden)
    shapes |= linear("context_embedder", config["joint_attention_dim"], config["caption_projection_dim"])
    layers = config["num_layers"]
    dual = config.get("dual_attention_layers") or ()
    for number in range(layers):
        own = _block(config, hidden, last=number == layers - 1, dual=number in dual)
        shapes |= {f"transformer_blocks.{number}.{name}": shape for name, shape in own.items()}
    shapes |= linear("norm_out.linear", hidden, 2 * hidden)
    shapes |= linear("proj_out", hidden, config["patch_size"] ** 2 * (config["out_channels"] or config["in_channels"]))
    return shapes


def unit_names(names: Iterable[str]) -> tuple[str, ...]:
    """The blocks among the names of parameters, in order."""
    blocks = (name.split(".")[:2] for name in names if name.startswith("transformer_blocks."))
    return tuple(dict.fromkeys(".".join(block) for block in blocks))


def _block(config: ModelConfig, hidden: int, *, last: bool, dual: bool) -> dict[str, Shape]:
    """The parameters of one joint block; the last block has no text output."""
    norm = config.get("qk_norm")
    parts = linear("norm1.linear", hidden, (9 if dual else 6) * hidden)
    parts |= linear("norm1_context.linear", hidden, (2 if last else 6) * hidden)
    projections = ["to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj", "to_out.0"]
    for name in projections + ([] if last else ["to_add_out"]):
        parts |= linear(f"attn.{name}", hidden, hidden)
    if norm:
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            parts[f"attn.{name}.weight"] = (config["attention_head_dim"],)
    if dual:
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            parts |= linear(f"attn2.{name}", hidden, hidden)
        for name in ("norm_q", "norm_k") if norm else ():
            parts[f"attn2.{name}.weight"] = (config["attention_head_dim"],)
    for stream in ("ff",) if last else ("ff", "ff_context"):
        parts |= linear(f"{stream}.net.0.proj", hidden, 4 * hidden)
        parts |= linear(f"{stream}.net.2", 4 * hidden, hidden)
    return parts
