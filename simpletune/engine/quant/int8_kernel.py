"""A Triton kernel for int8 products: multiply int8 x int8 with scales and bias in the epilogue.

Called by ``int8_products.py`` on CUDA; importing this module needs Triton. A sum of k products is exact in int32, and
nothing wider than the output is written to memory. Shapes: m rows of activations, n output features, k the length of
the sum.

``enable_fp_fusion`` is off, so that the arithmetic matches the CPU's bit for bit.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

from simpletune.engine.kernels.fallback import is_of_the_kernel
from simpletune.system.console import detail
from simpletune.system.printable import describe_exception

Tile = tuple[int, int, int, int, int]

ROUNDS = 12  # timed calls of each tile in tuning
# Tiles: rows, columns and length of the sum of one step, warps, stages. Tuning skips tiles that do not fit the device.
# `make kernels` checks their machine code for absent cards.
TILES = (
    (128, 256, 128, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 128, 8, 3), (128, 128, 64, 4, 4),
    (128, 64, 128, 4, 3), (64, 128, 128, 4, 3), (64, 64, 128, 4, 4), (32, 128, 128, 4, 4), (128, 128, 64, 8, 2),
)  # fmt: skip
SAFE_TILE = (64, 64, 64, 4, 2)
"""A tile that fits every device, to test whether the kernel works."""
MOST_SPILLED = 64  # bytes of a thread's stack
"""What a tile may spill to be timed. The driver takes a stack for every thread that a card can hold, from memory of
which no prediction knows: 45 MB on an L4 for 512 bytes, which Triton 3.8 and 3.9 spill in some tiles."""
LAST_CHOICE = 1e9  # seconds, more than any product takes


@triton.heuristics({"EVEN_K": lambda given: given["k"] % given["BLOCK_K"] == 0})
@triton.jit(do_not_specialize=["bucket", "multiprocessors"])
def _product(
    x, x_scale, weight, scale, bias, y, m, n, k, weight_n, weight_k, bucket, multiprocessors,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y = (x weight^T) * x_scale * scale + bias; ``bucket`` and ``multiprocessors`` only key tunings.

    Programs cover ``GROUP`` rows of tiles before the next column, so that concurrent programs share rows and columns.
    Rows and columns past the edge wrap around to the start and are not written.
    """
    program = tl.program_id(0)
    in_group = GROUP * tl.cdiv(n, BLOCK_N)
    first = (program // in_group) * GROUP
    height = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP)
    row = (first + (program % in_group) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = ((program % in_group) // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    along = tl.arange(0, BLOCK_K)
    x_at = x + (row % m).to(tl.int64)[:, None] * k + along[None, :]
    weight_at = weight + (column % n).to(tl.int64)[None, :] * weight_n + along[:, None].to(tl.int64) * weight_k
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(x_at), tl.load(weight_at)
        else:
            left = tl.load(x_at, mask=along[None, :] < k - start, other=0)
            right = tl.load(weight_at, mask=along[:, None] < k - start, other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        x_at += BLOCK_K
        weight_at += BLOCK_K * weight_k
    result = total.to(tl.float32) * tl.load(x_scale + row, mask=row < m, other=0.0)[:, None]
    if scale is not None:
        result *= tl.load(scale + column, mask=column < n, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    y_at = y + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(y_at, result.to(y.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def _seconds(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
    """Time a launch. Triton's own timing would allocate 256 MB on the card to clear its cache."""
    call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ROUNDS)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    marks[-1][1].synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in marks)
    return [times[round(quantile * (ROUNDS - 1))] for quantile in quantiles]


def _blocks(tile: Tile) -> dict[str, int]:
    return {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": tile[2], "GROUP": 8}


class _Tuner(Autotuner):
    """Leaves out tiles that fail or spill. Triton's own tuning forgives only those that need too many resources, and
    where tiles spill it times them."""

    def _bench(self, *args: object, config: triton.Config, **meta: object) -> list[float]:
        try:
            kernel = self.fn.run(*args, **meta | config.all_kwargs() | {"warmup": True})  # compiles, launches nothing
            if kernel is not None:  # Triton's interpreter compiles nothing
                kernel._init_handles()  # loads it, which tells what it spills
                spilled = 4 * kernel.n_spills
                if spilled > MOST_SPILLED:
                    return [LAST_CHOICE + spilled] * 3  # where all spill, that which spills least
            return super()._bench(*args, config=config, **meta)
        except (OutOfResources, PTXASError):
            return [float("inf")] * 3
        except Exception as error:
            if not is_of_the_kernel(error):
                raise
            _say_left_out(str(config), describe_exception(error))
            return [float("inf")] * 3


@lru_cache(maxsize=len(TILES))
def _say_left_out(tile: str, reason: str) -> None:
    detail(f"kernel  int8 products leave out a tile that fails here ({tile}): {reason}")


def tuner_of(kernel: Autotuner, tiles: Sequence[Tile], key: list[str]) -> Autotuner:
    """Tune a kernel over tiles, once for each value of the arguments ``key``."""
    configs = [triton.Config(_blocks(tile), num_warps=tile[3], num_stages=tile[4]) for tile in tiles]
    return _Tuner(kernel, kernel.arg_names, configs, key, None, None, do_bench=_seconds, cache_results=True)


_tuned = tuner_of(_product, TILES, ["bucket", "n", "k", "weight_k", "multiprocessors"])
_untunable: set[tuple[object, ...]] = set()
"""Shapes for which every tile of the tuning failed."""


def product(
    quantised: tuple[Tensor, Tensor],  # from ``int8_rows_kernel.rows``: int8 [m, k], contiguous, and fp32 [m]
    weight: Tensor,  # int8 [n, k], of any strides
    scale: Tensor | None,  # fp32 [n]
    bias: Tensor | None,  # [n]
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:  # [m, n]
    """Compute y = (x weight^T) * x_scale * scale + bias, where x and x_scale are the quantised rows.

    Without ``tile``, tunes once to find the device's fastest tile for m's bucket. Buckets are powers of two, so that
    pictures of many sizes share tunings. Triton's cache folder stores the timings. If every tile fails, ``SAFE_TILE``
    takes over.
    """
    x, x_scale = quantised
    (m, k), n = x.shape, len(weight)
    y = x.new_empty((m, n), dtype=dtype)
    if not m:
        return y
    bucket = 1 << (m - 1).bit_length()
    given = (
        x, x_scale, weight, scale, bias, y, m, n, k, weight.stride(0), weight.stride(1), bucket,
        multiprocessors(x.device),
    )  # fmt: skip
    grid = grid_of(m, n)
    if tile is None and run_tuned(_tuned, grid, given, (bucket, n, k, weight.stride(1), x.device)):
        return y
    tile = tile or SAFE_TILE
    with torch.cuda.device_of(x):
        _product[grid](*given, **_blocks(tile), num_warps=tile[3], num_stages=tile[4], enable_fp_fusion=False)
    return y


def run_tuned(
    tuned: Autotuner,
    grid: Callable[[Mapping[str, int]], tuple[int]],
    given: Sequence[object],
    shape: tuple[object, ...],
) -> bool:
    """Launch a kernel with its fastest tile; returns False if none runs, which is logged once per shape.

    Args:
        tuned: the result of ``tuner_of``.
        grid: the grid of programs, by the tile.
        given: arguments, the first of which is a tensor.
        shape: power of two of rows, columns, length of the sum, and anything else that the kernel is tuned for.
    """
    if shape in _untunable:
        return False
    assert isinstance(given[0], Tensor)
    try:
        with torch.cuda.device_of(given[0]):
            tuned[grid](*given, enable_fp_fusion=False)
        return True
    except Exception as error:
        if not is_of_the_kernel(error):
            raise
        detail(f"kernel  int8 products of {' x '.join(map(str, shape[:3]))} use the smallest tile, because no "
               f"other runs here: {describe_exception(error)}")  # fmt: skip
        _untunable.add(shape)
        return False


def grid_of(m: int, n: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """The number of programs for m rows and n columns, by the tile."""
    return lambda chosen: (triton.cdiv(m, chosen["BLOCK_M"]) * triton.cdiv(n, chosen["BLOCK_N"]),)


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors, which distinguishes cards of one architecture; 0 in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
