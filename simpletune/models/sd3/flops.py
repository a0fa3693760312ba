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
        block = _Block(count, f"transformer_blocks.{number}", b, image, text, last=number == layers - 1)
        x, y = block.count(x, y, condition, dual=number in dual)
        if number < checkpointed:
            count.flops.recomputed += count.flops.forward - before
    x |= count.linear("norm_out.linear", b, condition)
    count.linear("proj_out", n, x)
    return count.flops


class _Block:
    """A joint block (arXiv:2403.03206, figure 2b), as diffusers implements it."""

    def __init__(self, count: Count, name: str, batch: int, image: int, text: int, last: bool):
        self._count, self._name, self._batch, self._last = count, name, batch, last
        self._image, self._text = image, text
        self._width = count.shapes[f"{name}.attn.to_q.weight"][0]

    def count(self, x: bool, y: bool, condition: bool, dual: bool) -> tuple[bool, bool]:
        """Count the block's operations. Takes and returns whether image and text tokens carry gradients."""
        n, t = self._batch * self._image, self._batch * self._text
        scale_x = self._linear("norm1.linear", self._batch, condition)
        scale_y = self._linear("norm1_context.linear", self._batch, condition)
        attended = self._project("attn", ("to_q", "to_k", "to_v"), n, x or scale_x)
        attended |= self._project("attn", ("add_q_proj", "add_k_proj", "add_v_proj"), t, y or scale_y)
        attended = self._count.attention(self._batch, self._image + self._text, self._width, attended)
        out_x = self._linear("attn.to_out.0", n, attended) or x or scale_x
        if dual:
            attended2 = self._project("attn2", ("to_q", "to_k", "to_v"), n, x or scale_x)
            attended2 = self._count.attention(self._batch, self._image, self._width, attended2)
            out_x |= self._linear("attn2.to_out.0", n, attended2)
        out_x |= self._feed_forward("ff", n, out_x)
        if self._last:
            return out_x, False
        out_y = self._linear("attn.to_add_out", t, attended) or y or scale_y
        return out_x, self._feed_forward("ff_context", t, out_y)

    def _linear(self, name: str, rows: int, grad: bool) -> bool:
        return self._count.linear(f"{self._name}.{name}", rows, grad)

    def _project(self, attention: str, names: tuple[str, ...], rows: int, grad: bool) -> bool:
        """The projections before attention. The norms of q and k add no products, but may be trained."""
        norms = ("norm_q", "norm_k") if names[0] == "to_q" else ("norm_added_q", "norm_added_k")
        flows = [self._linear(f"{attention}.{name}", rows, grad) for name in names]
        return any(flows) or any(self._count.trains(f"{self._name}.{attention}.{norm}.weight") for norm in norms)

    def _feed_forward(self, name: str, rows: int, grad: bool) -> bool:
        names = [f"{self._name}.{name}.net.0.proj", f"{self._name}.{name}.net.2"]
        return self._count.chain(names, rows, grad)
