"""Triton kernels for the norms of queries and keys: each reads and writes every number once, and sums in fp32.

Called by ``rms_norm.py`` on CUDA; importing this module needs Triton. A program takes about ``ELEMENTS`` elements of
short rows. The gradient of the weight is summed from one row of partial sums per program, in a fixed order.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simpletune.engine.kernels.sizes import rows_of

WARPS = 4


@triton.jit
def _norm(x, weight, y, rows, d, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute some rows: y = x / sqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < d)
    factor = tl.load(weight + at, mask=at < d, other=0.0).to(tl.float32)
    value = tl.load(x + row * d + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / d + eps)
    tl.store(y + row * d + at, (value * inverse[:, None] * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(grad, x, weight, grad_x, sums, rows, d, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute, for some rows, the gradient of x, and a partial sum of the weight's."""
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < d)
    factor = tl.load(weight + at, mask=at < d, other=0.0).to(tl.float32)
    value = tl.load(x + row * d + at, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * d + at, mask=inside, other=0.0).to(tl.float32)
    inverse = (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / d + eps))[:, None]
    normed = value * inverse
    wanted = given * factor
    along = (tl.sum(wanted * normed, axis=1) / d)[:, None]
    tl.store(grad_x + row * d + at, ((wanted - normed * along) * inverse).to(grad_x.dtype.element_ty), mask=inside)
    if sums is not None:
        places = tl.arange(0, BLOCK)
        tl.store(sums + part * d + places, tl.sum(given * normed, axis=0), mask=places < d)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., d], [d] -> [..., d]
    """Compute ``rms_norm.normalise``."""
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d = x.shape[-1]
    rows, count = x.numel() // d, rows_of(d)
    if rows:
        with torch.cuda.device_of(x):
            _norm[(triton.cdiv(rows, count),)](
                x, weight.contiguous(), y, rows, d, eps, ROWS=count, BLOCK=triton.next_power_of_2(d), num_warps=WARPS
            )
    return y


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, trains: bool) -> list[Tensor]:
    """Return the gradient of x, and that of the weight if it trains."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_x, d = torch.empty_like(x), x.shape[-1]
    rows, count = x.numel() // d, rows_of(d)
    programs = triton.cdiv(rows, count)
    sums = x.new_empty((programs, d), dtype=torch.float32) if trains else None
    if rows:
        with torch.cuda.device_of(x):
            _norm_backward[(programs,)](
                grad, x, weight.contiguous(), grad_x, sums, rows, d, eps, ROWS=count,
                BLOCK=triton.next_power_of_2(d), num_warps=WARPS,
            )  # fmt: skip
    return [grad_x, *([] if sums is None else [sums.sum(0).to(weight.dtype)])]
