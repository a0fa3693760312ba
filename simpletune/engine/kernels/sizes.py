"""Tokens that the kernels of this folder work on, and the sizes by which they divide them. Imports no Triton.

Shapes: b samples, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

LONGEST = 8192
"""The largest width: a row stays in the registers of one program."""
ELEMENTS = 4096
"""Elements of short rows that one program takes."""
ROWS = 32
"""Tokens over which one program sums a modulation's gradient."""


class NormTokens(NamedTuple):
    """Tokens of a norm in the backward pass; operators take them as a list.

    Args:
        x: the tokens that were normalised [b, n, d].
        y: what had been added to them; None if not saved.
        gate: gate of y [b, d]; None: nothing had been added.
        grad_total: the gradient of x from elsewhere.
    """

    x: Tensor
    y: Tensor | None
    gate: Tensor | None
    grad_total: Tensor | None

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> NormTokens:
        """Build from an operator's list."""
        x, *others = tensors
        assert x is not None
        return cls(x, *others)


def program_count(n: int) -> int:
    """Return the number of programs, and so of rows of partial sums, for the tokens of a sample."""
    return -(-n // ROWS)


def partial_bytes(x: Tensor, count: int) -> int:
    """Return the bytes of the fp32 partial sums for ``count`` gradients of modulations.

    Args:
        x: [b, n, d].
        count: number of gradients.
    """
    b, n, d = x.shape
    return 4 * count * b * program_count(n) * d


def rows_of(d: int) -> int:
    """Return the number of short rows that one program takes: a power of two."""
    return max(1, ELEMENTS // (1 << (d - 1).bit_length()))
