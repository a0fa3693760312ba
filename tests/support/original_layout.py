"""Write a diffusers pipeline's weights as one file in the original layout, the inverse of the loader.

Written from the layout itself, not from the loader's tables; the tests compare it with diffusers' own converter.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.tiny_models import tiny_sd3

MMDIT, VAE, CLIP_L, CLIP_G, T5 = (
    "model.diffusion_model.",
    "first_stage_model.",
    "text_encoders.clip_l.transformer.",
    "text_encoders.clip_g.transformer.",
    "text_encoders.t5xxl.transformer.",
)


def build(folder: Path, **sizes: Any) -> Path:
    """Write a tiny pipeline whose CLIP-L's projection is the identity, as in SD3 Medium: the original layout does not
    hold it. ``sizes`` differ from the minimal ones."""
    tiny_sd3.build(folder, replace(tiny_sd3.MINIMAL, **sizes), seed=1, dtype="fp32")
    file = folder / "text_encoder" / "model.safetensors"
    state = load_file(file)
    state["text_projection.weight"] = torch.eye(len(state["text_projection.weight"]))
    save_file(state, file, {"format": "pt"})
    return folder


def halves_swapped(tensor: Tensor) -> Tensor:
    """[2 h, ...] with its halves in the other order."""
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def mmdit(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The transformer's tensors in the original layout, without prefix."""
    out = {"pos_embed": state["pos_embed.pos_embed"]}
    for leaf in ("weight", "bias"):
        out[f"x_embedder.proj.{leaf}"] = state[f"pos_embed.proj.{leaf}"]
        out[f"context_embedder.{leaf}"] = state[f"context_embedder.{leaf}"]
        for ours, theirs in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder")):
            out[f"{ours}.mlp.0.{leaf}"] = state[f"time_text_embed.{theirs}.linear_1.{leaf}"]
            out[f"{ours}.mlp.2.{leaf}"] = state[f"time_text_embed.{theirs}.linear_2.{leaf}"]
        out[f"final_layer.linear.{leaf}"] = state[f"proj_out.{leaf}"]
        out[f"final_layer.adaLN_modulation.1.{leaf}"] = halves_swapped(state[f"norm_out.linear.{leaf}"])
    for number in range(layers):
        inside = {k: v for k, v in state.items() if k.startswith(f"transformer_blocks.{number}.")}
        block = {k.split(".", 2)[2]: v for k, v in inside.items()}
        out |= {f"joint_blocks.{number}.{k}": v for k, v in joint_block(block, last=number == layers - 1).items()}
    return out


def joint_block(block: dict[str, Tensor], *, last: bool) -> dict[str, Tensor]:
    """One block's tensors in the original layout."""
    out = {}
    for leaf in ("weight", "bias"):
        image, text = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))
        out[f"x_block.attn.qkv.{leaf}"] = torch.cat([block[f"attn.{name}.{leaf}"] for name in image])
        out[f"context_block.attn.qkv.{leaf}"] = torch.cat([block[f"attn.{name}.{leaf}"] for name in text])
        out[f"x_block.attn.proj.{leaf}"] = block[f"attn.to_out.0.{leaf}"]
        out[f"x_block.adaLN_modulation.1.{leaf}"] = block[f"norm1.linear.{leaf}"]
        modulation = block[f"norm1_context.linear.{leaf}"]
        out[f"context_block.adaLN_modulation.1.{leaf}"] = halves_swapped(modulation) if last else modulation
        for stream, name in (("x_block", "ff"), ("context_block", "ff_context")):
            if f"{name}.net.2.{leaf}" in block:
                out[f"{stream}.mlp.fc1.{leaf}"] = block[f"{name}.net.0.proj.{leaf}"]
                out[f"{stream}.mlp.fc2.{leaf}"] = block[f"{name}.net.2.{leaf}"]
        if not last:
            out[f"context_block.attn.proj.{leaf}"] = block[f"attn.to_add_out.{leaf}"]
        if f"attn2.to_q.{leaf}" in block:
            out[f"x_block.attn2.qkv.{leaf}"] = torch.cat([block[f"attn2.{name}.{leaf}"] for name in image])
            out[f"x_block.attn2.proj.{leaf}"] = block[f"attn2.to_out.0.{leaf}"]
    for stream, attention, suffix in (
        ("x_block", "attn", ""),
        ("context_block", "attn", "added_"),
        ("x_block", "attn2", ""),
    ):
        for letter in "qk":
            if f"{attention}.norm_{suffix}{letter}.weight" in block:
                norm = block[f"{attention}.norm_{suffix}{letter}.weight"]
                out[f"{stream}.{attention}.ln_{letter}.weight"] = norm
    return out


