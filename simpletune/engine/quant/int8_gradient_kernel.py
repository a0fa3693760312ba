"""A Triton kernel for the input's gradient in int8: multiply int8 rows with a transposed weight.

Called by ``int8_products.py`` on CUDA; importing this module needs Triton. Tensor cores take four consecutive numbers
of the sum in a register, but in memory the four numbers of a word belong to neighbouring columns. So the kernel reads
words of four rows, transposes 4 x 4 bytes in registers with eight permutations, and multiplies the columns 4 j,
4 j + 1, 4 j + 2 and 4 j + 3 of a tile in four products. Reading bytes through strides would take a load from shared
memory for each.

Shapes: m rows of gradients, n input features, k output features, the length of the sum; n and k multiples of 4.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simpletune.engine.quant.int8_kernel import (
    Tile,
    _blocks,
    grid_of,
    multiprocessors,
    product,
    run_tuned,
    tuner_of,
)

# Tiles as in int8_kernel.py. In these, a warp multiplies a part of the weight's tile with many rows.
TILES = (
    (256, 64, 64, 4, 3), (256, 64, 64, 4, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 64, 64, 4, 4),
    (128, 64, 128, 4, 3), (64, 64, 128, 4, 3), (64, 64, 64, 4, 4),
)  # fmt: skip
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether this is Triton's interpreter, which has no assembler."""


@triton.jit
def _transposed(a, b, c, d):
    """Transpose 4 x 4 bytes: byte s of result i is byte i of argument s."""
    if INTERPRETED:
        low_1, low_2 = _paired(a, b, 0), _paired(c, d, 0)
        high_1, high_2 = _paired(a, b, 16), _paired(c, d, 16)
        a, b = (low_1 & 0xFFFF) | (low_2 << 16), ((low_1 >> 16) & 0xFFFF) | (low_2 & -65536)
        c, d = (high_1 & 0xFFFF) | (high_2 << 16), ((high_1 >> 16) & 0xFFFF) | (high_2 & -65536)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 low_1, low_2, high_1, high_2;
            prmt.b32 low_1, $4, $5, 0x5140;
            prmt.b32 low_2, $6, $7, 0x5140;
            prmt.b32 high_1, $4, $5, 0x7362;
            prmt.b32 high_2, $6, $7, 0x7362;
            prmt.b32 $0, low_1, low_2, 0x5410;
            prmt.b32 $1, low_1, low_2, 0x7632;
            prmt.b32 $2, high_1, high_2, 0x5410;
            prmt.b32 $3, high_1, high_2, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def _paired(a, b, SHIFT: tl.constexpr):
    """Interleave two bytes each of a and b, from bit ``SHIFT`` on."""
    first, second = (a >> SHIFT) & 0xFF, (b >> SHIFT) & 0xFF
    third, fourth = (a >> (SHIFT + 8)) & 0xFF, (b >> (SHIFT + 8)) & 0xFF
    return first | (second << 8) | (third << 16) | (fourth << 24)


@triton.jit
def _byte(word, NUMBER: tl.constexpr):
    return (word >> (8 * NUMBER)).to(tl.int8)


