"""Count the floating-point operations of a training step of the UNet from shapes alone (``models/shared/flops.py``).

Convolutions are matrix products with a row for each output pixel. Skip connections add no products, and carry a
gradient only where the path through the middle does, too.

Shapes: b samples, n pixels of the latent at a level, t text tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from simpletune.models.shared.flops import Count, Flops, TrainedParameters
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.unet.shapes import Unit, parameter_shapes, pixels, unet_units


def unet_flops(
    config: ModelConfig,
    trained: TrainedParameters,
    size: tuple[int, int],
    batch: int,
    text: int,
    recomputed: Collection[str] = (),
) -> Flops:
    """Count the operations of one micro-batch; see ``Family.flops``.

    Args:
        text: t.
        recomputed: the units that checkpointing recomputes: modules of the UNet, or single transformer blocks.
    """
    count = Count(parameter_shapes(config), trained)

    def rows(halvings: int) -> int:
        return batch * pixels(size, halvings)

    time = count.chain(["time_embedding.linear_1", "time_embedding.linear_2"], batch, False)
    if "add_embedding.linear_1.weight" in count.shapes:
        time |= count.chain(["add_embedding.linear_1", "add_embedding.linear_2"], batch, False)
    x = count.linear("conv_in", rows(0), False)
    for unit in unet_units(config):
        before = count.flops.forward
        if unit.kind == "resnet":
            x = _resnet(count, unit, rows(unit.halvings), batch, x, time)
        elif unit.kind == "attention":
            x = _attention(count, unit, rows(unit.halvings), batch, text, x, recomputed)
        else:
            x = count.linear(f"{unit.name}.conv", rows(unit.halvings), x)
        if unit.name in recomputed and x:  # the backward pass reaches it
            count.flops.recomputed += count.flops.forward - before
    count.linear("conv_out", rows(0), count.norm("conv_norm_out", x))
    return count.flops


def _resnet(count: Count, unit: Unit, rows: int, batch: int, x: bool, time: bool) -> bool:
    """Count two convolutions with the time's projection between them, added to the input."""
    h = count.linear(f"{unit.name}.conv1", rows, count.norm(f"{unit.name}.norm1", x))
    h |= count.linear(f"{unit.name}.time_emb_proj", batch, time)
    h = count.linear(f"{unit.name}.conv2", rows, count.norm(f"{unit.name}.norm2", h))
    return h | (x if unit.inputs == unit.outputs else count.linear(f"{unit.name}.conv_shortcut", rows, x))


def _attention(
    count: Count, unit: Unit, rows: int, batch: int, text: int, x: bool, recomputed: Collection[str]
) -> bool:
    """Count self-attention, attention to the text and feed-forward of each transformer block, added to the input."""
    h = count.linear(f"{unit.name}.proj_in", rows, count.norm(f"{unit.name}.norm", x))
    pixels = rows // batch
    for number in range(unit.level.depth):
        block, before = f"{unit.name}.transformer_blocks.{number}", count.flops.forward

        def inside(name: str, rows: int, grad: bool, block: str = block) -> bool:
            return count.linear(f"{block}.{name}", rows, grad)

        normed = count.norm(f"{block}.norm1", h)
        q, k, v = (inside(f"attn1.{name}", rows, normed) for name in ("to_q", "to_k", "to_v"))
        h |= inside("attn1.to_out.0", rows, count.attention(batch, (pixels, pixels), unit.outputs, (q, k, v)))
        q = inside("attn2.to_q", rows, count.norm(f"{block}.norm2", h))
        k, v = (inside(f"attn2.{name}", batch * text, False) for name in ("to_k", "to_v"))
        h |= inside("attn2.to_out.0", rows, count.attention(batch, (pixels, text), unit.outputs, (q, k, v)))
        h |= inside("ff.net.2", rows, inside("ff.net.0.proj", rows, count.norm(f"{block}.norm3", h)))
        if block in recomputed and h:
            count.flops.recomputed += count.flops.forward - before
    return x | count.linear(f"{unit.name}.proj_out", rows, h)
