"""SD3's transformer (MMDiT, arXiv:2403.03206) written out by hand, from a state dict in diffusers' key names.

Part of the independent reference: it imports neither the package under test nor diffusers' transformer classes.

Shapes: b batch, n image tokens (h/p * w/p), l text tokens, d width of the model, p patch size.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class MMDiT:
    """The weights of one transformer and the two numbers that their shapes do not tell."""

    weights: dict[str, Tensor]
    """State dict in diffusers' names; a LoRA adds `<module>.lora_A.weight` and `<module>.lora_B.weight`."""
    heads: int
    patch_size: int
    lora_scale: float = 0.0
    """alpha / rank."""

    def has(self, module: str) -> bool:
        return f"{module}.weight" in self.weights

    @property
    def blocks(self) -> int:
        return sum(1 for key in self.weights if key.endswith(".norm1.linear.weight"))


def load(folder: Path) -> MMDiT:
    """Reads a diffusers `transformer` folder, one file or sharded, as fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    files = {"diffusion_pytorch_model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    weights = {key: value.float() for file in sorted(files) for key, value in load_file(folder / file).items()}
    return MMDiT(weights, heads=config["num_attention_heads"], patch_size=config["patch_size"])


def linear(model: MMDiT, module: str, x: Tensor) -> Tensor:
    """W x + b, and with a LoRA on the module + scale * B A x (arXiv:2106.09685, eq. 3)."""
    y = F.linear(x, model.weights[f"{module}.weight"], model.weights[f"{module}.bias"])
    if not model.has(f"{module}.lora_A"):
        return y
    a, b = model.weights[f"{module}.lora_A.weight"], model.weights[f"{module}.lora_B.weight"]
    return y + model.lora_scale * (x @ a.T @ b.T)


def mlp(model: MMDiT, first: str, second: str, x: Tensor) -> Tensor:
    """Two linears with SiLU between them."""
    return linear(model, second, F.silu(linear(model, first, x)))


def feed_forward(model: MMDiT, module: str, x: Tensor) -> Tensor:
    """Two linears with the tanh approximation of GELU between them."""
    hidden = F.gelu(linear(model, f"{module}.net.0.proj", x), approximate="tanh")
    return linear(model, f"{module}.net.2", hidden)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without parameters, then (1 + scale) x + shift (adaLN, arXiv:2212.09748)."""
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    x = (x - mean) * torch.rsqrt(variance + 1e-6)
    return x * (1 + scale[:, None]) + shift[:, None]


def rms_norm(model: MMDiT, module: str, x: Tensor) -> Tensor:
    """x / rms(x) * weight over the last axis; the identity where the checkpoint has no such norm (SD3.0)."""
    if not model.has(module):
        return x
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * model.weights[f"{module}.weight"]


