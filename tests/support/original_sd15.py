"""Write a Stable Diffusion 1.x or 2.x pipeline's weights as one file in the original layout.

Written from the layout itself, not from the loader's tables; the tests compare it with diffusers' own converters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import original_layout
import torch
from safetensors.torch import save_file
from torch import Tensor

UNET, VAE, TEXT = "model.diffusion_model.", "first_stage_model.", "cond_stage_model."
OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def unet_name(name: str, config: dict[str, Any]) -> str:
    """A tensor's original name: each level takes one step for each layer and one for its resizing."""
    for ours, theirs in OUTER.items():
        if name.startswith(f"{ours}."):
            return name.replace(ours, theirs, 1)
    rows = config["layers_per_block"] + 1
    middle = re.match(r"mid_block\.(resnets|attentions)\.(\d)\.(.*)", name)
    if middle:
        step = {"resnets0": 0, "attentions0": 1, "resnets1": 2}[middle[1] + middle[2]]
        return f"middle_block.{step}.{_inner(middle[1], middle[3])}"
    way, level, kind, layer, inner = re.match(r"(down|up)_blocks\.(\d)\.(\w+)\.(\d)\.(.*)", name).groups()  # type: ignore[union-attr]
    first = int(level) * rows
    if kind == "downsamplers":
        return f"input_blocks.{first + rows}.0.{inner.replace('conv', 'op')}"
    if kind == "upsamplers":
        attends = config["up_block_types"][int(level)].startswith("CrossAttn")
        return f"output_blocks.{first + rows - 1}.{1 + attends}.{inner}"
    step = f"input_blocks.{1 + first + int(layer)}" if way == "down" else f"output_blocks.{first + int(layer)}"
    return f"{step}.{int(kind == 'attentions')}.{_inner(kind, inner)}"


def _inner(kind: str, inner: str) -> str:
    layer, _, leaf = inner.rpartition(".")
    return f"{RESNET[layer]}.{leaf}" if kind == "resnets" else inner


def open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A CLIP encoder's tensors under OpenCLIP's names, with the last layer and the projection that nobody reads."""
    out, width = {}, state["final_layer_norm.weight"].shape[0]
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.layers."))
    for number in range(layers + 1):
        source = f"encoder.layers.{min(number, layers - 1)}."
        block = {name.removeprefix(source): t * (1 if number < layers else -1) for name, t in state.items()}
        into = f"transformer.resblocks.{number}."
        for leaf in ("weight", "bias"):
            parts = [block[f"self_attn.{letter}_proj.{leaf}"] for letter in "qkv"]
            out[f"{into}attn.in_proj_{leaf}"] = torch.cat(parts)
            out[f"{into}attn.out_proj.{leaf}"] = block[f"self_attn.out_proj.{leaf}"]
            for ours, theirs in (("layer_norm1", "ln_1"), ("layer_norm2", "ln_2")):
                out[f"{into}{theirs}.{leaf}"] = block[f"{ours}.{leaf}"]
            for ours, theirs in (("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj")):
                out[f"{into}{theirs}.{leaf}"] = block[f"{ours}.{leaf}"]
    out["positional_embedding"] = state["embeddings.position_embedding.weight"]
    out["token_embedding.weight"] = state["embeddings.token_embedding.weight"]
    out["ln_final.weight"], out["ln_final.bias"] = state["final_layer_norm.weight"], state["final_layer_norm.bias"]
    out["text_projection"], out["logit_scale"] = torch.zeros(width, width), torch.tensor(1.0)
    return out


def write(pipeline: Path, file: Path, parts: str = "unet vae text") -> Path:
    """A pipeline's weights in one file, with tensors of the training that a loader must ignore.

    Args:
        pipeline: a folder in diffusers' layout.
        file: where to.
        parts: which of unet, vae, text.
    """
    out: dict[str, Tensor] = {"alphas_cumprod": torch.ones(1000), "model_ema.decay": torch.tensor(0.9999)}
    config = json.loads((pipeline / "unet" / "config.json").read_text())
    if "unet" in parts:
        out |= {UNET + unet_name(name, config): t for name, t in original_layout.state_of(pipeline / "unet").items()}
    if "vae" in parts:
        out |= {VAE + name: t for name, t in original_layout.vae(original_layout.state_of(pipeline / "vae")).items()}
    if "text" in parts:
        state = original_layout.state_of(pipeline / "text_encoder")
        linear = config["use_linear_projection"]
        text = (
            {f"model.{k}": t for k, t in open_clip(state).items()}
            if linear
            else {f"transformer.{k}": t for k, t in state.items()}
        )
        out |= {TEXT + name: tensor for name, tensor in text.items()}
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, file)
    return file
