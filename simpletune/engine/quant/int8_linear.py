"""The frozen int8 linear layer. It multiplies with the dequantised weight, or in int8 (int8_products.py).

Consecutive layers that multiply in int8 share the quantised rows of their input.

Shapes: m rows (samples x tokens), i input and o output features.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simpletune.engine.quant.frozen_product import Packed, frozen_product
from simpletune.engine.quant.int8_products import (
    can_multiply,
    dequantise_weight,
    input_gradient,
    int8_input_gradient,
    int8_product,
    int8_rotated_rows,
    rotation_problem,
)
from simpletune.engine.quant.rotation import (
    Rotate,
    Rotation,
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


def _unpack(dtype: torch.dtype, block: int, q: Tensor, scale: Tensor) -> Tensor:  # [o, i]
    weight = dequantise_weight(q, scale, dtype)
    return rotate_rows(weight, block) if block else weight


class _Quantised(NamedTuple):
    """The quantised rows of a tensor, with a weak reference to the tensor."""

    of: weakref.ref[Tensor]
    version: int
    block: int
    rows: tuple[Tensor, Tensor]


_last: _Quantised | None = None
"""The last quantised tensor: q, k and v project the same tensor in succession."""


def shared_rows(x: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Compute ``int8_rotated_rows`` of a tensor once for consecutive layers that receive the same tensor.

    Caches only the last result, only while its tensor exists, and quantises again if the tensor has been modified.
    Recomputed activations are different tensors. A compiled block caches nothing: the compiler merges equal calls when
    it partitions a graph for gradients.
    """
    global _last
    if torch.compiler.is_compiling() or x.is_inference():  # inference tensors do not track modifications
        return int8_rotated_rows(x, block)
    if _last is not None and _last.of() is x and (_last.version, _last.block) == (x._version, block):
        return _last.rows
    _last = None  # free it before allocating the next
    with torch.no_grad():
        rows = int8_rotated_rows(x, block)
    _last = _Quantised(weakref.ref(x, _forget), x._version, block, rows)
    return rows


def _forget(dead: weakref.ref[Tensor]) -> None:
    global _last
    if _last is not None and _last.of is dead:
        _last = None


class Int8Product(torch.autograd.Function):
    """A product with the quantised rows of x. Does not read x itself, only computes its gradient.

    Saves only references to q and scale for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_q: Tensor,
        x_scale: Tensor,
        q: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        int8: bool,
        block: int,
    ) -> Tensor:
        ctx.save_for_backward(q, scale)
        ctx.int8, ctx.block = int8, block
        return int8_product(x_q, x_scale, q, scale, bias, x.dtype).view(*x.shape[:-1], len(q))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None, None]:
        (grad_y,) = grads  # [..., o]
        q, scale = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0] and ctx.int8:
            grad_x = rotate_rows(int8_input_gradient(grad_y, q, scale), ctx.block)
        elif ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad_y, q, scale, ctx.block)
        return grad_x, None, None, None, None, None, None, None


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
        """Quantise a linear layer, of any floating type, on its device; the bias gets the type ``dtype``."""
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
        own, block = (self.weight, self.scale, self.bias), self.block
        if self.int8_products and can_multiply(x) and (not block or not rotation_problem(x.device)):
            return Int8Product.apply(x, *shared_rows(x, block), *own, self.int8_gradient, block)
        if block and not (self.rotates_weight and rotates_weight(x, self.out_features)):
            x, block = Rotate.apply(x, block), 0
        return frozen_product(x, self._packed(block), self.bias)

    def packed_weight(self) -> Packed | None:
        """Return the weight, for a product in somebody else's pass; None if this layer multiplies in another way."""
        return None if self.int8_products or self.block else self._packed(0)

    def _packed(self, block: int) -> Packed:
        return _unpack, (block,), (self.weight, self.scale)

    def dequantise(self) -> Tensor:  # fp32 [o, i]
        """Return the dequantised weight, without its rotation."""
        return self.row_block(0, self.out_features)

    def row_block(self, first: int, last: int) -> Tensor:  # fp32 [last - first, i]
        """Return some rows of the dequantised weight, without its rotation."""
        return rotate_weight(self.weight[first:last].float() * self.scale[first:last, None], self.block)