def embed_timestep(timestep: Tensor) -> Tensor:  # [b] -> [b, 256]
    """Sinusoids with wavelengths 2 pi to 10000 * 2 pi, the cosines first."""
    frequencies = torch.exp(-math.log(10000) / 128 * torch.arange(128, dtype=torch.float32))
    angles = timestep[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def embed_patches(model: MMDiT, z_t: Tensor) -> Tensor:  # [b, c, h, w] -> [b, n, d]
    """Patches through one linear, plus the centre crop of the table of positions."""
    p = model.patch_size
    b, c, h, w = z_t.shape
    rows, columns = h // p, w // p
    patches = z_t.reshape(b, c, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, c * p * p)
    image = F.linear(patches, model.weights["pos_embed.proj.weight"].flatten(1), model.weights["pos_embed.proj.bias"])
    table = model.weights["pos_embed.pos_embed"]  # [1, side * side, d]
    side = math.isqrt(table.shape[1])
    top, left = (side - rows) // 2, (side - columns) // 2
    positions = table.reshape(side, side, -1)[top : top + rows, left : left + columns]
    return image + positions.reshape(1, rows * columns, -1)


def project(model: MMDiT, attn: str, names: tuple[str, ...], norms: tuple[str, ...], x: Tensor) -> list[Tensor]:
    """Query, key and value of one stream, each [b, heads, tokens, d / heads]; query and key are normed."""
    parts = [linear(model, f"{attn}.{name}", x).unflatten(-1, (model.heads, -1)).transpose(1, 2) for name in names]
    return [rms_norm(model, f"{attn}.{norm}", part) for norm, part in zip(norms, parts[:2], strict=True)] + parts[2:]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # three [b, heads, m, d / heads] -> [b, m, d]
    """softmax(q k^T / sqrt(width of a head)) v."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


def image_projections(model: MMDiT, attn: str, x: Tensor) -> list[Tensor]:
    return project(model, attn, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), x)


def context_projections(model: MMDiT, attn: str, x: Tensor) -> list[Tensor]:
    names = ("add_q_proj", "add_k_proj", "add_v_proj")
    return project(model, attn, names, ("norm_added_q", "norm_added_k"), x)


def joint_block(
    model: MMDiT,
    block: str,
    image: Tensor,  # [b, n, d]
    context: Tensor,  # [b, l, d]
    condition: Tensor,  # [b, d], after SiLU
) -> tuple[Tensor, Tensor]:
    """One MMDiT block (arXiv:2403.03206, figure 2b); the last one reads the context and does not update it."""
    context_pre_only = not model.has(f"{block}.ff_context.net.2")
    image_parts = linear(model, f"{block}.norm1.linear", condition)
    # SD3.5's dual blocks carry nine vectors: the six of SD3, then shift, scale and gate of `attn2`.
    chunks = 9 if model.has(f"{block}.attn2.to_q") else 6
    shift, scale, gate, ff_shift, ff_scale, ff_gate, *second = image_parts.chunk(chunks, dim=1)
    context_parts = linear(model, f"{block}.norm1_context.linear", condition)
    if context_pre_only:
        # diffusers' AdaLayerNormContinuous: scale first, then shift, the other way round than everywhere else.
        context_scale, context_shift = context_parts.chunk(2, dim=1)
    else:
        context_shift, context_scale, context_gate, *context_ff = context_parts.chunk(6, dim=1)

    n = image.shape[1]
    attn = f"{block}.attn"
    streams = zip(
        image_projections(model, attn, modulate(image, shift, scale)),
        context_projections(model, attn, modulate(context, context_shift, context_scale)),
        strict=True,
    )
    mixed = attention(*[torch.cat(pair, dim=2) for pair in streams])  # [b, n + l, d]

    updated = image + gate[:, None] * linear(model, f"{attn}.to_out.0", mixed[:, :n])
    if second:
        shift_2, scale_2, gate_2 = second
        own = attention(*image_projections(model, f"{block}.attn2", modulate(image, shift_2, scale_2)))
        updated = updated + gate_2[:, None] * linear(model, f"{block}.attn2.to_out.0", own)
    updated = updated + ff_gate[:, None] * feed_forward(model, f"{block}.ff", modulate(updated, ff_shift, ff_scale))
    if context_pre_only:
        return updated, context

    context = context + context_gate[:, None] * linear(model, f"{attn}.to_add_out", mixed[:, n:])
    ff_shift, ff_scale, ff_gate = context_ff
    hidden = feed_forward(model, f"{block}.ff_context", modulate(context, ff_shift, ff_scale))
    return updated, context + ff_gate[:, None] * hidden


def predict(
    model: MMDiT,
    z_t: Tensor,  # [b, c, h, w]
    timestep: Tensor,  # [b], 1000 * sigma
    prompt_embeds: Tensor,  # [b, l, text width]
    pooled: Tensor,  # [b, pooled width]
) -> Tensor:  # [b, c, h, w]
    """The velocity that the transformer predicts for z_t."""
    embed = "time_text_embed"
    condition = mlp(
        model, f"{embed}.timestep_embedder.linear_1", f"{embed}.timestep_embedder.linear_2", embed_timestep(timestep)
    )
    condition = condition + mlp(model, f"{embed}.text_embedder.linear_1", f"{embed}.text_embedder.linear_2", pooled)
    condition = F.silu(condition)
    image = embed_patches(model, z_t)
    context = linear(model, "context_embedder", prompt_embeds)
    for i in range(model.blocks):
        image, context = joint_block(model, f"transformer_blocks.{i}", image, context, condition)
    # Scale first, then shift, as in the last block's context norm.
    scale, shift = linear(model, "norm_out.linear", condition).chunk(2, dim=1)
    patches = linear(model, "proj_out", modulate(image, shift, scale))  # [b, n, p * p * c]
    p = model.patch_size
    b, _, h, w = z_t.shape
    return patches.reshape(b, h // p, w // p, p, p, -1).permute(0, 5, 1, 3, 2, 4).reshape(b, -1, h, w)
