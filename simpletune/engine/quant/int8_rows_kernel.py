"""Triton kernels that quantise rows to int8 in one launch: as they are, rotated (rotation.py), or after GELU.

Called by ``int8_products.py`` and ``int8_gelu.py`` on CUDA; importing this module needs Triton. A
row becomes multiples of its largest magnitude / 127. Rotated and activated rows stay in registers, unless they are
longer than ``LONGEST_BLOCK``, so that they are neither written nor computed again. The order of additions is
``rotation.hadamard``'s and ``enable_fp_fusion`` is off, so that the results match the CPU's bit for bit.

The result of GELU is rounded to the input's type first, as if it had been written. GELU is x * sigmoid(2 z) with
z = sqrt(2 / pi) (x + 0.044715 x^3), which equals 0.5 x (1 + tanh z) (arXiv:1606.08415).
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_LOAD = 4096  # elements of a row that one program of ``rows`` loads at once
LONGEST_BLOCK = 8192  # elements of a rotated or activated row that one program holds at once
WARPS = ((1024, 2), (2048, 4), (4096, 8), (LONGEST_BLOCK, 16))  # by the largest number of elements


@triton.jit
def _magnitude(value):
    """The magnitudes of numbers; NaN becomes infinity, because max ignores NaN."""
    size = tl.abs(value)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def _row_scale(top, scale, row, LEAST: tl.constexpr):
    """Write a row's scale; returns whether all of the row is finite, and the inverse of the scale."""
    largest = tl.max(top, axis=0)
    finite = largest < float("inf")
    counts = finite & (largest >= LEAST)
    divisor = tl.where(counts, largest, 1.0)
    step = tl.where(counts, tl.div_rn(divisor, tl.full((), 127.0, tl.float32)), 1.0)
    tl.store(scale + row, tl.where(finite, step, float("nan")))
    inverse = tl.where(counts, tl.div_rn(tl.full((), 127.0, tl.float32), divisor), 0.0)
    return finite, inverse