@triton.jit
def _times(left, word, total, FOURS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the product with every fourth column, given four numbers of its sum in a word."""
    four = tl.join(tl.join(_byte(word, 0), _byte(word, 2)), tl.join(_byte(word, 1), _byte(word, 3)))
    right = tl.permute(tl.reshape(four, (FOURS, COLUMNS, 4)), (0, 2, 1))
    return tl.dot(left, tl.reshape(right, (4 * FOURS, COLUMNS)), total, out_dtype=tl.int32)


@triton.heuristics({"EVEN_K": lambda given: given["k"] % given["BLOCK_K"] == 0})
@triton.jit(do_not_specialize=["bucket", "multiprocessors"])
def _gradient(
    x, x_scale, weight, y, m, n, k, weight_k, bucket, multiprocessors,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y = (x weight^T) * x_scale; programs are ordered as in ``int8_kernel._product``."""
    program = tl.program_id(0)
    in_group = GROUP * tl.cdiv(n, BLOCK_N)
    first = (program // in_group) * GROUP
    height = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP)
    row = (first + (program % in_group) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = (program % in_group) // height
    column = place * BLOCK_N + tl.arange(0, BLOCK_N)
    along, four = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 4) * 4
    word = (place * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)) % (n // 4)
    words = weight_k // 4
    x_at = x + (row % m).to(tl.int64)[:, None] * k + along[None, :]
    weight_at = weight.to(tl.pointer_type(tl.int32)) + word.to(tl.int64)[None, :] + four.to(tl.int64)[:, None] * words
    total_0 = tl.zeros((BLOCK_M, BLOCK_N // 4), dtype=tl.int32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            left = tl.load(x_at)
            a, b = tl.load(weight_at), tl.load(weight_at + words)
            c, d = tl.load(weight_at + 2 * words), tl.load(weight_at + 3 * words)
        else:
            left = tl.load(x_at, mask=along[None, :] < k - start, other=0)
            inside = four[:, None] < k - start
            a = tl.load(weight_at, mask=inside, other=0)
            b = tl.load(weight_at + words, mask=inside, other=0)
            c = tl.load(weight_at + 2 * words, mask=inside, other=0)
            d = tl.load(weight_at + 3 * words, mask=inside, other=0)
        a, b, c, d = _transposed(a, b, c, d)
        total_0 = _times(left, a, total_0, BLOCK_K // 4, BLOCK_N // 4)
        total_1 = _times(left, b, total_1, BLOCK_K // 4, BLOCK_N // 4)
        total_2 = _times(left, c, total_2, BLOCK_K // 4, BLOCK_N // 4)
        total_3 = _times(left, d, total_3, BLOCK_K // 4, BLOCK_N // 4)
        x_at += BLOCK_K
        weight_at += BLOCK_K * words
    total = tl.reshape(tl.join(tl.join(total_0, total_2), tl.join(total_1, total_3)), (BLOCK_M, BLOCK_N))
    result = total.to(tl.float32) * tl.load(x_scale + row, mask=row < m, other=0.0)[:, None]
    y_at = y + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(y_at, result.to(y.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


_tuned = tuner_of(_gradient, TILES, ["bucket", "n", "k", "multiprocessors"])


def reads_words(weight: Tensor) -> bool:
    """Whether the kernel can read a weight [n, k]: its columns are contiguous, and its rows are aligned to words."""
    (n, k), places = weight.shape, (weight.stride(1), weight.data_ptr())
    return weight.stride(0) == 1 and not any(each % 4 for each in (n, k, *places))


def gradient(
    quantised: tuple[Tensor, Tensor],  # from ``int8_rows_kernel.rows``: int8 [m, k], contiguous, and fp32 [m]
    weight: Tensor,  # int8 [n, k], for which ``reads_words``
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:  # [m, n]
    """Compute y = (x weight^T) * x_scale, where x and x_scale are the quantised rows.

    Tuned like ``int8_kernel.product``, which takes over with its ``SAFE_TILE`` if every tile fails.
    """
    x, x_scale = quantised
    (m, k), n = x.shape, len(weight)
    y = x.new_empty((m, n), dtype=dtype)
    if not m:
        return y
    bucket = 1 << (m - 1).bit_length()
    given = (x, x_scale, weight, y, m, n, k, weight.stride(1), bucket, multiprocessors(x.device))
    grid = grid_of(m, n)
    if tile is None:
        if run_tuned(_tuned, grid, given, (bucket, n, k, "gradient", x.device)):
            return y
        return product(quantised, weight, None, None, dtype)
    with torch.cuda.device_of(x):
        _gradient[grid](*given, **_blocks(tile), num_warps=tile[3], num_stages=tile[4], enable_fp_fusion=False)
    return y
