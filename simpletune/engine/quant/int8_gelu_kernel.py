"""A Triton kernel that applies GELU, or its gradient, and quantises the rows to int8 in one launch.

Called by ``int8_gelu.py`` on CUDA; importing this module needs Triton. The result of GELU stays in registers, so that
it is neither written nor read again. It is rounded to the input's type first, as if it had been written.

GELU is x * sigmoid(2 z) with z = sqrt(2 / pi) (x + 0.044715 x^3), which equals 0.5 x (1 + tanh z) (arXiv:1606.08415).
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simpletune.engine.quant.rotation_kernel import _turned, warps_of

LONGEST_BLOCK = 8192  # elements of a row that one program holds at once


@triton.jit
def _activated(x, grad, columns, at, k, TURN: tl.constexpr, BLOCK: tl.constexpr):  # fp32 [BLOCK]
    """GELU of some of a row's elements, or the gradient of x; then times columns, or rotated in groups of ``TURN``."""
    inside = at < k
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    square = value * value
    part = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (value + 0.044715 * (square * value))))  # sigmoid(2 z)
    if grad is None:
        result = value * part
    else:
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)  # 2 dz/dx
        result = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * (
            part + value * (part * (1.0 - part)) * slope
        )
    result = result.to(x.dtype.element_ty).to(tl.float32)
    if columns is not None:
        result *= tl.load(columns + at, mask=inside, other=0.0)
    if TURN:
        result = _turned(result, BLOCK, TURN)
    return result


@triton.jit
def _gelu_rows(
    x, grad, columns, q, scale, k, LEAST: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Quantise one row of GELU or of its gradient, as ``int8_kernel._rows``; ``WHOLE``: one block holds all of it."""
    row = tl.program_id(0).to(tl.int64)
    x += row * k
    q += row * k
    if grad is not None:
        grad += row * k
    at = tl.arange(0, BLOCK)
    value = _activated(x, grad, columns, at, k, TURN, BLOCK)
    size = tl.abs(value)
    top = tl.where(size < float("inf"), size, float("inf"))  # NaN becomes infinity, because max ignores NaN
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            size = tl.abs(_activated(x, grad, columns, start + at, k, TURN, BLOCK))
            top = tl.maximum(top, tl.where(size < float("inf"), size, float("inf")))
    largest = tl.max(top, axis=0)
    finite = largest < float("inf")
    counts = finite & (largest >= LEAST)
    divisor = tl.where(counts, largest, 1.0)
    step = tl.where(counts, tl.div_rn(divisor, tl.full((), 127.0, tl.float32)), 1.0)
    tl.store(scale + row, tl.where(finite, step, float("nan")))
    inverse = tl.where(counts, tl.div_rn(tl.full((), 127.0, tl.float32), divisor), 0.0)
    level = tl.where(finite, value * inverse, 0.0)
    level = (level + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest integer, ties to even
    tl.store(q + at, level.to(tl.int8), mask=at < k)
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            more = _activated(x, grad, columns, start + at, k, TURN, BLOCK)
            level = tl.where(finite, more * inverse, 0.0)
            level = (level + 12582912.0) - 12582912.0
            tl.store(q + start + at, level.to(tl.int8), mask=at < k - start)


def gelu_rows(
    x: Tensor, grad: Tensor | None, columns: Tensor | None, block: int, least: float, longest: int = LONGEST_BLOCK
) -> tuple[Tensor, Tensor]:
    """Quantise rows of GELU, or of the gradient of its input, to int8 with one scale each.

    Args:
        x: [..., k], any floating type: the input of GELU.
        grad: [..., k], the gradient of its output; None: quantise its output.
        columns: fp32 [k], multiplied with every row first; or None.
        block: size of the blocks of a rotation of the rows (rotation.py), which divides k; 0: none.
        least: a row whose largest magnitude is smaller becomes zeros.
        longest: elements of a row to hold at once; a power of two, at least the block.

    Returns:
        int8 [m, k] and fp32 [m].
    """
    k = x.shape[-1]
    x, grad = x.contiguous(), None if grad is None else grad.contiguous()
    count = x.numel() // k
    q, scale = x.new_empty((count, k), dtype=torch.int8), x.new_empty((count,), dtype=torch.float32)
    if count:
        length = min(triton.next_power_of_2(k), longest)
        with torch.cuda.device_of(x):
            _gelu_rows[(count,)](
                x, grad, columns, q, scale, k, LEAST=least, BLOCK=length, TURN=block, WHOLE=k <= length,
                num_warps=warps_of(length), enable_fp_fusion=False,
            )  # fmt: skip
    return q, scale
