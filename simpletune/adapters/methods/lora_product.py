"""Add a LoRA update to its layer's output within the matmul.

PEFT computes the update, multiplies it by its scale and adds it to the layer's output, which writes and reads three
tensors of the output's size. Here the matmul with the second factor adds to the output in place and rounds once. With
checkpointing, a layer's update reads or writes 13 tensors of the activations' size per step instead of 23.

Shapes: n rows (samples x tokens), i inputs, o outputs, r rank; of convolutions b samples, p pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor

Context = Any
"""Context of an autograd function, whose ``saved_tensors`` and ``needs_input_grad`` have no useful types."""


class _Added(torch.autograd.Function):
    """Compute y += scale (x A^T) B^T in the type of y and return y. The op that made y must not need y for backward."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        down = x.flatten(0, -2) @ a.t()  # [n, r]
        y.detach().view(-1, y.shape[-1]).addmm_(down, b.t(), alpha=scale)
        ctx.save_for_backward(x, down, a, b)
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        x, down, a, b = ctx.saved_tensors
        _, wants_x, wants_a, wants_b, _ = ctx.needs_input_grad
        rows = grad_y.flatten(0, -2)  # [n, o]
        grad_down = _scaled(rows @ b, ctx.scale)  # [n, r]
        grad_x = (grad_down @ a).view(x.shape) if wants_x else None
        grad_a = grad_down.t() @ x.flatten(0, -2) if wants_a else None
        grad_b = _scaled(rows.t() @ down, ctx.scale) if wants_b else None
        return grad_y, grad_x, grad_a, grad_b, None


class _AddedPointwise(torch.autograd.Function):
    """Compute y += scale B (A x) for a 1x1 convolution, under the conditions of ``_Added``."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        down = a @ x.flatten(2)  # [b, r, p]
        batch = b.expand(len(x), *b.shape)
        y.detach().view(*y.shape[:2], -1).baddbmm_(batch, down, alpha=scale)
        ctx.save_for_backward(x, down, a, b)
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [b, o, h, w]
        x, down, a, b = ctx.saved_tensors
        _, wants_x, wants_a, wants_b, _ = ctx.needs_input_grad
        pixels = grad_y.flatten(2)  # [b, o, p]
        grad_down = _scaled(b.t() @ pixels, ctx.scale)  # [b, r, p]
        grad_x = (a.t() @ grad_down).view(x.shape) if wants_x else None
        grad_a = (grad_down @ x.flatten(2).transpose(1, 2)).sum(0) if wants_a else None
        grad_b = _scaled((pixels @ down.transpose(1, 2)).sum(0), ctx.scale) if wants_b else None
        return grad_y, grad_x, grad_a, grad_b, None


def _scaled(product: Tensor, scale: float) -> Tensor:
    """Multiply a fresh tensor by the scale in place."""
    return product if scale == 1 else product.mul_(scale)


def add_update(
    y: Tensor,  # [..., o]
    x: Tensor,  # [..., i]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # [..., o]
    """Add a LoRA update to a layer's output: y + scale (x A^T) B^T (arXiv:2106.09685, eq. 3), in the type of y.

    Overwrites y, so nothing else may need it. Computes a new tensor instead under ``torch.compile``, which fuses the
    expression itself, and if y is not contiguous.

    Args:
        y: layer output without the update.
        x: layer input after dropout.
        a: first factor.
        b: second factor.
        scale: alpha / r.

    Returns:
        The output with the update, in the memory of y if y was overwritten.
    """
    if torch.compiler.is_compiling() or not y.is_contiguous():
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        return y + scale * F.linear(F.linear(x, a), b)
    added: Tensor = _Added.apply(y, x, a, b, scale)
    return added


def add_pointwise_update(
    y: Tensor,  # [b, o, h, w]
    x: Tensor,  # [b, i, h, w]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # [b, o, h, w]
    """Apply ``add_update`` at every pixel of the output of a 1x1 convolution, with channels first.

    Channels-last tensors go through ``add_update`` itself: their last dimension is the channels.
    """
    if y.is_contiguous() and not torch.compiler.is_compiling():
        added: Tensor = _AddedPointwise.apply(y, x, a, b, scale)
        return added
    return add_update(y.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1), a, b, scale).permute(0, 3, 1, 2)


class InPlaceLoraVariant(LoraVariant):
    """Apply an update through PEFT's hook, which calls ``forward`` with the layer's output."""

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **more: Any) -> Tensor:
        """Return the output, [..., o] or [b, o, h, w] for a 1x1 convolution, with one adapter's update."""
        a, b = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        dropped = module.lora_dropout[active_adapter](x)
        add = add_update if a.ndim == 2 else add_pointwise_update
        b = b.flatten(1)
        if (update_dropout := getattr(module, "update_dropout", None)) is not None:
            b = update_dropout(b)
        return add(result, dropped, a.flatten(1), b, module.scaling[active_adapter])
