"""The sizes by which the kernels of this folder divide their work. Imports no Triton."""

from __future__ import annotations

from torch import Tensor

LONGEST = 8192
"""The largest width: a row stays in the registers of one program."""
ELEMENTS = 4096
"""Elements of short rows that one program takes."""
ROWS = 32
"""Tokens over which one program sums a modulation's gradient."""


def program_count(n: int) -> int:
    """Return the number of programs, and so of rows of partial sums, for the n tokens of a sample."""
    return -(-n // ROWS)


def partial_bytes(x: Tensor, count: int) -> int:  # [b, n, d]
    """Return the bytes of the fp32 partial sums for ``count`` gradients of modulations."""
    b, n, d = x.shape
    return 4 * count * b * program_count(n) * d


def rows_of(d: int) -> int:
    """Return the number of short rows that one program takes: a power of two."""
    return max(1, ELEMENTS // (1 << (d - 1).bit_length()))
