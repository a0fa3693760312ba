"""Triton kernels for the updates of bf16 numbers: each reads and writes every number once.

Called by ``bf16_updates.py`` on CUDA; importing this module needs Triton. ``enable_fp_fusion`` is off, so that the
arithmetic equals single fp32 operations, as on the CPU. All tensors of a call are contiguous; n is their length.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8  # elements of a program, and its warps


@triton.jit
def _round_bits(x, noise):
    """Round fp32 to bf16 with 16 random bits, given as int16 less 2^15."""
    bits = x.to(tl.int32, bitcast=True) + (noise.to(tl.int32) + 32768)
    cut = (bits & -65536).to(tl.float32, bitcast=True)  # a bf16 number
    return tl.where(x == x, cut, float("nan")).to(tl.bfloat16)


@triton.jit
def _round(out, x, noise, n, BLOCK: tl.constexpr):
    """Round x into out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside, other=0.0)
    tl.store(out + at, _round_bits(value, tl.load(noise + at, mask=inside, other=0)), mask=inside)


@triton.jit
def _adamw(
    parameter, gradient, mean, square, compensation, mean_noise, square_noise, n,
    lerp, beta_2, rest_2, root, eps, decay, rate, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a step of AdamW; see ``bf16_updates.adamw_bf16``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.where(lerp < 0.5, m + lerp * (g - m), g - (g - m) * (1.0 - lerp))  # as torch's lerp
    v = v * beta_2 + rest_2 * g * g
    tl.store(mean + at, _round_bits(m, tl.load(mean_noise + at, mask=inside, other=0)), mask=inside)
    tl.store(square + at, _round_bits(v, tl.load(square_noise + at, mask=inside, other=0)), mask=inside)
    weight = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
    if compensation is not None:
        weight += tl.load(compensation + at, mask=inside, other=0.0).to(tl.float32)
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    weight = weight * decay - tl.div_rn(rate * m, denominator)
    kept = weight.to(parameter.dtype.element_ty)
    tl.store(parameter + at, kept, mask=inside)
    if compensation is not None:
        tl.store(compensation + at, (weight - kept.to(tl.float32)).to(tl.bfloat16), mask=inside)


def round_into(out: Tensor, x: Tensor, noise: Tensor) -> None:
    """Round fp32 x into bf16 out with random bits (int16 less 2^15)."""
    n = x.numel()
    with torch.cuda.device_of(x):
        _round[(triton.cdiv(n, BLOCK),)](out, x, noise, n, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False)


def adamw(changed: Sequence[Tensor], read: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Take a step of AdamW in place.

    Args:
        changed: parameter, running means, compensation of a bf16 parameter.
        read: gradient, random bits of both means.
        factors: ``bf16_updates.Factors``.
    """
    parameter, mean, square, *compensation = changed
    gradient, *noise = read
    lerp, beta_2, *others = factors
    n = parameter.numel()
    with torch.cuda.device_of(parameter):
        _adamw[(triton.cdiv(n, BLOCK),)](
            parameter, gradient, mean, square, compensation[0] if compensation else None, *noise, n,
            lerp, beta_2, 1 - beta_2, *others, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
