"""The original layout of SD3's single files (Stability, ComfyUI): its parts, and the configuration that their shapes
imply."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from simpletune.models.sd3.original_names import origin_of
from simpletune.models.sd3.shapes import TABLE, parameter_shapes
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import FileLayout, Origin

HEAD_WIDTH = 64  # head width of SD3 models without a qk norm; otherwise it is the norm's length


SD3_MEDIUM = "stabilityai/stable-diffusion-3-medium-diffusers"
SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
SD35_LARGE = "stabilityai/stable-diffusion-3.5-large"
HUB_NAMES: Mapping[str, str] = {SD3_MEDIUM: "sd3_medium", SD35_MEDIUM: "sd35_medium", SD35_LARGE: "sd35_large"}
"""Version of each Hub name whose configurations ship with this package."""


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """The configurations by version and part. Parts other than the transformer have SD3 Medium's sizes."""
    folder = Path(__file__).parent
    parts = json.loads((folder / "medium_parts.json").read_text())
    return {
        version: {**parts, "transformer": json.loads((folder / f"{version}_transformer.json").read_text())}
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


def origins(config: ModelConfig) -> dict[str, Origin]:
    """The source of each of the transformer's tensors, by diffusers' name."""
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
