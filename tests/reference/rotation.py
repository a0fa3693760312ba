"""Block Hadamard rotation and rounding in float64 with numpy, from ConvRot's definitions (arXiv:2512.03673, section 3).

Independent of the package: the tests compare its layers and kernels with these.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

R4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2


def regular_hadamard(size: int) -> Matrix:  # [size, size]
    """Kronecker powers of R4."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, R4)
    assert len(matrix) == size
    return matrix


def block_rotation(width: int) -> Matrix:  # [width, width]
    """The block diagonal matrix with the largest of 256, 64 and 16 that divides the width; else the identity."""
    size = next((size for size in (256, 64, 16) if width % size == 0), 1)
    return np.kron(np.eye(width // size), regular_hadamard(size))


def rounded_rows(values: Matrix) -> Matrix:
    """Each row rounded to 255 even levels, the largest magnitude being the 127th."""
    scale = np.abs(values).max(axis=1, keepdims=True) / 127
    return np.round(values / scale) * scale


def rounded_to_quantiles(values: Matrix, quantiles: Matrix) -> Matrix:
    """nf4: the nearest quantile times the largest magnitude of each 64 consecutive weights (arXiv:2305.14314)."""
    blocks = values.reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs((blocks / largest)[..., None] - quantiles).argmin(axis=-1)
    result: Matrix = (quantiles[nearest] * largest).reshape(values.shape)
    return result
