"""A product with a frozen weight that is kept packed, and unpacked in each pass.

Shapes: i input and o output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Packed = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
"""A function of a type and tensors that returns a weight [o, i] in that type, and the tensors."""


def frozen_product(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:  # [..., i] -> [..., o]
    """x W^T + bias in the type of x, for whose gradient only references to the packed weight are kept."""
    unpack, packed = weight
    if not torch.is_grad_enabled():
        return multiplied(x, unpack, bias, packed)
    result: Tensor = _QuantisedProduct.apply(x, unpack, bias, *packed)
    return result


def multiplied(x: Tensor, unpack: Callable[..., Tensor], bias: Tensor | None, packed: tuple[Tensor, ...]) -> Tensor:
    """The product, in whose kernel the bias is added."""
    return F.linear(x, unpack(x.dtype, *packed), None if bias is None else bias.to(x.dtype))


class _QuantisedProduct(torch.autograd.Function):
    """See ``frozen_product``. Traces tell by the name what unpacks (profiling/figures.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unpack: Callable[..., Tensor], bias: Tensor | None, *packed: Tensor) -> Tensor:
        ctx.save_for_backward(*packed)
        ctx.unpack = unpack
        return multiplied(x, unpack, bias, packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        packed = ctx.saved_tensors
        grad_x = grad_y @ ctx.unpack(grad_y.dtype, *packed) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, *[None] * len(packed)
