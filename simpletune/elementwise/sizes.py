"""Sizes that decide how the kernels of this folder divide their work, without Triton.

Shapes: b samples, n tokens, d width.
"""

from __future__ import annotations

from torch import Tensor

LONGEST = 8192
"""The largest width: a row stays in the registers of one program."""
ELEMENTS = 4096
"""Numbers of short rows that one program takes."""
ROWS = 32
"""Tokens whose gradients of a modulation one program adds up."""


def parts_of(n: int) -> int:
    """Programs, and rows of partial sums, for the tokens of a sample."""
    return -(-n // ROWS)


def partial_bytes(x: Tensor, count: int) -> int:
    """Bytes of the fp32 partial sums of ``count`` gradients of modulations.

    Args:
        x: [b, n, d].
        count: how many.
    """
    b, n, d = x.shape
    return 4 * count * b * parts_of(n) * d


def rows_of(d: int) -> int:
    """Short rows that one program takes: a power of two."""
    return max(1, ELEMENTS // (1 << (d - 1).bit_length()))
