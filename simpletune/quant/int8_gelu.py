"""Quantise GELU's output, or the gradient of its input, without writing either: one kernel on CUDA, torch's operators
elsewhere.

Both are custom operators (``simpletune::int8_gelu_rows``, ``simpletune::int8_gelu_gradient_rows``), so that fake
tensors, memory accounting and predictions see what CUDA allocates and moves. GELU is the approximation by tanh. The CPU
computes what torch's GELU and ``int8_rows`` do one after the other; the kernel's exponential may differ in the last
bits.

Shapes: m rows (samples x tokens), k the length of a row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from simpletune.printable import reason_of
from simpletune.quant import int8_products
from simpletune.quant.int8_rotated import int8_rotated_rows
from simpletune.system.console import say

TOLERANCE = 1e-5
"""By how much a kernel's scales may differ from torch's, relatively, on fp32 numbers."""

_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_LIBRARY.define("int8_gelu_rows(Tensor x, int block) -> (Tensor, Tensor)")
_LIBRARY.define("int8_gelu_gradient_rows(Tensor grad, Tensor x, Tensor columns) -> (Tensor, Tensor)")
for _name in ("int8_gelu_rows", "int8_gelu_gradient_rows"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # int8_feed_forward.py defines the gradients


def int8_gelu_rows(x: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise GELU(x) like ``int8_rows``.

    Args:
        x: [..., k].
        block: size of the blocks of a rotation of the rows (rotation.py), which divides k; 0: none.

    Returns:
        int8 [m, k] and fp32 [m].
    """
    return torch.ops.simpletune.int8_gelu_rows(x, block)


def int8_gelu_gradient_rows(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the gradient of GELU's input x, times columns, like ``int8_rows``.

    Args:
        grad: [..., k], the gradient of GELU(x).
        x: [..., k].
        columns: fp32 [k].

    Returns:
        int8 [m, k] and fp32 [m].
    """
    return torch.ops.simpletune.int8_gelu_gradient_rows(grad, x, columns)


@torch.library.register_fake("simpletune::int8_gelu_rows", lib=_LIBRARY)
def _(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return _empty_rows(x)


@torch.library.register_fake("simpletune::int8_gelu_gradient_rows", lib=_LIBRARY)
def _(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_rows(x)


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return x.new_empty((rows, x.shape[-1]), dtype=torch.int8), x.new_empty((rows,), dtype=torch.float32)


@torch.library.impl(_LIBRARY, "int8_gelu_rows", "CPU")
def _rows_by_torch(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return int8_rotated_rows(F.gelu(x, approximate="tanh"), block)


@torch.library.impl(_LIBRARY, "int8_gelu_gradient_rows", "CPU")
def _gradient_rows_by_torch(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    return int8_products.int8_rows(torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), columns)


_given_up: dict[torch.device, str] = {}
"""Devices whose kernel failed in the middle of a run, and why."""


def _give_up(device: torch.device, error: Exception) -> None:
    """Log once that a device's kernel failed; torch's operators take over, with the same rows but for the last bits."""
    from simpletune.quant import int8_kernel

    if not int8_kernel.is_of_the_kernel(error):
        raise error
    if device not in _given_up:
        _given_up[device] = reason_of(error)
        say(f"kernel  GELU NO LONGER quantised in one launch on {device}, but in two: {_given_up[device]}")


@torch.library.impl(_LIBRARY, "int8_gelu_rows", "CUDA")
def _rows_on_cuda(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    from simpletune.quant import int8_gelu_kernel

    if x.device not in _given_up:
        try:
            return int8_gelu_kernel.gelu_rows(x, None, None, block, int8_products.LEAST)
        except Exception as error:
            _give_up(x.device, error)
    return _rows_by_torch(x, block)


@torch.library.impl(_LIBRARY, "int8_gelu_gradient_rows", "CUDA")
def _gradient_rows_on_cuda(grad: Tensor, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    from simpletune.quant import int8_gelu_kernel

    if x.device not in _given_up:
        try:
            return int8_gelu_kernel.gelu_rows(x, grad, columns, 0, int8_products.LEAST)
        except Exception as error:
            _give_up(x.device, error)
    return _gradient_rows_by_torch(grad, x, columns)


@lru_cache(maxsize=8)
def why_not(device: torch.device) -> str | None:
    """Why a device that multiplies in int8 cannot quantise GELU in one launch, by trying and logged once; None if it
    can."""
    with _disable_current_modes(), torch.no_grad():  # use real tensors, and hide them from the accounting
        reason = int8_products.outcome(_tried, device)
    if reason is not None:
        say(f"kernel  GELU NOT quantised in one launch on {device}, but in two: {reason}")
    return reason


def _tried(device: torch.device) -> str | None:
    """Compare rows of GELU and of its gradient with torch's on the CPU."""
    if device.type != "cuda":
        return None
    from simpletune.quant import int8_gelu_kernel  # not the operator, which would hide a failure

    x = torch.linspace(-6, 6, 5 * 768).view(5, 768)
    grad, columns = x.flip(1).contiguous(), torch.linspace(0.5, 2, 768)
    found = [
        int8_gelu_kernel.gelu_rows(x.to(device), None, None, 0, int8_products.LEAST),
        int8_gelu_kernel.gelu_rows(x.to(device), None, None, 256, int8_products.LEAST),
        int8_gelu_kernel.gelu_rows(x.to(device), grad.to(device), columns.to(device), 0, int8_products.LEAST),
    ]
    expected = [_rows_by_torch(x, 0), _rows_by_torch(x, 256), _gradient_rows_by_torch(grad, x, columns)]
    return None if all(map(_are_close, found, expected)) else "the kernel's rows are not those of torch"


def _are_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether rows differ by rounding at most."""
    (q, scale), (other, other_scale) = (part.cpu() for part in found), expected
    return bool((q.int() - other.int()).abs().max() <= 1) and torch.allclose(scale, other_scale, rtol=TOLERANCE)
