"""Map diffusers' tensors of SD3's transformer to the original layout (Stability, ComfyUI).

The original layout uses other names, stacks q, k and v of a stream in one tensor, and stores shift before scale, rather
than scale before shift, in the two modulations without gates (``norm_out`` and the last block's ``norm1_context``).
"""

from __future__ import annotations

from simpletune.models.shared.single_file import Origin

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
    f"{attention}.{projection}": (f"{stream}.{attention}.qkv", third)
    for attention, stream, projections in (
        ("attn", "x_block", ("to_q", "to_k", "to_v")),
        ("attn", "context_block", ("add_q_proj", "add_k_proj", "add_v_proj")),
        ("attn2", "x_block", ("to_q", "to_k", "to_v")),
    )
    for third, projection in enumerate(projections)
}


def origin_of(name: str, layers: int) -> Origin:
    """The source of the tensor that diffusers calls ``name``, for this number of blocks; KeyError if there is none."""
    if name in OUTER:
        return Origin(OUTER[name])
    layer, _, leaf = name.rpartition(".")
    if layer in OUTER:
        return Origin(f"{OUTER[layer]}.{leaf}", swapped=layer == "norm_out.linear")
    _, number, inner = layer.split(".", 2)
    block = f"joint_blocks.{number}"
    if inner in FUSED:
        fused, third = FUSED[inner]
        return Origin(f"{block}.{fused}.{leaf}", third)
    last = int(number) == layers - 1
    return Origin(f"{block}.{IN_BLOCK[inner]}.{leaf}", swapped=last and inner == "norm1_context.linear")
