"""Triton kernels for SwiGLU: each reads and writes every number once, and computes in fp32.

Called by ``swiglu.py`` on CUDA; importing this module needs Triton. A program takes ``BLOCK`` numbers of one row. Rows
may lie apart in memory: the halves of one tensor are read and written where they are.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 1024, 4  # a thread loads 16 bytes of a 16-bit type


@triton.jit
def _swiglu(gate, value, out, d, gate_step, value_step, BLOCK: tl.constexpr):
    """Compute some numbers of a row: out = silu(gate) * value."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < d
    gated = tl.load(gate + row * gate_step + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(value + row * value_step + at, mask=inside, other=0.0).to(tl.float32)
    found = gated / (1.0 + tl.exp(-gated)) * factor
    tl.store(out + row * d + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    grad, gate, value, grad_gate, grad_value, d, grad_step, gate_step, value_step, out_step, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute, for some numbers of a row, the gradients of gate and value."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < d
    given = tl.load(grad + row * grad_step + at, mask=inside, other=0.0).to(tl.float32)
    gated = tl.load(gate + row * gate_step + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(value + row * value_step + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gated))
    of_gate = given * factor * share * (1.0 + gated * (1.0 - share))
    tl.store(grad_gate + row * out_step + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    of_value = given * gated * share
    tl.store(grad_value + row * out_step + at, of_value.to(grad_value.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Compute ``swiglu.swiglu`` of gate and value."""
    out, d = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), gate.shape[-1]
    if out.numel():
        gates, values = _rows(gate), _rows(value)
        with torch.cuda.device_of(gate):
            _swiglu[(len(gates), triton.cdiv(d, COLUMNS))](
                gates, values, out, d, gates.stride(0), values.stride(0), BLOCK=COLUMNS, num_warps=WARPS
            )
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, value: Tensor, joined: bool) -> list[Tensor]:
    """Compute ``swiglu._backward_by_torch``."""
    d = gate.shape[-1]
    whole = [gate.new_empty((*gate.shape[:-1], d * (1 + joined))) for _ in range(2 - joined)]
    if grad.numel():
        grads, gates, values = _rows(grad), _rows(gate), _rows(value)
        grad_gate, grad_value = (each.view(len(gates), -1) for each in (whole[0], whole[-1]))
        with torch.cuda.device_of(gate):
            _swiglu_backward[(len(gates), triton.cdiv(d, COLUMNS))](
                grads, gates, values, grad_gate, grad_value[:, -d:], d, grads.stride(0), gates.stride(0),
                values.stride(0), grad_gate.stride(0), BLOCK=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
    return whole


def _rows(x: Tensor) -> Tensor:  # [..., d] -> [n, d]
    """Return the rows of a tensor, copied only if they are not equally far from each other."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
