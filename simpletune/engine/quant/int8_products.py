"""Products of int8 activations with int8 weights, with the same arithmetic on the CPU and, in Triton kernels, on CUDA.

y = (x_q q^T) * x_scale * scale + bias, with an exact sum in int32 and the rest in fp32. x_q = round(x / x_scale), where
the scale of a row is its largest magnitude / 127. Rows may be rotated first (rotation.py). The steps are custom
operators (``simpletune::int8_rows``, ``int8_rotated_rows``, ``int8_product``), so that fake tensors, memory accounting
and ``torch.compile`` see exactly what CUDA allocates: rows, scales and output, but nothing in int32.

Shapes: m rows (samples x tokens), i input and o output features.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from simpletune.engine.kernels.fallback import Fallback, run_with_room
from simpletune.engine.quant.rotation import SIZES, hadamard, rotate_rows, rotates_weight
from simpletune.system.console import say
from simpletune.system.devices import sm
from simpletune.system.shell import install_command

FEW_ROWS = 16
"""Up to this many rows the weights are dequantised, because a tile of the kernel would be mostly empty."""
LEAST = 2.0**-100
"""A row whose largest magnitude is smaller becomes zeros: its scale or the inverse would be subnormal or infinite."""
LONGEST_SUM = (2**31 - 1) // 127**2
OLDEST = (8, 0)  # Triton 3.7 cannot compile int8 products for sm_75

FALLBACK = Fallback("products NO LONGER in int8 on {device}, multiplying with dequantised weights: {reason}")
"""Where kernels of this folder have failed in the middle of a run."""
_LIBRARY = torch.library.Library("simpletune", "DEF")  # int8_linear.py defines the gradients


def int8_rows(
    x: Tensor,  # [..., k]
    columns: Tensor | None = None,  # fp32 [k]; None: ones
) -> tuple[Tensor, Tensor]:  # int8 [m, k], fp32 [m]
    """Quantise to symmetric, nearest int8 with one scale per row: x * columns ~ q * scale, |error| <= scale / 2."""
    # A row of zeros gets scale 1. One with NaN or infinity gets scale NaN, so that every product with it is NaN.
    return torch.ops.simpletune.int8_rows(x, columns)


def int8_rotated_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantise x H like ``int8_rows``; ``block``: the size of H's blocks (rotation.py), or 0: do not rotate."""
    # x H is not rounded to x's type before it is quantised; the block divides x's last dimension.
    return torch.ops.simpletune.int8_rotated_rows(x, block) if block else int8_rows(x)


def int8_product(
    x: Tensor,  # int8 [m, k]
    x_scale: Tensor,  # fp32 [m]
    weight: Tensor,  # int8 [n, k], of any strides
    scale: Tensor | None,  # fp32 [n]
    bias: Tensor | None,  # [n]
    dtype: torch.dtype,
) -> Tensor:  # [m, n]
    """Compute (x weight^T) * x_scale * scale + bias in a given type, with an exact sum and the rest in fp32."""
    if x.shape[1] > LONGEST_SUM:
        raise ValueError(f"a sum of {x.shape[1]} int8 products may overflow int32; the limit is {LONGEST_SUM}")
    return torch.ops.simpletune.int8_product(x, x_scale, weight, scale, bias, dtype)


