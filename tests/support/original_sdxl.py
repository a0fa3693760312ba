"""Write a Stable Diffusion XL pipeline's weights as one file in the original layout (Stability's sgm, sd-scripts).

Written from the layout itself, not from the loader's tables; the tests compare it with diffusers' own converters.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import original_layout
import original_sd15
import torch
from safetensors.torch import save_file
from torch import Tensor

UNET, VAE = original_sd15.UNET, original_sd15.VAE
CLIP_L, CLIP_G = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
ADDED = {"add_embedding.linear_1.": "label_emb.0.0.", "add_embedding.linear_2.": "label_emb.0.2."}


def unet_name(name: str, config: dict) -> str:
    """A tensor's original name: as in Stable Diffusion 1, and the embedding of sizes and pooled text."""
    for ours, theirs in ADDED.items():
        if name.startswith(ours):
            return name.replace(ours, theirs)
    return original_sd15.unet_name(name, config)


def open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """CLIP-G under OpenCLIP's names: q, k and v in one matrix, the projection transposed."""
    inner = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    projection = inner.pop("text_projection.weight")
    last = 1 + max(int(name.split(".")[2]) for name in inner if name.startswith("encoder.layers."))
    named = original_sd15.open_clip(inner)  # with one layer more, as Stable Diffusion 2's files have it
    named = {name: tensor for name, tensor in named.items() if f".resblocks.{last}." not in name}
    return named | {"text_projection": projection.T, "logit_scale": torch.tensor(4.6)}


def write(pipeline: Path, file: Path, parts: str = "unet vae clip_l clip_g", marks: Collection[str] = ()) -> Path:
    """A pipeline's weights in one file, with a tensor of the training that a loader must ignore.

    Args:
        pipeline: a folder in diffusers' layout.
        file: where to.
        parts: which of unet, vae, clip_l, clip_g.
        marks: names of empty tensors.
    """
    out: dict[str, Tensor] = {"denoiser.sigmas": torch.ones(1000)} | {mark: torch.zeros(0) for mark in marks}
    config = json.loads((pipeline / "unet" / "config.json").read_text())
    if "unet" in parts:
        out |= {UNET + unet_name(name, config): t for name, t in original_layout.state_of(pipeline / "unet").items()}
    if "vae" in parts:
        out |= {VAE + name: t for name, t in original_layout.vae(original_layout.state_of(pipeline / "vae")).items()}
    if "clip_l" in parts:
        state = original_layout.state_of(pipeline / "text_encoder")
        out |= {f"{CLIP_L}text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in state.items()}
        out[f"{CLIP_L}text_model.embeddings.position_ids"] = torch.arange(77)[None]
    if "clip_g" in parts:
        state = original_layout.state_of(pipeline / "text_encoder_2")
        out |= {CLIP_G + name: tensor for name, tensor in open_clip(state).items()}
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, file)
    return file
