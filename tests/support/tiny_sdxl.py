"""A tiny Stable Diffusion XL with random weights, in the folder layout of diffusers' pipeline.

It has the real one's levels (none, some and more transformer blocks), skip connections, linear projections, heads of
64 where it attends, two text encoders, six sizes, and the real length of text (77 tokens).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny_sd15
from diffusers import DDIMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from transformers.utils import logging

from benchmarks.tiny_models import networks, tiny_sd3

CLIP_L, CLIP_G = 32, 48
TIME = 256  # the width that no shape in a single file tells
UNET: dict[str, Any] = {
    "block_out_channels": [32, 64, 128],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "transformer_layers_per_block": [1, 1, 2],
    "attention_head_dim": [1, 1, 2],
    "cross_attention_dim": CLIP_L + CLIP_G,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": TIME,
    "projection_class_embeddings_input_dim": CLIP_G + 6 * TIME,
    "sample_size": 8,
}


def build(
    folder: Path,
    *,
    v: bool = False,
    seed: int = 0,
    dtype: networks.Dtype = "fp32",
    unet: Mapping[str, Any] | None = None,
) -> Path:
    """Write the pipeline's folder, which must not exist, and return it.

    Args:
        folder: to write.
        v: whether it predicts v with a terminal SNR of zero, as some derivatives do; its weights are the same.
        seed: of the weights. No global random state is changed.
        dtype: of all weights on disk.
        unet: what differs in its U-Net.
    """
    logging.disable_progress_bar()
    tiny_sd15.write_tokenizer(folder / "tokenizer")
    tiny_sd15.write_tokenizer(folder / "tokenizer_2", "!")
    with tiny_sd3.seeded(seed, 0):
        clip_l = networks.clip(folder / "tokenizer", CLIP_L, "quick_gelu")
        clip_g = networks.clip(folder / "tokenizer_2", CLIP_G, "gelu")
        tiny_sd3.save_model(clip_l.text_model, folder / "text_encoder", dtype)
        tiny_sd3.save_model(clip_g, folder / "text_encoder_2", dtype)
    with tiny_sd3.seeded(seed, 1):
        tiny_sd3.save_model(UNet2DConditionModel(**{**UNET, **(unet or {})}), folder / "unet", dtype)
    with tiny_sd3.seeded(seed, 2):
        tiny_sd3.save_model(tiny_sd15.autoencoder(0.13025, force_upcast=True), folder / "vae", dtype)
    if v:
        zero = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        DDIMScheduler(**tiny_sd15.NOISE, clip_sample=False, **zero).save_pretrained(folder / "scheduler")
    else:
        noise = {name: value for name, value in tiny_sd15.NOISE.items() if name != "set_alpha_to_one"}
        EulerDiscreteScheduler(**noise, timestep_spacing="leading").save_pretrained(folder / "scheduler")
    write_index(folder, "DDIMScheduler" if v else "EulerDiscreteScheduler")
    return folder


def write_index(folder: Path, scheduler: str) -> None:
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "force_zeros_for_empty_prompt": True,
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "scheduler": ["diffusers", scheduler],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
