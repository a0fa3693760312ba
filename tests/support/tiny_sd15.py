"""Tiny Stable Diffusion 1.5 and 2 with random weights, in the folder layout of diffusers' pipeline.

Both have the levels, attentions and skip connections of the real ones, one residual block a level instead of two, and
the real length of text (77 tokens). They differ as the real ones do: in projections (1x1 convolutions, linear layers),
heads (one number, a list), target (epsilon, v) and padding of prompts (end of text, ``!``). The tensors of the text
encoder have the names of the published files in one, and those that transformers 5 writes in the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, DDIMScheduler, PNDMScheduler, UNet2DConditionModel
from safetensors.torch import save_file
from transformers.utils import logging

from benchmarks.tiny_models import networks, tiny_sd3, vocabulary
from simpletune.data.demo import demo_scenes

Version = Literal["sd15", "sd2"]
SD15 = {
    "num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
    "trained_betas": None, "skip_prk_steps": True, "steps_offset": 1, "clip_sample": False,
}  # fmt: skip
SD21 = SD15 | {"prediction_type": "v_prediction"}
"""``scheduler_config.json`` of Stable Diffusion 1.5 and of 2.1 at 768 px."""
TOKENS = 77
TEXT = {"sd15": 32, "sd2": 48}
BLOCKS = {
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "layers_per_block": 1,
}
UNET: dict[str, dict[str, Any]] = {
    "sd15": {**BLOCKS, "block_out_channels": [32, 32, 64, 64], "attention_head_dim": 8, "sample_size": 8},
    "sd2": {
        **BLOCKS,
        "block_out_channels": [64, 64, 128, 128],
        "attention_head_dim": [1, 1, 2, 2],
        "use_linear_projection": True,
        "sample_size": 8,
    },
}
NOISE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "set_alpha_to_one": False,
}


def build(
    folder: Path,
    version: Version = "sd15",
    *,
    seed: int = 0,
    dtype: networks.Dtype = "fp32",
    unet: Mapping[str, Any] | None = None,
) -> Path:
    """Write the pipeline's folder, which must not exist, and return it.

    Args:
        folder: to write.
        version: 1.5 or 2.
        seed: of the weights. No global random state is changed.
        dtype: of all weights on disk.
        unet: what differs in its U-Net.
    """
    logging.disable_progress_bar()
    write_tokenizer(folder / "tokenizer", "!" if version == "sd2" else None)
    with tiny_sd3.seeded(seed, 0):
        clip = networks.clip(folder / "tokenizer", TEXT[version], "quick_gelu" if version == "sd15" else "gelu")
        tiny_sd3.save_model(clip.text_model, folder / "text_encoder", dtype)
        if version == "sd15":
            _write_published_names(clip.text_model, folder / "text_encoder")
    with tiny_sd3.seeded(seed, 1):
        denoiser = UNet2DConditionModel(**{**UNET[version], **(unet or {})}, cross_attention_dim=TEXT[version])
    tiny_sd3.save_model(denoiser, folder / "unet", dtype)
    with tiny_sd3.seeded(seed, 2):
        tiny_sd3.save_model(autoencoder(), folder / "vae", dtype)
    if version == "sd15":
        PNDMScheduler(**NOISE, skip_prk_steps=True).save_pretrained(folder / "scheduler")
    else:
        DDIMScheduler(**NOISE, clip_sample=False, prediction_type="v_prediction").save_pretrained(folder / "scheduler")
    _write_index(folder, version)
    return folder


def write_tokenizer(folder: Path, pad: str | None = None) -> None:
    """Write a CLIP tokenizer for 77 tokens; those of Stable Diffusion 2 and of CLIP-G pad with ``!`` instead of the end
    of the text."""
    vocabulary.write_clip(folder, demo_scenes.words())
    changes: dict[str, object] = {"model_max_length": TOKENS}
    if pad is not None:
        changes["pad_token"] = pad
        file = folder / "special_tokens_map.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": pad}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _write_published_names(model: torch.nn.Module, folder: Path) -> None:
    """Name the tensors as the published text encoders do: with a prefix, and with the positions' numbers."""
    state = {f"text_model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    state["text_model.embeddings.position_ids"] = torch.arange(TOKENS)[None]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def autoencoder(scale: float = 0.18215, force_upcast: bool = False) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, latent_channels=4, norm_num_groups=8,
        sample_size=64, scaling_factor=scale, force_upcast=force_upcast,
    )  # fmt: skip


def _write_index(folder: Path, version: Version) -> None:
    scheduler = "PNDMScheduler" if version == "sd15" else "DDIMScheduler"
    index: dict[str, object] = {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", scheduler],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
