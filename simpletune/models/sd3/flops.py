"""Count the operations of SD3's transformer.

Shapes: b samples, n image tokens, t text tokens.
"""

from __future__ import annotations

import math

from simpletune.models.sd3.shapes import parameter_shapes
from simpletune.models.shared.buckets import DOWNSAMPLING
from simpletune.models.shared.flops import Count, Flops, TrainedParameters
from simpletune.models.shared.model_config import ModelConfig


def sd3_flops(
    config: ModelConfig, trained: TrainedParameters, size: tuple[int, int], batch: int, text: int, checkpointed: int = 0
) -> Flops:
    """Count the operations of one micro-batch with t = ``text`` tokens; see ``Family.flops``."""
    count = Count(parameter_shapes(config), trained)
    image = math.prod(side // DOWNSAMPLING // config["patch_size"] for side in size)
    b, n, t = batch, batch * image, batch * text
    embed = "time_text_embed"
    condition = count.chain([f"{embed}.timestep_embedder.linear_1", f"{embed}.timestep_embedder.linear_2"], b, False)
    condition |= count.chain([f"{embed}.text_embedder.linear_1", f"{embed}.text_embedder.linear_2"], b, False)
    x = count.linear("pos_embed.proj", n, False)
    y = count.linear("context_embedder", t, False)
    layers, dual = config["num_layers"], config.get("dual_attention_layers") or ()
    for number in range(layers):
        before = count.flops.forward
        name, last = f"transformer_blocks.{number}", number == layers - 1
        x, y = _joint_block(count, name, (b, image, text), (x, y, condition), last, number in dual)
        if number < checkpointed:
            count.flops.recomputed += count.flops.forward - before
    x |= count.linear("norm_out.linear", b, condition)
    count.linear("proj_out", n, x)
    return count.flops


def _joint_block(
    count: Count, name: str, sizes: tuple[int, int, int], grads: tuple[bool, bool, bool], last: bool, dual: bool
) -> tuple[bool, bool]:
    """Count a joint block (arXiv:2403.03206, figure 2b), as diffusers implements it.

    Args:
        sizes: samples, and image and text tokens of each.
        grads: whether image tokens, text tokens and their conditioning carry gradients.

    Returns:
        Whether image and text tokens carry gradients after it.
    """
    (batch, image, text), (x, y, condition) = sizes, grads
    n, t, width = batch * image, batch * text, count.shapes[f"{name}.attn.to_q.weight"][0]

    def linear(layer: str, rows: int, grad: bool) -> bool:
        return count.linear(f"{name}.{layer}", rows, grad)

    def project(attention: str, layers: str, rows: int, grad: bool) -> bool:
        """The projections before attention. The norms of q and k add no products, but may be trained."""
        q, k, v, *norms = (f"{attention}.{layer}" for layer in layers.split())
        flows = [linear(layer, rows, grad) for layer in (q, k, v)]
        return any(flows) or any(count.trains(f"{name}.{norm}.weight") for norm in norms)

    scale_x, scale_y = linear("norm1.linear", batch, condition), linear("norm1_context.linear", batch, condition)
    attended = project("attn", "to_q to_k to_v norm_q norm_k", n, x or scale_x)
    attended |= project("attn", "add_q_proj add_k_proj add_v_proj norm_added_q norm_added_k", t, y or scale_y)
    joint = image + text
    attended = count.attention(batch, (joint, joint), width, (attended, attended, attended))
    out_x = linear("attn.to_out.0", n, attended) or x or scale_x
    if dual:
        alone = project("attn2", "to_q to_k to_v norm_q norm_k", n, x or scale_x)
        alone = count.attention(batch, (image, image), width, (alone, alone, alone))
        out_x |= linear("attn2.to_out.0", n, alone)
    out_x |= linear("ff.net.2", n, linear("ff.net.0.proj", n, out_x))
    if last:
        return out_x, False
    out_y = linear("attn.to_add_out", t, attended) or y or scale_y
    return out_x, linear("ff_context.net.2", t, linear("ff_context.net.0.proj", t, out_y))