def vae(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The autoencoder's tensors in the original (CompVis) layout, without prefix; attention as 1x1 convolutions."""
    out = {}
    for name, tensor in state.items():
        side, *rest = name.split(".")
        text = ".".join(rest)
        for number in range(4):
            level = number if side == "encoder" else 3 - number
            text = text.replace(f"down_blocks.{number}.downsamplers.0.", f"down.{number}.downsample.")
            text = text.replace(f"up_blocks.{number}.upsamplers.0.", f"up.{3 - number}.upsample.")
            if text.startswith(f"{'down' if side == 'encoder' else 'up'}_blocks.{number}.resnets."):
                kind = "down" if side == "encoder" else "up"
                text = text.replace(f"{kind}_blocks.{number}.resnets.", f"{kind}.{level}.block.")
        text = text.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        text = text.replace("mid_block.resnets.0.", "mid.block_1.").replace("mid_block.resnets.1.", "mid.block_2.")
        if "mid_block.attentions.0." in text:
            text = text.replace("mid_block.attentions.0.", "mid.attn_1.")
            pairs = (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"))
            for theirs, ours in pairs:
                text = text.replace(f"attn_1.{theirs}.", f"attn_1.{ours}.")
            tensor = tensor[:, :, None, None] if tensor.dim() == 2 else tensor
        out[f"{side}.{text}"] = tensor
    return out


def state_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model's folder."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def write(
    pipeline: Path, file: Path, parts: str = "transformer vae clip t5", t5_dtype: torch.dtype | None = None
) -> Path:
    """A pipeline's weights in one file.

    Args:
        pipeline: a folder in diffusers' layout.
        file: where to.
        parts: which of transformer, vae, clip, t5.
        t5_dtype: of T5's matrices, if not as they are.
    """
    out: dict[str, Tensor] = {}
    if "transformer" in parts:
        layers = json.loads((pipeline / "transformer" / "config.json").read_text())["num_layers"]
        out |= {MMDIT + k: v for k, v in mmdit(state_of(pipeline / "transformer"), layers).items()}
    if "vae" in parts:
        out |= {VAE + k: v for k, v in vae(state_of(pipeline / "vae")).items()}
    if "clip" in parts:
        clip_l = state_of(pipeline / "text_encoder")
        projection = clip_l.pop("text_projection.weight")
        assert torch.equal(projection, torch.eye(len(projection))), "the original CLIP-L has no projection"
        out |= {CLIP_L + k: v for k, v in clip_l.items()}
        out |= {CLIP_G + k: v for k, v in state_of(pipeline / "text_encoder_2").items()}
    if "t5" in parts:
        t5 = state_of(pipeline / "text_encoder_3")
        out |= {T5 + k: v.to(t5_dtype) if t5_dtype and v.dim() == 2 else v for k, v in t5.items()}
    save_file({k: v.contiguous() for k, v in out.items()}, file)
    return file


def without_weights(pipeline: Path, folder: Path) -> Path:
    """Copy a pipeline without weights, which is what a single file needs in addition."""
    return Path(shutil.copytree(pipeline, folder, ignore=shutil.ignore_patterns("*.safetensors")))


def original_attention(layer: str) -> str:
    """The original name of an attention's layer in a U-Net with two layers a level: the blocks' numbers by counting."""
    place, _, leaf = layer.partition(".attentions.")
    number, _, inner = leaf.partition(".")
    if place == "mid_block":
        return f"middle_block.1.{inner}"
    level = int(place.rpartition(".")[2])
    if place.startswith("down"):
        return f"input_blocks.{1 + 3 * level + int(number)}.1.{inner}"  # two layers and the downsampler a level
    return f"output_blocks.{3 * level + int(number)}.1.{inner}"
