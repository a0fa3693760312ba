"""The int8 kernel tunings that a run's first step may have to wait for: count them, and run them ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.int8_products import FEW_ROWS, int8_problem, int8_product
from simpletune.system.console import say
from simpletune.system.options import plural

RowsOf = Callable[[str], Iterable[int]]
"""The rows that a layer of a given name multiplies: samples x tokens, for each picture size."""


class Tuning(NamedTuple):
    """A product for which a kernel is tuned."""

    rows: int  # the power of two from the number of rows on
    outputs: int
    inputs: int
    transposed: bool  # an input's gradient, which reads the weight transposed
    bias: bool


def tunings(model: nn.Module, rows_of: RowsOf) -> set[Tuning]:
    """Collect the products that the kernels are tuned for.

    Args:
        model: the denoiser, with or without an adapter; its tensors are not read.
        rows_of: the rows of each layer.
    """
    found = set()
    for name, layer in model.named_modules():
        if not isinstance(layer, Int8Linear) or not layer.int8_products:
            continue
        outputs, inputs = layer.weight.shape
        for rows in rows_of(name):
            if rows > FEW_ROWS:
                bucket = 1 << (rows - 1).bit_length()
                found.add(Tuning(bucket, outputs, inputs, False, layer.bias is not None))
                found |= {Tuning(bucket, inputs, outputs, True, False)} if layer.int8_gradient else set()
    return found


@torch.no_grad()
def tune(shapes: Iterable[Tuning], device: torch.device, dtype: torch.dtype) -> None:
    """Multiply random numbers of each shape once, which tunes the kernels and keeps the timings for later runs.

    ``device`` is a CUDA device that multiplies in int8, ``dtype`` the type of the run's activations and biases.
    """
    for m, n, k, transposed, bias in sorted(shapes):
        x, weight = (torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for shape in ((m, k), (n, k)))
        if transposed:
            int8_product(x, torch.ones(m, device=device), weight.t().contiguous().t(), None, None, dtype)
            continue
        added = torch.zeros(n, dtype=dtype, device=device) if bias else None
        int8_product(x, torch.ones(m, device=device), weight, torch.ones(n, device=device), added, dtype)


def announce_tuning(model: nn.Module, rows_of: RowsOf, device: torch.device) -> None:
    """Log how much tuning the first step includes, if any layer multiplies in int8 on this CUDA device."""
    shapes = len(tunings(model, rows_of))
    if shapes and int8_problem(device) is None:
        from simpletune.engine.quant.int8_kernel import TILES

        say(
            f"kernel  the first step tunes the int8 kernel: {plural(shapes, 'shape')} x {len(TILES)} tiles, seconds to "
            "minutes, except for shapes that Triton has timed on this card before (simpletune doctor --calibrate "
            "CONFIG does it ahead)"
        )
