"""Triton kernels for norms of queries and keys with rotary positions: each reads and writes every number once, and
computes in fp32.

Called by ``rotary.py`` on CUDA; importing this module needs Triton. A program takes about ``ELEMENTS`` elements of
short rows, one for each token and head. Tokens may lie apart in memory: parts of a wider product are read where they
are. The gradient of the weight is summed from one row of partial sums per program, in a fixed order.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from simpletune.engine.kernels.sizes import rows_of

WARPS = 4


@triton.jit
def _places(rows, n, h, first, length, angles, ROWS: tl.constexpr):
    """Return, for some rows, which exist, their token and head, and the places of the token in output and table."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // h, row % h
    sample, place = token // n, first + token % n
    return row < rows, token, head, sample * length + place, sample * angles + place


@triton.jit
def _norm_rotary(
    x, weight, cos, sin, out, rows, n, h, d, step, first, length, angles, angle_step, spread, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute some rows: x / sqrt(mean(x^2) + eps) * weight, each pair rotated by its angle."""
    exists, token, head, joined, angle = _places(rows, n, h, first, length, angles, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    inside = exists & (at < d)
    factor = tl.load(weight + at, mask=at < d, other=0.0).to(tl.float32)
    value = tl.load(x + token * step + head * d + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / d + eps)
    even, odd = tl.split(tl.reshape(value * inverse[:, None] * factor, (ROWS, BLOCK // 2, 2)))
    half = tl.arange(0, BLOCK // 2)[None, :]
    known = exists & (half < d // 2)
    c = tl.load(cos + angle * angle_step + half * spread, mask=known, other=0.0)
    s = tl.load(sin + angle * angle_step + half * spread, mask=known, other=0.0)
    found = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (ROWS, BLOCK))
    tl.store(out + (joined * h + head) * d + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotary_backward(
    grad, x, weight, cos, sin, grad_x, sums, rows, n, h, d, step, grad_step, grad_head, first, length, angles,
    angle_step, spread, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute, for some rows, the gradient of x, and a partial sum of the weight's."""
    exists, token, head, joined, angle = _places(rows, n, h, first, length, angles, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    inside = exists & (at < d)
    given = tl.load(grad + joined * grad_step + head * grad_head + at, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(given, (ROWS, BLOCK // 2, 2)))
    half = tl.arange(0, BLOCK // 2)[None, :]
    known = exists & (half < d // 2)
    c = tl.load(cos + angle * angle_step + half * spread, mask=known, other=0.0)
    s = tl.load(sin + angle * angle_step + half * spread, mask=known, other=0.0)
    given = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (ROWS, BLOCK))
    factor = tl.load(weight + at, mask=at < d, other=0.0).to(tl.float32)
    value = tl.load(x + token * step + head * d + at, mask=inside, other=0.0).to(tl.float32)
    inverse = (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / d + eps))[:, None]
    normed = value * inverse
    wanted = given * factor
    along = (tl.sum(wanted * normed, axis=1) / d)[:, None]
    found = (wanted - normed * along) * inverse
    tl.store(grad_x + (token * h + head) * d + at, found.to(grad_x.dtype.element_ty), mask=inside)
    if sums is not None:
        columns = tl.arange(0, BLOCK)
        tl.store(sums + tl.program_id(0).to(tl.int64) * d + columns, tl.sum(given * normed, axis=0), mask=columns < d)


def rms_norm_rotary(
    parts: Sequence[Tensor], weights: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float, early: bool
) -> Tensor:
    """Compute ``rotary.normalise_and_rotate``."""
    (b, _, h, d), total, first = parts[0].shape, sum(x.shape[1] for x in parts), 0
    out, count = parts[0].new_empty((b, total, h, d)), rows_of(d)
    for x, weight in zip(parts, weights, strict=True):
        n = x.shape[1]
        if rows := b * n * h:
            tokens = _tokens(x)
            with torch.cuda.device_of(x):
                _norm_rotary[(triton.cdiv(rows, count),)](
                    tokens, weight.contiguous(), cos, sin, out, rows, n, h, d, tokens.stride(0), first, total,
                    *_layout(cos, sin), eps, ROWS=count, BLOCK=triton.next_power_of_2(d), num_warps=WARPS,
                )  # fmt: skip
        first += n
    return out


def rms_norm_rotary_backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    early: bool,
    trains: bool,
) -> list[Tensor]:
    """Return the gradients of the parts, and of all weights if one trains."""
    (b, total, h, d), first = grad.shape, 0
    if grad.stride(3) != 1 or (b > 1 and grad.stride(0) != total * grad.stride(1)):
        grad = grad.contiguous()
    count, of_parts, of_weights = rows_of(d), list[Tensor](), list[Tensor]()
    for x, weight in zip(parts, weights, strict=True):
        n = x.shape[1]
        rows, grad_x = b * n * h, x.new_empty(x.shape)
        programs = triton.cdiv(rows, count)
        sums = x.new_empty((programs, d), dtype=torch.float32) if trains else None
        if rows:
            tokens = _tokens(x)
            with torch.cuda.device_of(x):
                _norm_rotary_backward[(programs,)](
                    grad, tokens, weight.contiguous(), cos, sin, grad_x, sums, rows, n, h, d, tokens.stride(0),
                    grad.stride(1), grad.stride(2), first, total, *_layout(cos, sin), eps, ROWS=count,
                    BLOCK=triton.next_power_of_2(d), num_warps=WARPS,
                )  # fmt: skip
        of_parts.append(grad_x)
        of_weights += [] if sums is None else [sums.sum(0).to(weight.dtype)]
        first += n
    return [*of_parts, *of_weights]


def _tokens(x: Tensor) -> Tensor:  # [b, n, h, d] -> [b n, h d]
    """Return the rows of a tensor's tokens, copied only if they are not equally far from each other."""
    rows = x.flatten(2).flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _layout(cos: Tensor, sin: Tensor) -> tuple[int, int, int]:
    """Return the rows of a table for each sample, 0 if all share them, and the distances of its rows and numbers."""
    assert cos.stride() == sin.stride() and cos.shape == sin.shape and cos.dtype == sin.dtype == torch.float32
    assert len(cos) == 1 or cos.stride(0) == cos.shape[1] * cos.stride(1)
    return 0 if len(cos) == 1 else cos.shape[1], cos.stride(1), cos.stride(2)
