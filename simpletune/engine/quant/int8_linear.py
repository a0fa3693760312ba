"""The frozen int8 linear layer. It multiplies with the dequantised weight, or in int8 (int8_products.py).

Shapes: n rows (samples x tokens), i input and o output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simpletune.engine.quant import int8_multiply, int8_products, int8_rotated
from simpletune.engine.quant.rotation import (
    Rotation,
    rotate,
    rotate_rows,
    rotate_weight,
    rotates_weight,
    rotation_block,
)


def quantise_rows(
    weight: Tensor,  # [o, i]
) -> tuple[Tensor, Tensor]:  # int8 [o, i], fp32 [o]
    """Quantise to symmetric round-to-nearest int8 with one scale per row: weight ~ q * scale, |error| <= scale / 2.

    The scale is the row's largest magnitude / 127, rounded up to a bf16 number, so that multiplying by it in bf16 adds
    no error. A row of zeros gets scale 1.
    """
    if weight.is_meta:  # computing shapes operation by operation takes milliseconds a layer
        return torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), dtype=torch.float32)
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

    Scaling the weight instead of the output, and adding the bias in the product itself, each save a pass over the
    activations; W is rounded to the input's type.

    ``block``: block size of the rotation to undo in the dequantised weight; 0: there is none, or x and its gradient are
    rotated.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, block: int) -> Tensor:
        ctx.save_for_backward(q, scale)
        ctx.block = block
        weight = rotate_rows(int8_products.dequantise_weight(q, scale, x.dtype), block)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # [..., o]
        q, scale = ctx.saved_tensors
        grad_x = int8_products.input_gradient(grad_y, q, scale, ctx.block) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None


class Int8Linear(nn.Linear):
    """A frozen ``nn.Linear`` with int8 weight [o, i], fp32 ``scale`` [o] and an optional bias [o].

    PEFT wraps it like any linear layer. ``to(dtype)`` does not cast its int8 weight.
    """

    scale: Tensor
    int8_products = False
    """Whether to multiply in int8, if there are enough rows and the device supports it."""
    int8_gradient = False
    """Whether to compute the input gradient in int8 as well."""
    block = 0
    """Size of the blocks of the rotation that the weight is stored in (rotation.py); 0: none."""
    rotates_weight = True
    """Whether many rows may be multiplied by the weight rotated back, instead of being rotated."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype, rotation: Rotation = "none") -> Int8Linear:
        """Quantise a linear layer on its device.

        Args:
            linear: the layer, with weights in any floating type.
            dtype: the type of the bias.
            rotation: the rotation of its inputs.
        """
        twin = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        twin.block = rotation_block(rotation, linear)
        q, scale = quantise_rows(rotate_weight(linear.weight.detach(), twin.block))
        twin.weight = nn.Parameter(q, requires_grad=False)
        twin.register_buffer("scale", scale)
        if linear.bias is not None:
            twin.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
        return twin

    def forward(self, x: Tensor) -> Tensor:  # [..., i] -> [..., o]
        """Compute the product in the input's type."""
        if self.int8_products and int8_products.serves(x) and (not self.block or not int8_rotated.why_not(x.device)):
            return int8_multiply.multiply(x, self.weight, self.scale, self.bias, self.int8_gradient, self.block)
        if self.block and not (self.rotates_weight and rotates_weight(x, self.out_features)):
            return _FrozenInt8Product.apply(rotate(x, self.block), self.weight, self.scale, self.bias, 0)
        return _FrozenInt8Product.apply(x, self.weight, self.scale, self.bias, self.block)

    def dequantise(self) -> Tensor:  # fp32 [o, i]
        """The dequantised weight, without its rotation."""
        return self.row_block(0, self.out_features)

    def row_block(self, first: int, last: int) -> Tensor:  # fp32 [last - first, i]
        """Some rows of the dequantised weight, without its rotation."""
        return rotate_weight(self.weight[first:last].float() * self.scale[first:last, None], self.block)