def empty_rows(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Make rows and scales of x without values, for fake tensors."""
    rows = x.numel() // x.shape[-1]
    return x.new_empty((rows, x.shape[-1]), dtype=torch.int8), x.new_empty((rows,), dtype=torch.float32)


def _rows_by_torch(x: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    values = x.reshape(-1, x.shape[-1]).float()
    return rounded_rows(values if columns is None else values * columns)


def rounded_rows(values: Tensor) -> tuple[Tensor, Tensor]:  # fp32 [m, k] -> int8 [m, k], fp32 [m]
    """Quantise like ``int8_rows`` by torch's operators, with the kernel's arithmetic."""
    largest = values.abs().amax(dim=1)
    finite = largest < torch.inf  # also false for NaN
    counts = finite & (largest >= LEAST)
    divisor = torch.where(counts, largest, 1.0)
    scale = torch.where(counts, divisor / 127, 1.0).where(finite, torch.nan)
    inverse = torch.where(counts, torch.full_like(divisor, 127) / divisor, 0.0)  # 127 / x would round 1 / x first
    q = (values * inverse[:, None]).round_().where(finite[:, None], 0.0)
    return q.to(torch.int8), scale


def _rotated_rows_by_torch(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return rounded_rows(hadamard(x.reshape(-1, x.shape[-1]).float(), block))


def _product_on_cpu(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if x.shape[1] == 1:  # torch 2.13 returns wrong results for sums of a single product
        x, weight = F.pad(x, (0, 1)), F.pad(weight, (0, 1))
    y = torch._int_mm(x, weight.t()).float().mul_(x_scale[:, None])
    if scale is not None:
        y.mul_(scale)
    if bias is not None:
        y.add_(bias.float())
    return y.to(dtype)


def rows_kernels() -> Any:
    """Import the Triton kernels for rows, where a failure of Triton's import counts as one of the kernel."""
    from simpletune.engine.quant import int8_rows_kernel

    return int8_rows_kernel


def _product_on_cuda(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    given = x, x_scale, weight, scale, bias, dtype
    return FALLBACK.run(x.device, lambda: _product_by_kernel(*given), lambda: _dequantised_product(*given))


def _product_by_kernel(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    tunes: bool = True,
) -> Tensor:
    from simpletune.engine.quant import int8_gradient_kernel, int8_kernel

    if scale is None and bias is None and int8_gradient_kernel.reads_words(weight):
        tile = None if tunes else int8_gradient_kernel.TILES[-1]
        return int8_gradient_kernel.gradient((x, x_scale), weight, dtype, tile)
    tile = None if tunes else int8_kernel.SAFE_TILE
    return int8_kernel.product((x, x_scale), weight, scale, bias, dtype, tile)


def _dequantised_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if scale is not None and dtype == torch.float16:  # x @ q would overflow
        weight, scale = dequantise_weight(weight, scale, dtype), None
    y = (x.to(dtype) * x_scale[:, None].to(dtype)) @ weight.to(dtype).t()
    y = y if scale is None else y.mul_(scale)
    return y if bias is None else y.add_(bias)


FALLBACK.define(
    _LIBRARY,
    "int8_rows(Tensor x, Tensor? columns) -> (Tensor, Tensor)",
    _rows_by_torch,
    lambda x, columns: rows_kernels().rows(x, columns, LEAST),
)
FALLBACK.define(
    _LIBRARY,
    "int8_rotated_rows(Tensor x, int block) -> (Tensor, Tensor)",
    _rotated_rows_by_torch,
    lambda x, block: rows_kernels().rotated_rows(x, block, LEAST),
)
_LIBRARY.define(
    "int8_product(Tensor x, Tensor x_scale, Tensor weight, Tensor? scale, Tensor? bias, ScalarType dtype) -> Tensor"
)
_LIBRARY.impl("int8_product", torch.library.fallthrough_kernel, "Autograd")
_LIBRARY.impl("int8_product", _product_on_cpu, "CPU")
_LIBRARY.impl("int8_product", _product_on_cuda, "CUDA")  # by its own: without the kernel it dequantises the weight
torch.library.register_fake("simpletune::int8_rows", empty_rows, lib=_LIBRARY)
torch.library.register_fake("simpletune::int8_rotated_rows", empty_rows, lib=_LIBRARY)
torch.library.register_fake(
    "simpletune::int8_product",
    lambda x, x_scale, weight, scale, bias, dtype: x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype),
    lib=_LIBRARY,
)


def dequantise_weight(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:  # [o, ...], [o] -> [o, ...]
    """Unpack a weight in one pass, rounding once."""
    return torch.mul(q, scale.view(-1, *[1] * (q.dim() - 1)), out=torch.empty_like(q, dtype=dtype))


def input_gradient(
    grad_y: Tensor,  # [..., o]
    q: Tensor,  # int8 [o, i]
    scale: Tensor,  # fp32 [o]
    block: int = 0,
) -> Tensor:  # [..., i]
    """Compute the gradient of x with the dequantised weight, in the gradient's type.

    ``block``: the block size of the rotation that the weight is stored in, and the gradient is not; 0: none.
    """
    weight = dequantise_weight(q, scale, grad_y.dtype)
    if not block:
        return grad_y @ weight
    if rotates_weight(grad_y, grad_y.shape[-1]):
        return grad_y @ rotate_rows(weight, block)
    return rotate_rows(grad_y @ weight, block)


def int8_input_gradient(grad_y: Tensor, q: Tensor, scale: Tensor) -> Tensor:  # [..., o], [o, i], [o] -> [..., i]
    """Compute the gradient of x in int8. The weight's scales lie along the sum, so they are folded into the rows."""
    rows, row_scale = int8_rows(grad_y, scale)
    return int8_product(rows, row_scale, q.t(), None, None, grad_y.dtype).view(*grad_y.shape[:-1], q.shape[1])


def can_multiply(x: Tensor) -> bool:
    """Return whether to multiply a tensor in int8: it has enough rows, and its device supports it."""
    return x.numel() > FEW_ROWS * x.shape[-1] and int8_problem(x.device) is None


def int8_problem(device: torch.device) -> str | None:
    """Return why a device cannot multiply in int8, found by trying and logged once; None if it can."""
    warning = "products NOT in int8 on {device}, multiplying with dequantised weights: {reason}"
    return FALLBACK.failed.get(device) or find_failure(_try_products, device, warning)


def rotation_problem(device: torch.device) -> str | None:
    """Return why a device that multiplies in int8 cannot rotate rows first, tried and logged once; None if it can."""
    warning = "products NOT in int8 on {device} where inputs are rotated, but with dequantised weights: {reason}"
    return find_failure(_try_rotated_rows, device, warning)


for _constant in (int8_problem, rotation_problem):  # not failure_of: with lru_cache, the compiler would trace into it
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's decorator imports all of dynamo


@lru_cache(maxsize=32)
def find_failure(trial: Callable[[torch.device], str | None], device: torch.device, warning: str) -> str | None:
    """Return what a trial of a kernel finds wrong, or why it fails, logged once; None if nothing is wrong."""
    with _disable_current_modes(), torch.no_grad():  # use real tensors, and hide them from the accounting
        try:
            reason = run_with_room(partial(trial, device))
        except torch.OutOfMemoryError:
            raise
        except ImportError as error:
            reason = f"{error}. Triton comes with torch's CUDA builds for Linux ({install_command('triton')})"
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # no compiler or headers, or it fails
            words = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
            reason = f"{words.strip()[:200]} (Triton needs a C compiler, gcc or CC)"
    if reason is not None:
        say(warning.format(device=device, reason=reason))
    return reason


def _try_products(device: torch.device) -> str | None:
    """Compare rows with the CPU's, and products of odd sizes and extreme values, in both layouts, with exact sums."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            return f"it is {sm(capability)}, and int8 products need {sm(OLDEST)} or newer"
    elif device.type != "cpu":
        return f"there is no kernel for {device.type}"
    numbers = torch.arange(33 * 96).remainder(255).sub(127).to(torch.int8).view(33, 96)
    weight = torch.full((40, 96), -127, dtype=torch.int8)
    weight[::3] = numbers[:14]
    multiply: Callable[..., Tensor] = int8_product
    if device.type == "cuda":  # the kernels, not the operators, which would hide a failure; without tuning
        multiply = partial(_product_by_kernel, tunes=False)
        rows = rows_kernels().rows(weight.to(device).float(), None, LEAST)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(rows, int8_rows(weight.float()), strict=True)):
            return "the kernel's rows differ from the CPU's"
    ones = torch.ones(33, device=device)
    for laid in (weight, weight.t().contiguous().t()):
        found = multiply(numbers.to(device), ones, laid.to(device), None, None, torch.float32)
        if not torch.equal(found.cpu().double(), numbers.double() @ weight.double().t()):
            return "the kernel's sums are not exact"
    return None


def _try_rotated_rows(device: torch.device) -> str | None:
    """Compare rotated rows with the CPU's."""
    if device.type != "cuda":
        return None
    numbers = torch.arange(5 * 768).remainder(255).sub(127).float().view(5, 768)
    for block in SIZES:
        rows = rows_kernels().rotated_rows(numbers.to(device), block, LEAST)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(rows, _rotated_rows_by_torch(numbers, block), strict=True)):
            return "the kernel's rotated rows differ from the CPU's"
    return None
