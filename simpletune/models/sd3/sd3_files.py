"""The original layout of SD3's single files (Stability, ComfyUI): its parts, the names of the transformer's tensors,
and the configuration that their shapes imply.

The original layout uses other names than diffusers, stacks q, k and v of a stream in one tensor, and stores shift
before scale, rather than scale before shift, in the two modulations without gates (``norm_out`` and the last block's
``norm1_context``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from simpletune.models.sd3.sd3_shapes import TABLE, parameter_shapes
from simpletune.models.shared.family_files import FamilyFiles
from simpletune.models.shared.fused import Fused
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import FileLayout, Origin

HEAD_WIDTH = 64  # head width of SD3 models without a qk norm; otherwise it is the norm's length
SD3_MEDIUM = "stabilityai/stable-diffusion-3-medium-diffusers"
SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
SD35_LARGE = "stabilityai/stable-diffusion-3.5-large"
HUB_NAMES: Mapping[str, str] = {SD3_MEDIUM: "sd3_medium", SD35_MEDIUM: "sd35_medium", SD35_LARGE: "sd35_large"}
"""Version of each Hub name whose configurations ship with this package."""

OUTER = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
IN_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.to_out.0": "x_block.attn2.proj",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}
FUSED = {
    **Fused("x_block.attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")).rows(),
    **Fused("context_block.attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")).rows(),
    **Fused("x_block.attn2.qkv", ("attn2.to_q", "attn2.to_k", "attn2.to_v")).rows(),
}


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """Return the configurations by version and part. Parts other than the transformer have SD3 Medium's sizes."""
    folder = Path(__file__).parent
    parts = json.loads((folder / "medium_parts.json").read_bytes())
    return {
        version: {
            **parts,
            "transformer": json.loads((folder / f"{version}_transformer.json").read_bytes()),
        }
        for version in HUB_NAMES.values()
    }


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """Infer the transformer's configuration from its tensors' shapes, by original names."""
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    numbers = [int(name.split(".")[1]) for name in shapes if name.startswith("joint_blocks.")]
    qk_norm = shapes.get("joint_blocks.0.x_block.attn.ln_q.weight")
    head = qk_norm[0] if qk_norm else HEAD_WIDTH
    caption, text = shapes["context_embedder.weight"]
    dual = sorted({int(name.split(".")[1]) for name in shapes if ".x_block.attn2.qkv.weight" in name})
    return {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
        "num_layers": max(numbers) + 1,
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "joint_attention_dim": text,
        "caption_projection_dim": caption,
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm" if qk_norm else None,
    }


def origin_of(name: str, layers: int) -> Origin:
    """Return the source of diffusers' tensor ``name``, for this number of blocks. Raises KeyError if there is none."""
    if name in OUTER:
        return Origin(OUTER[name])
    layer, _, leaf = name.rpartition(".")
    if layer in OUTER:
        return Origin(f"{OUTER[layer]}.{leaf}", swapped=layer == "norm_out.linear")
    _, number, inner = layer.split(".", 2)
    block = f"joint_blocks.{number}"
    if inner in FUSED:
        fused, rows = FUSED[inner]
        return Origin(f"{block}.{fused}.{leaf}", rows)
    last = int(number) == layers - 1
    return Origin(f"{block}.{IN_BLOCK[inner]}.{leaf}", swapped=last and inner == "norm1_context.linear")


def origins(config: ModelConfig) -> dict[str, Origin]:
    """Return the source of each of the transformer's tensors, by diffusers' name."""
    return {name: origin_of(name, config["num_layers"]) for name in (*parameter_shapes(config), TABLE)}


LAYOUT = FileLayout(
    family="SD3",
    denoiser="transformer",
    marker="joint_blocks.0.x_block.attn.qkv.weight",
    prefixes={
        "vae": "first_stage_model.",
        "text_encoder": "text_encoders.clip_l.transformer.",
        "text_encoder_2": "text_encoders.clip_g.transformer.",
        "text_encoder_3": "text_encoders.t5xxl.transformer.",
    },
    infer=_infer,
    origins=origins,
)


class SD3Files(FamilyFiles):
    """Where the parts of SD3 and SD3.5 come from."""

    layout: ClassVar[FileLayout | None] = LAYOUT
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES

    bundled_configs: ClassVar = staticmethod(bundled_configs)

    def file_version(self) -> str:
        return "sd3_medium"  # whose parts other than the transformer SD3.5 shares
