"""Quantise rotated rows to int8 (``simpletune::int8_rotated_rows``), with the same bits on the CPU and on CUDA.

Shapes: m rows (samples x tokens), k the length of a row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from simpletune.engine.quant import int8_products
from simpletune.engine.quant.rotation import SIZES, hadamard
from simpletune.system.console import say

_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_LIBRARY.define("int8_rotated_rows(Tensor x, int block) -> (Tensor, Tensor)")
_LIBRARY.impl("int8_rotated_rows", torch.library.fallthrough_kernel, "Autograd")


def int8_rotated_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantise x H like ``int8_rows``, without rounding x H to x's type in between.

    Args:
        x: [..., k].
        block: size of H's blocks (rotation.py), which divides k; 0: do not rotate.

    Returns:
        int8 [m, k] and fp32 [m].
    """
    return torch.ops.simpletune.int8_rotated_rows(x, block) if block else int8_products.int8_rows(x)


@torch.library.register_fake("simpletune::int8_rotated_rows", lib=_LIBRARY)
def _(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return x.new_empty((rows, x.shape[-1]), dtype=torch.int8), x.new_empty((rows,), dtype=torch.float32)


@torch.library.impl(_LIBRARY, "int8_rotated_rows", "CPU")
def _by_torch(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return int8_products.rounded_rows(hadamard(x.reshape(-1, x.shape[-1]).float(), block))


@torch.library.impl(_LIBRARY, "int8_rotated_rows", "CUDA")
def _on_cuda(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    def kernel() -> tuple[Tensor, Tensor]:
        from simpletune.engine.quant import int8_rows_kernel

        return int8_rows_kernel.rotated_rows(x, block, int8_products.LEAST)

    return int8_products.FALLBACK.run(x.device, kernel, lambda: _by_torch(x, block))


def why_not(device: torch.device) -> str | None:
    """Why a device that multiplies in int8 cannot rotate rows first, tried and logged once; None if it can."""
    return _found_out(device)


# As int8_products.why_not. On a function with lru_cache itself, the compiler would ignore the mark and trace into it.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=8)
def _found_out(device: torch.device) -> str | None:
    with _disable_current_modes(), torch.no_grad():  # use real tensors, and hide them from the accounting
        reason = int8_products.try_kernel(_tried, device)
    if reason is not None:
        say(f"products NOT in int8 on {device} where inputs are rotated, but with dequantised weights: {reason}")
    return reason


def _tried(device: torch.device) -> str | None:
    """Compare rotated rows with the CPU's."""
    if device.type != "cuda":
        return None
    from simpletune.engine.quant import int8_rows_kernel  # not the operator, which would hide a failure

    numbers = torch.arange(5 * 768).remainder(255).sub(127).float().view(5, 768)
    for block in SIZES:
        rows = int8_rows_kernel.rotated_rows(numbers.to(device), block, int8_products.LEAST)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(rows, _by_torch(numbers, block), strict=True)):
            return "the kernel's rotated rows differ from the CPU's"
    return None
