"""A frozen layer's weight in fp32, for any precision, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

ROWS = 256


def row_blocks(layer: nn.Module, outputs: int, rows: int = ROWS) -> Iterator[Tensor]:  # fp32 [rows, i]
    """Yield the dequantised weight, of ``outputs`` rows, of a frozen linear layer or 1x1 convolution in blocks of rows.

    quanto's weights, and nf4 weights whose rows do not fill whole blocks of scales, are dequantised at once.
    """
    row_block = getattr(layer, "row_block", None)  # our own quantised layers dequantise some of their rows
    if row_block is not None:
        for first in range(0, outputs, rows):
            yield row_block(first, min(first + rows, outputs))
        return
    weight = layer.get_parameter("weight").detach()
    if hasattr(weight, "qtype"):  # quanto's
        weight = weight.dequantize()
    yield from (block.flatten(1).float() for block in weight.split(rows))
