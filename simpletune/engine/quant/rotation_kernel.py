"""A Triton kernel that rotates rows by a block Hadamard matrix (rotation.py) and quantises them to int8 in one launch.

Called by ``int8_rotated.py`` on CUDA; importing this module needs Triton. A row is read once and its rotated values
stay in registers, unless it is longer than ``LONGEST_BLOCK``. The order of additions is ``rotation.hadamard``'s and
``enable_fp_fusion`` is off, so that the results match the CPU's bit for bit.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_BLOCK = 8192  # elements of a row that one program holds at once
WARPS = ((1024, 2), (2048, 4), (4096, 8), (LONGEST_BLOCK, 16))  # by the largest number of elements


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
    """Quantise one rotated row to multiples of its largest magnitude / 127; ``WHOLE``: one block holds all of it."""
    row = tl.program_id(0).to(tl.int64)
    x += (row // inner) * x_outer + (row % inner) * x_row
    q += row * k
    at = tl.arange(0, BLOCK)
    value = _turned(tl.load(x + at, mask=at < k, other=0.0).to(tl.float32), BLOCK, ROTATION)
    size = tl.abs(value)
    top = tl.where(size < float("inf"), size, float("inf"))  # NaN becomes infinity, because max ignores NaN
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            more = _turned(tl.load(x + start + at, mask=at < k - start, other=0.0).to(tl.float32), BLOCK, ROTATION)
            size = tl.abs(more)
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
            more = _turned(tl.load(x + start + at, mask=at < k - start, other=0.0).to(tl.float32), BLOCK, ROTATION)
            level = tl.where(finite, more * inverse, 0.0)
            level = (level + 12582912.0) - 12582912.0
            tl.store(q + start + at, level.to(tl.int8), mask=at < k - start)


def warps_of(length: int) -> int:
    """Warps of a program that holds this many elements."""
    return next(warps for most, warps in WARPS if length <= most)


def rotated_rows(x: Tensor, block: int, least: float, longest: int = LONGEST_BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise rotated rows to int8 with one scale each.

    Args:
        x: [..., k], any floating type; reads strided rows without a copy.
        block: 16, 64 or 256, which divides k.
        least: a rotated row whose largest magnitude is smaller becomes zeros.
        longest: elements of a row to hold at once; a power of two, at least the block.

    Returns:
        int8 [m, k] and fp32 [m].
    """
    k = x.shape[-1]
    parts = x if x.dim() == 3 else x.reshape(1, -1, k)
    parts = parts if parts.stride(2) == 1 else parts.contiguous()
    count = parts.shape[0] * parts.shape[1]
    q, scale = x.new_empty((count, k), dtype=torch.int8), x.new_empty((count,), dtype=torch.float32)
    if count:
        length = min(triton.next_power_of_2(k), longest)
        with torch.cuda.device_of(x):
            _rotated_rows[(count,)](
                parts, q, scale, parts.shape[1], k, parts.stride(0), parts.stride(1), LEAST=least, BLOCK=length,
                ROTATION=block, WHOLE=k <= length, num_warps=warps_of(length), enable_fp_fusion=False,
            )  # fmt: skip
    return q, scale