@triton.jit
def _levels(value, finite, inverse):
    """Round numbers of a row to int8."""
    level = tl.where(finite, value * inverse, 0.0)
    level = (level + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest integer, ties to even
    return level.to(tl.int8)


@triton.jit
def _rows(x, columns, q, scale, inner, k, x_outer, x_row, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise one row, read twice."""
    row = tl.program_id(0).to(tl.int64)
    x += (row // inner) * x_outer + (row % inner) * x_row
    q += row * k
    at = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        inside = at < k - start
        value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        if columns is not None:
            value *= tl.load(columns + start + at, mask=inside, other=0.0)
        top = tl.maximum(top, _magnitude(value))
    finite, inverse = _row_scale(top, scale, row, LEAST)
    for start in range(0, k, BLOCK):
        inside = at < k - start
        value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        if columns is not None:
            value *= tl.load(columns + start + at, mask=inside, other=0.0)
        tl.store(q + start + at, _levels(value, finite, inverse), mask=inside)


@triton.jit
def _turned(value, BLOCK: tl.constexpr, ROTATION: tl.constexpr):
    """Rotate consecutive groups of ``ROTATION`` elements; see ``rotation.hadamard``."""
    GROUPS: tl.constexpr = BLOCK // ROTATION
    QUARTER: tl.constexpr = ROTATION // 4
    DIGITS: tl.constexpr = 2 if ROTATION == 16 else (3 if ROTATION == 64 else 4)
    for _ in tl.static_range(DIGITS):
        even, odd = tl.split(tl.reshape(value, (GROUPS, QUARTER, 2, 2)))  # the last bit of the digit
        a, c = tl.split(even)
        b, d = tl.split(odd)
        half = ((a + b) + (c + d)) * 0.5
        moved = tl.join(tl.join(half - d, half - b), tl.join(half - c, half - a))  # the last bit in the last dimension
        value = tl.reshape(tl.permute(moved, (0, 2, 3, 1)), (BLOCK,))
    return value


@triton.jit
def _rotated_rows(
    x, q, scale, inner, k, x_outer, x_row,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, ROTATION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Quantise one rotated row; ``WHOLE``: one block holds all of it."""
    row = tl.program_id(0).to(tl.int64)
    x += (row // inner) * x_outer + (row % inner) * x_row
    q += row * k
    at = tl.arange(0, BLOCK)
    value = _turned(tl.load(x + at, mask=at < k, other=0.0).to(tl.float32), BLOCK, ROTATION)
    top = _magnitude(value)
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            more = _turned(tl.load(x + start + at, mask=at < k - start, other=0.0).to(tl.float32), BLOCK, ROTATION)
            top = tl.maximum(top, _magnitude(more))
    finite, inverse = _row_scale(top, scale, row, LEAST)
    tl.store(q + at, _levels(value, finite, inverse), mask=at < k)
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            more = _turned(tl.load(x + start + at, mask=at < k - start, other=0.0).to(tl.float32), BLOCK, ROTATION)
            tl.store(q + start + at, _levels(more, finite, inverse), mask=at < k - start)


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
    """Quantise one row of GELU or of its gradient; ``WHOLE``: one block holds all of it."""
    row = tl.program_id(0).to(tl.int64)
    x += row * k
    q += row * k
    if grad is not None:
        grad += row * k
    at = tl.arange(0, BLOCK)
    value = _activated(x, grad, columns, at, k, TURN, BLOCK)
    top = _magnitude(value)
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            top = tl.maximum(top, _magnitude(_activated(x, grad, columns, start + at, k, TURN, BLOCK)))
    finite, inverse = _row_scale(top, scale, row, LEAST)
    tl.store(q + at, _levels(value, finite, inverse), mask=at < k)
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            more = _activated(x, grad, columns, start + at, k, TURN, BLOCK)
            tl.store(q + start + at, _levels(more, finite, inverse), mask=at < k - start)


def warps_of(length: int) -> int:
    """Warps of a program that holds this many elements."""
    return next(warps for most, warps in WARPS if length <= most)


def _laid_out(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [outer, inner, k], int8 [m, k], fp32 [m]
    """Rows, without a copy if their elements are adjacent, and memory for their int8 numbers and scales."""
    k = x.shape[-1]
    parts = x if x.dim() == 3 else x.reshape(1, -1, k)
    parts = parts if parts.stride(2) == 1 else parts.contiguous()
    count = parts.shape[0] * parts.shape[1]
    return parts, x.new_empty((count, k), dtype=torch.int8), x.new_empty((count,), dtype=torch.float32)


def rows(
    x: Tensor,  # [..., k], any floating type; strided rows are read without a copy
    columns: Tensor | None,  # fp32 [k], multiplied with every row first
    least: float,
) -> tuple[Tensor, Tensor]:  # int8 [m, k], fp32 [m]
    """Quantise rows to int8 with one scale each; a row whose largest magnitude is less than ``least`` becomes zeros."""
    parts, q, scale = _laid_out(x)
    count, k = q.shape
    if count:
        block = min(triton.next_power_of_2(k), LONGEST_LOAD)
        with torch.cuda.device_of(x):
            _rows[(count,)](
                parts, columns, q, scale, parts.shape[1], k, parts.stride(0), parts.stride(1), LEAST=least, BLOCK=block,
                num_warps=4 if block <= 2048 else 8, enable_fp_fusion=False,
            )  # fmt: skip
    return q, scale


def rotated_rows(
    x: Tensor,  # as in ``rows``
    block: int,  # 16, 64 or 256, which divides k
    least: float,
    longest: int = LONGEST_BLOCK,
) -> tuple[Tensor, Tensor]:  # int8 [m, k], fp32 [m]
    """Quantise rotated rows like ``rows``; holds ``longest`` elements at once, a power of two, at least the block."""
    parts, q, scale = _laid_out(x)
    count, k = q.shape
    if count:
        length = min(triton.next_power_of_2(k), longest)
        with torch.cuda.device_of(x):
            _rotated_rows[(count,)](
                parts, q, scale, parts.shape[1], k, parts.stride(0), parts.stride(1), LEAST=least, BLOCK=length,
                ROTATION=block, WHOLE=k <= length, num_warps=warps_of(length), enable_fp_fusion=False,
            )  # fmt: skip
    return q, scale


def gelu_rows(
    x: Tensor,  # [..., k], any floating type: the input of GELU
    grad: Tensor | None,  # [..., k], the gradient of its output; None: quantise its output
    columns: Tensor | None,  # fp32 [k], multiplied with every row first
    block: int,  # of a rotation of the rows, which divides k; 0: none
    least: float,
    longest: int = LONGEST_BLOCK,
) -> tuple[Tensor, Tensor]:  # int8 [m, k], fp32 [m]
    """Quantise rows of GELU, or of the gradient of its input, like ``rotated_rows``."""
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
