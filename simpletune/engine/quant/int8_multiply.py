"""Frozen layers' products in int8, with their gradients; consecutive layers share the quantised rows of their input.

Shapes: m rows (samples x tokens), i input and o output features.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simpletune.engine.quant.int8_products import input_gradient, int8_input_gradient, int8_product
from simpletune.engine.quant.int8_rotated import int8_rotated_rows
from simpletune.engine.quant.rotation import rotate_rows

Context = Any
"""An autograd function's context, whose saved tensors and ``needs_input_grad`` have no useful types."""


class _Quantised(NamedTuple):
    """The quantised rows of a tensor, with a weak reference to the tensor."""

    of: weakref.ref[Tensor]
    version: int
    block: int
    rows: tuple[Tensor, Tensor]


class _Last:
    """The last quantised tensor: q, k and v project the same tensor in succession."""

    entry: _Quantised | None = None


def shared_rows(x: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """``int8_rotated_rows`` of a tensor, computed once for consecutive layers that receive the same tensor.

    Caches only the last result, only while its tensor exists, and quantises again if the tensor has been modified.
    Recomputed activations are different tensors. A compiled block caches nothing: the compiler merges equal calls when
    it partitions a graph for gradients.
    """
    if torch.compiler.is_compiling() or x.is_inference():  # inference tensors do not track modifications
        return int8_rotated_rows(x, block)
    entry = _Last.entry
    if entry is not None and entry.of() is x and (entry.version, entry.block) == (x._version, block):
        return entry.rows
    _Last.entry = None  # free it before allocating the next
    with torch.no_grad():
        rows = int8_rotated_rows(x, block)
    _Last.entry = _Quantised(weakref.ref(x, _forget), x._version, block, rows)
    return rows


def _forget(dead: weakref.ref[Tensor]) -> None:
    if _Last.entry is not None and _Last.entry.of is dead:
        _Last.entry = None


class Int8Product(torch.autograd.Function):
    """A product with the quantised rows of x. Does not read x itself, only computes its gradient.

    Saves only references to q and scale for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Context,
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
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None, None]:
        (grad_y,) = grads  # [..., o]
        q, scale = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0] and ctx.int8:
            grad_x = rotate_rows(int8_input_gradient(grad_y, q, scale), ctx.block)
        elif ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad_y, q, scale, ctx.block)
        return grad_x, None, None, None, None, None, None, None


def multiply(
    x: Tensor,  # [..., i]
    q: Tensor,  # int8 [o, i]
    scale: Tensor,  # fp32 [o]
    bias: Tensor | None,  # [o]
    int8_gradient: bool,
    block: int = 0,
) -> Tensor:  # [..., o]
    """Multiply activations with a frozen weight in int8; returns their type and supports their gradient.

    Args:
        int8_gradient: whether to compute that gradient in int8 as well.
        block: the block size of the rotation that the weight is stored in; 0: none.
    """
    return Int8Product.apply(x, *shared_rows(x, block), q, scale, bias, int8_gradient, block)
