"""The frozen int8 linear layer. It multiplies with the dequantised weight, or in int8 (int8_products.py).

Shapes: n rows (samples x tokens), i input and o output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simpletune.quant import int8_products


def quantise_rows(
    weight: Tensor,  # [o, i]
) -> tuple[Tensor, Tensor]:  # int8 [o, i], fp32 [o]
    """Quantise to symmetric round-to-nearest int8 with one scale per row: weight ~ q * scale, |error| <= scale / 2.

    The scale is the row's largest magnitude / 127, rounded up to a bf16 number, so that multiplying by it in bf16 adds
    no error. A row of zeros gets scale 1.
    """
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127
    rounded = scale.bfloat16()
    rounded = torch.where(
        rounded.float() < scale, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded
    )
    scale = torch.where(scale > 0, rounded.float(), torch.ones_like(scale))
    q = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return q, scale


class _FrozenInt8Product(torch.autograd.Function):
    """y = x W^T + bias, W = q * scale; saves only references to q and scale for the backward pass.

    Scaling the weight instead of the output, and adding the bias in the product itself, spares a pass each over the
    activations; W is rounded to the input's type.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, scale)
        weight = int8_products.dequantised(q, scale, x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None]:  # [..., o]
        q, scale = ctx.saved_tensors
        grad_x = int8_products.input_gradient(grad_y, q, scale) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


class Int8Linear(nn.Linear):
    """A frozen ``nn.Linear`` with int8 weight [o, i], fp32 ``scale`` [o] and an optional bias [o].

    PEFT wraps it like any linear layer. ``to(dtype)`` does not cast its int8 weight.
    """

    scale: Tensor
    int8_products = False
    """Whether to multiply in int8, if there are enough rows and the device supports it."""
    int8_gradient = False
    """Whether to compute the input gradient in int8 as well."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype) -> Int8Linear:
        """Quantise a linear layer on its device.

        Args:
            linear: the layer, with weights in any floating type.
            dtype: the type of the bias.
        """
        twin = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        q, scale = quantise_rows(linear.weight.detach())
        twin.weight = nn.Parameter(q, requires_grad=False)
        twin.register_buffer("scale", scale)
        if linear.bias is not None:
            twin.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
        return twin

    def forward(self, x: Tensor) -> Tensor:  # [..., i] -> [..., o]
        """Compute the product in the input's type."""
        if self.int8_products and int8_products.serves(x):
            return int8_products.multiply(x, self.weight, self.scale, self.bias, self.int8_gradient)
        return _FrozenInt8Product.apply(x, self.weight, self.scale, self.bias)

    def dequantise(self) -> Tensor:  # fp32 [o, i]
        """The dequantised weight."""
        return self.row_block(0, self.out_features)

    def row_block(self, first: int, last: int) -> Tensor:  # fp32 [last - first, i]
        """Some rows of the dequantised weight."""
        return self.weight[first:last].float() * self.scale[first:last, None]
