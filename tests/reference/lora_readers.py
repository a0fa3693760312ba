"""How ComfyUI applies a LoRA file to SD3 in the original layout, written out by hand.

Part of the independent reference: it imports neither the package under test nor diffusers. Rules after ComfyUI's
`comfy/lora.py` and `mmdit_to_diffusers`: of every weight it knows several names; whatever the name, the weight gets
strength * alpha / rank * up @ down, with alpha = rank where the file has no `.alpha`; names of diffusers reach a third
of a fused q, k, v, or a modulation whose halves change places. Keys that nothing asks for are only logged there.
"""

import torch
from torch import Tensor

PAIRS = ((".lora_up.weight", ".lora_down.weight"), (".lora_B.weight", ".lora_A.weight"))
BLOCK = {
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn2.to_out.0": "x_block.attn2.proj",
}
THIRDS = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
}
OUTSIDE = {
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
}


def targets(state: dict[str, Tensor], blocks: int) -> dict[str, tuple[str, int | None, bool]]:
    """Names in LoRA files, each with the weight it is for, which third of it, and whether its halves change places."""
    known: dict[str, tuple[str, int | None, bool]] = {}
    for weight in state:
        if weight.endswith(".weight"):
            module = weight.removesuffix(".weight")
            known["lora_unet_" + module.replace(".", "_")] = (weight, None, False)
            known["diffusion_model." + module] = (weight, None, False)
    theirs = {name: (f"{module}.weight", None, name == "norm_out.linear") for name, module in OUTSIDE.items()}
    for number in range(blocks):
        here, there = f"transformer_blocks.{number}.", f"joint_blocks.{number}."
        for name, module in BLOCK.items():
            last = name == "norm1_context.linear" and number == blocks - 1
            theirs[here + name] = (f"{there}{module}.weight", None, last)
        for module, names in THIRDS.items():
            for third, name in enumerate(names):
                theirs[here + name] = (f"{there}{module}.weight", third, False)
    for name, target in theirs.items():
        known["transformer." + name] = target
        known["lora_transformer_" + name.replace(".", "_")] = target
    return known


def apply(
    state: dict[str, Tensor],  # original names without prefix
    file: dict[str, Tensor],
    blocks: int,
    strength: float = 1.0,
) -> tuple[dict[str, Tensor], list[str]]:
    """The state with the file applied, and the keys of the file that nothing asked for."""
    patched = {name: tensor.clone() for name, tensor in state.items()}
    used = set()
    for name, (weight, third, swapped) in targets(state, blocks).items():
        for up_ending, down_ending in PAIRS:
            if name + up_ending not in file:
                continue
            up, down = file[name + up_ending].double(), file[name + down_ending].double()
            used |= {name + up_ending, name + down_ending}
            scale = 1.0
            if name + ".alpha" in file:
                scale = file[name + ".alpha"].item() / down.shape[0]
                used.add(name + ".alpha")
            difference = strength * scale * (up @ down)
            if swapped:
                difference = torch.cat(difference.chunk(2)[::-1])
            whole = patched[weight]
            part = whole if third is None else whole.chunk(3)[third]
            part += difference.to(whole.dtype)
    return patched, sorted(set(file) - used)
