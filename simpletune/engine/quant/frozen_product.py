"""A product with a frozen weight that is kept packed, and unpacked in each pass.

Shapes: i input and o output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Packed = tuple[Callable[..., Tensor], tuple[Any, ...], tuple[Tensor, ...]]
"""A function of a type, constants and tensors that returns a weight [o, i] in that type; the constants; the tensors. A
partial function instead would be another one for each layer, which the compiler takes for another graph."""


def frozen_product(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:  # [..., i] -> [..., o]
    """Compute x W^T + bias in the type of x, for whose gradient only references to the packed weight are kept."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return multiply(x, weight, bias)
    unpack, constants, packed = weight
    result: Tensor = _QuantisedProduct.apply(x, unpack, constants, bias, *packed)
    return result


def multiply(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Compute the product, in whose kernel the bias is added."""
    unpack, constants, packed = weight
    return F.linear(x, unpack(x.dtype, *constants, *packed), None if bias is None else bias.to(x.dtype))


class _QuantisedProduct(torch.autograd.Function):
    """See ``frozen_product``. Traces tell by the name what unpacks (profiling/figures.py)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        unpack: Callable[..., Tensor],
        constants: tuple[Any, ...],
        bias: Tensor | None,
        *packed: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*packed)
        ctx.unpack, ctx.constants = unpack, constants
        return multiply(x, (unpack, constants, packed), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        packed, grad_x = ctx.saved_tensors, None
        if ctx.needs_input_grad[0]:
            grad_x = grad_y @ ctx.unpack(grad_y.dtype, *ctx.constants, *packed)
        return grad_x, None, None, None, *[None] * len(packed)
