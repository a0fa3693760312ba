"""Triton kernels for adaptive norms and gated sums: each reads and writes every number once, and sums in fp32.

Called by ``adaln.py`` on CUDA; importing this module needs Triton. A program holds whole rows in registers. Sums over
tokens go through one row of partial sums for each ``ROWS`` tokens, in a fixed order.

Shapes: b samples, n tokens, d width; p partial sums of a sample.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from simpletune.engine.kernels.sizes import LONGEST, ROWS, program_count

WARPS = ((1024, 2), (2048, 4), (4096, 8), (LONGEST, 16))  # warps by the largest number of elements


@triton.jit
def _modulate(
    x, y, gate, scale, shift, scale_2, shift_2, total, out, out_2, mean, rstd, n, d, step, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute one token: total = x + gate * y, out = norm(total) * (1 + scale) + shift; y: None leaves x as it is."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < d
    own, sample = row * d + at, (row // n) * step + at
    value = tl.load(x + own, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        more = tl.load(y + own, mask=inside, other=0.0).to(tl.float32)
        kept = value + tl.load(gate + sample, mask=inside, other=0.0).to(tl.float32) * more
        kept = kept.to(total.dtype.element_ty)
        tl.store(total + own, kept, mask=inside)
        value = kept.to(tl.float32)
    middle = tl.sum(value, axis=0) / d
    centred = tl.where(inside, value - middle, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=0) / d + eps)
    tl.store(mean + row, middle)
    tl.store(rstd + row, inverse)
    normed = centred * inverse
    factor = 1.0 + tl.load(scale + sample, mask=inside, other=0.0).to(tl.float32)
    found = normed * factor + tl.load(shift + sample, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + own, found.to(out.dtype.element_ty), mask=inside)
    if out_2 is not None:
        factor = 1.0 + tl.load(scale_2 + sample, mask=inside, other=0.0).to(tl.float32)
        found = normed * factor + tl.load(shift_2 + sample, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_2 + own, found.to(out_2.dtype.element_ty), mask=inside)


@triton.jit
def _modulate_backward(
    grad, grad_2, grad_total, x, y, gate, scale, scale_2, mean, rstd, grad_x, grad_y, sums, n, d, step, parts,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute, for some tokens of a sample, the gradients of x and y, and partial sums of those of gate, scales and
    shifts."""
    part = tl.program_id(0).to(tl.int64)
    number, first = part // parts, (part % parts) * TOKENS
    at = tl.arange(0, BLOCK)
    inside = at < d
    sample = number * step + at
    factor = 1.0 + tl.load(scale + sample, mask=inside, other=0.0).to(tl.float32)
    if grad_2 is not None:
        factor_2 = 1.0 + tl.load(scale_2 + sample, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        gated = tl.load(gate + sample, mask=inside, other=0.0).to(tl.float32)
    if sums is not None:
        of_scale = tl.zeros((BLOCK,), tl.float32)
        of_shift = tl.zeros((BLOCK,), tl.float32)
        of_scale_2 = tl.zeros((BLOCK,), tl.float32)
        of_shift_2 = tl.zeros((BLOCK,), tl.float32)
        of_gate = tl.zeros((BLOCK,), tl.float32)
    for token in range(first, min(first + TOKENS, n)):
        row = number * n + token
        own = row * d + at
        inverse = tl.load(rstd + row)
        value = tl.load(x + own, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(inside, (value - tl.load(mean + row)) * inverse, 0.0)
        given = tl.load(grad + own, mask=inside, other=0.0).to(tl.float32)
        wanted = given * factor
        if sums is not None:
            of_scale += given * normed
            of_shift += given
        if grad_2 is not None:
            given = tl.load(grad_2 + own, mask=inside, other=0.0).to(tl.float32)
            wanted += given * factor_2
            if sums is not None:
                of_scale_2 += given * normed
                of_shift_2 += given
        along = tl.sum(wanted * normed, axis=0) / d
        found = (wanted - tl.sum(wanted, axis=0) / d - normed * along) * inverse
        if grad_total is not None:
            found += tl.load(grad_total + own, mask=inside, other=0.0).to(tl.float32)
        kept = found.to(grad_x.dtype.element_ty)
        tl.store(grad_x + own, kept, mask=inside)
        if grad_y is not None:
            tl.store(grad_y + own, (kept.to(tl.float32) * gated).to(grad_y.dtype.element_ty), mask=inside)
            if sums is not None:
                of_gate += kept.to(tl.float32) * tl.load(y + own, mask=inside, other=0.0).to(tl.float32)
    if sums is not None:
        out = sums + part * d + at
        plane = tl.num_programs(0).to(tl.int64) * d
        tl.store(out, of_scale, mask=inside)
        tl.store(out + plane, of_shift, mask=inside)
        if grad_2 is not None:
            tl.store(out + 2 * plane, of_scale_2, mask=inside)
            tl.store(out + 3 * plane, of_shift_2, mask=inside)
            out += 2 * plane
        if grad_y is not None:
            tl.store(out + 2 * plane, of_gate, mask=inside)


@triton.jit
def _add(x, y, gate, total, n, d, step, BLOCK: tl.constexpr):
    """Compute one token: total = x + gate * y."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < d
    own = row * d + at
    factor = tl.load(gate + (row // n) * step + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + own, mask=inside, other=0.0).to(tl.float32)
    value += factor * tl.load(y + own, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + own, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(
    grad, y, gate, grad_y, sums, n, d, step, parts, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Compute, for some tokens of a sample, the gradient of y, and partial sums of the gate's."""
    part = tl.program_id(0).to(tl.int64)
    number, first = part // parts, (part % parts) * TOKENS
    at = tl.arange(0, BLOCK)
    inside = at < d
    factor = tl.load(gate + number * step + at, mask=inside, other=0.0).to(tl.float32)
    if sums is not None:
        of_gate = tl.zeros((BLOCK,), tl.float32)
    for token in range(first, min(first + TOKENS, n)):
        own = (number * n + token) * d + at
        given = tl.load(grad + own, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_y + own, (given * factor).to(grad_y.dtype.element_ty), mask=inside)
        if sums is not None:
            of_gate += given * tl.load(y + own, mask=inside, other=0.0).to(tl.float32)
    if sums is not None:
        tl.store(sums + part * d + at, of_gate, mask=inside)


def block_of(d: int) -> tuple[int, int]:
    """Return the elements that a program holds for rows of this length, and its number of warps."""
    block = triton.next_power_of_2(d)
    return block, next(warps for most, warps in WARPS if block <= most)


def modulate(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scales: Sequence[Tensor], shifts: Sequence[Tensor], eps: float
) -> list[Tensor]:
    """Compute ``adaln.normalise_and_modulate``; return modulated tokens, the sum if anything is added, mean and inverse
    deviation."""
    (b, n, d), (block, warps) = x.shape, block_of(x.shape[2])
    x, y = x.contiguous(), None if y is None else y.contiguous()
    step, (gate, *rows) = _of_samples([gate, *scales, *shifts])
    own_scales, own_shifts = rows[: len(scales)], rows[len(scales) :]
    statistics = [x.new_empty((b, n), dtype=torch.float32) for _ in range(2)]
    outs = [torch.empty_like(x) for _ in scales]
    total = None if y is None else torch.empty_like(x)
    pairs = list(zip(own_scales, own_shifts, strict=True))
    (scale, shift), (scale_2, shift_2) = pairs if len(pairs) == 2 else (*pairs, (None, None))
    if b * n:
        with torch.cuda.device_of(x):
            _modulate[(b * n,)](
                x, y, gate, scale, shift, scale_2, shift_2, total, outs[0], outs[1] if len(outs) == 2 else None,
                *statistics, n, d, step, eps, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return [*outs, *([] if total is None else [total]), *statistics]


def modulate_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    grad_total: Tensor | None,
    scales: Sequence[Tensor],
    statistics: Sequence[Tensor],
    eps: float,
    trains: bool,
) -> list[Tensor]:
    """Compute ``adaln._modulate_backward_by_torch`` of one or two modulations."""
    (b, n, d), (block, warps) = x.shape, block_of(x.shape[2])
    grads, x = [grad.contiguous() for grad in grads], x.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    y = None if y is None else y.contiguous()
    step, (gate, *rows) = _of_samples([gate, *scales])
    grad_x, grad_y = torch.empty_like(x), None if gate is None else torch.empty_like(x)
    count = 2 * len(scales) + (gate is not None)
    portion, parts, sums = _partial_sums(x, count, trains)
    if b * n:
        with torch.cuda.device_of(x):
            _modulate_backward[(b * parts,)](
                grads[0], grads[1] if len(grads) == 2 else None, grad_total, x, y, gate, rows[0],
                rows[1] if len(rows) == 2 else None, *statistics, grad_x, grad_y, sums, n, d, step, parts,
                BLOCK=block, TOKENS=portion, num_warps=warps,
            )  # fmt: skip
    added = [] if grad_y is None else [grad_y]
    return [grad_x, *added, *([] if sums is None else [sums.sum(2).to(x.dtype)])]


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Compute ``adaln.add_gated``."""
    (b, n, d), (block, warps) = x.shape, block_of(x.shape[2])
    x, y, total = x.contiguous(), y.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step, (rows,) = _of_samples([gate])
    if b * n:
        with torch.cuda.device_of(x):
            _add[(b * n,)](x, y, rows, total, n, d, step, BLOCK=block, num_warps=warps)
    return total


def gate_backward(grad: Tensor, y: Tensor | None, gate: Tensor) -> list[Tensor]:
    """Compute the gradients of ``adaln._Gate``: that of y, and that of the gate if y is given."""
    (b, n, d), (block, warps) = grad.shape, block_of(grad.shape[2])
    grad, y = grad.contiguous(), None if y is None else y.contiguous()
    step, (rows,) = _of_samples([gate])
    grad_y = torch.empty_like(grad)
    tokens, parts, sums = _partial_sums(grad, 1, y is not None)
    if b * n:
        with torch.cuda.device_of(grad):
            _gate_backward[(b * parts,)](
                grad, y, rows, grad_y, sums, n, d, step, parts, BLOCK=block, TOKENS=tokens, num_warps=warps
            )
    return [grad_y, *([] if sums is None else [sums.sum(2).to(grad.dtype)])]


def _partial_sums(x: Tensor, count: int, trains: bool) -> tuple[int, int, Tensor | None]:
    """Return tokens per program, programs per sample, and the memory [count, b, p, d] for ``count`` partial sums."""
    b, n, d = x.shape
    if not trains:
        return 1, n, None
    parts = program_count(n)
    return ROWS, parts, x.new_empty((count, b, parts, d), dtype=torch.float32)


def _of_samples(tensors: Sequence[Tensor | None]) -> tuple[int, list[Tensor | None]]:
    """Return modulations [b, d] as rows with a common stride: the stride, and the tensors."""
    found = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.stride() != (found[0].stride(0), 1) for tensor in found):
        tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        return found[0].shape[1], list(tensors)
    return found[0].stride(0), list(tensors)
