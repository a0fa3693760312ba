"""A LoRA update added into its layer's output by the product itself.

PEFT computes the update, multiplies it by its scale and adds it to the layer's output: three tensors of the output's
size, written and read. Here the product with the second factor adds to the output in place, and rounds once. Counted
with checkpointing, a layer's step reads or writes 13 tensors of the activations' size for its update instead of 23.

Shapes: n rows (samples x tokens), i inputs, o outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor, nn


class _Added(torch.autograd.Function):
    """y += scale (x A^T) B^T for each of some layers that read the same x, in the type of y; returns each y.

    What made a y must not need it for its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float], *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(scales)
        ys, downs, ups = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        dtype, ranks = ys[0].dtype, [down.shape[0] for down in downs]
        x, ups = x.to(dtype), tuple(b.to(dtype) for b in ups)
        a = _joined([down.to(dtype) for down in downs], dim=0)  # [all r, i]
        down = x.flatten(0, -2) @ a.t()  # [n, all r]
        for y, part, b, scale in zip(ys, down.split(ranks, dim=1), ups, scales, strict=True):
            y.detach().view(-1, y.shape[-1]).addmm_(part, b.t(), alpha=scale)
        ctx.save_for_backward(x, down, a, *ups)
        ctx.scales, ctx.ranks = scales, ranks
        return tuple(y.view_as(y) for y in ys)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, down, a, *ups = ctx.saved_tensors
        count, scales, ranks = len(ups), ctx.scales, ctx.ranks
        wants_x, wants_a, wants_b = (any(ctx.needs_input_grad[at]) for at in _places(count))
        rows = [grad.flatten(0, -2) for grad in grads]  # [n, o] each
        shares = [_scaled(row @ b, scale) for row, b, scale in zip(rows, ups, scales, strict=True)]
        grad_down = _joined(shares, dim=1)  # [n, all r]
        grad_x = (grad_down @ a).view(x.shape) if wants_x else None
        grads_a: Sequence[Tensor | None] = [None] * count
        grads_b: Sequence[Tensor | None] = [None] * count
        if wants_a:
            grads_a = (grad_down.t() @ x.flatten(0, -2)).split(ranks)
        if wants_b:
            parts = down.split(ranks, dim=1)
            grads_b = [_scaled(row.t() @ part, scale) for row, part, scale in zip(rows, parts, scales, strict=True)]
        return grad_x, None, *grads, *grads_a, *grads_b


def _places(count: int) -> tuple[slice, slice, slice]:
    """Where x, the first and the second factors stand among what so many layers gave."""
    return slice(0, 1), slice(2 + count, 2 + 2 * count), slice(2 + 2 * count, None)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """One tensor of several; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _scaled(product: Tensor, scale: float) -> Tensor:
    """A fresh product times the scale, which is 1 by default, in place."""
    return product if scale == 1 else product.mul_(scale)


def add_updates(
    ys: Sequence[Tensor],  # each [..., o]
    x: Tensor,  # [..., i]
    downs: Sequence[Tensor],  # each [r, i]
    ups: Sequence[Tensor],  # each [o, r]
    scales: Sequence[float],
) -> tuple[Tensor, ...]:  # each [..., o]
    """y + scale (x A^T) B^T for layers that read the same x, in the type of y: one product with all first factors.

    The memory of each y is used again: nobody may need y itself any more. Under ``torch.compile``, which joins them
    itself, as an expression; so too where a y has no rows to add to in place.
    """
    if torch.compiler.is_compiling() or not all(y.is_contiguous() for y in ys):
        triples = zip(ys, downs, ups, scales, strict=True)
        return tuple(
            y + scale * F.linear(F.linear(x.to(y.dtype), a.to(y.dtype)), b.to(y.dtype)) for y, a, b, scale in triples
        )
    added: tuple[Tensor, ...] = _Added.apply(x, tuple(scales), *ys, *downs, *ups)
    return added


def add_update(
    y: Tensor,  # [..., o]
    x: Tensor,  # [..., i]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # [..., o]
    """``add_updates`` of one layer."""
    return add_updates([y], x, [a], [b], [scale])[0]


def project(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """What linear layers make of the same input, with their updates, if all have such, added at once.

    Args:
        layers: with or without an update, quantised or not.
        x: [..., i].

    Returns:
        Of each layer [..., o].
    """
    wrapped = [layer for layer in layers if _adds_in_place(layer)]
    if len(wrapped) < len(layers):
        return [layer(x) for layer in layers]
    updates = [_update_of(layer, layer.active_adapters[0]) for layer in wrapped]
    return list(add_updates([layer.base_layer(x) for layer in wrapped], x, *zip(*updates, strict=True)))


def _adds_in_place(layer: Any) -> TypeGuard[LoraLayer]:
    """Whether a layer has one update, on, unmerged, without dropout, that is added in place."""
    if not isinstance(layer, LoraLayer) or layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    (name,) = layer.active_adapters
    return isinstance(layer.lora_variant.get(name), AddedInPlace) and isinstance(layer.lora_dropout[name], nn.Identity)


def _update_of(layer: LoraLayer, name: str) -> tuple[Tensor, Tensor, float]:
    """The factors [r, i] and [o, r] of an update, and its scale."""
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


class AddedInPlace(LoraVariant):
    """PEFT's hook for another way to apply an update: it calls ``forward`` with the layer's output."""

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **more: Any) -> Tensor:
        """The output [..., o] with one adapter's update."""
        dropped = module.lora_dropout[active_adapter](x)
        return add_update(result, dropped, *_update_of(module, active_adapter))
