"""A frozen layer's weight in fp32, for any precision, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

ROWS = 256


@runtime_checkable
class Unpacks(Protocol):
    """A quantised layer that can dequantise some of its rows."""

    def row_block(self, first: int, last: int) -> Tensor:  # fp32 [last - first, i]
        """The dequantised rows from ``first`` to before ``last``."""


def row_blocks(layer: nn.Module, outputs: int, rows: int = ROWS) -> Iterator[Tensor]:  # fp32 [rows, i]
    """Yield the dequantised weight of a linear layer or 1x1 convolution in blocks of rows, in order; the last may be
    smaller.

    quanto's weights, and nf4 weights whose rows do not fill whole blocks of scales, are dequantised at once.

    Args:
        layer: the frozen layer.
        outputs: the number of its rows.
        rows: the number of rows in a block.
    """
    if isinstance(layer, Unpacks):
        for first in range(0, outputs, rows):
            yield layer.row_block(first, min(first + rows, outputs))
        return
    weight = layer.get_parameter("weight").detach()
    if hasattr(weight, "qtype"):  # quanto's
        weight = weight.dequantize()
    yield from (block.flatten(1).float() for block in weight.split(rows))
