"""A feed-forward network with int8 products in float64 with numpy, from the definitions in benchmarks/results/notes.md.

Independent of the package: the tests compare its fused network and kernels with these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from reference.rotation import rounded_rows

Matrix = NDArray[np.float64]


class Layer(NamedTuple):
    """A frozen layer: q [o, i], scale [o], bias [o]."""

    q: Matrix
    scale: Matrix
    bias: Matrix

    @property
    def weight(self) -> Matrix:  # [o, i]
        return self.q * self.scale[:, None]


def gelu(x: Matrix) -> Matrix:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (arXiv:1606.08415, section 2)."""
    result: Matrix = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return result


def gelu_slope(x: Matrix) -> Matrix:
    """The derivative of ``gelu``, by the product rule."""
    inner = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    result: Matrix = 0.5 * (1 + inner) + 0.5 * x * (1 - inner**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return result


def network(x: Matrix, up: Layer, down: Layer) -> Matrix:  # [m, i] -> [m, o]
    """down(GELU(up(x))), with the rows of x and of GELU's output rounded."""
    h = rounded_rows(x) @ up.weight.T + up.bias
    result: Matrix = rounded_rows(gelu(h)) @ down.weight.T + down.bias
    return result


def gradient(x: Matrix, grad_y: Matrix, up: Layer, down: Layer, rounds: bool) -> Matrix:  # [m, i], [m, o] -> [m, i]
    """The gradient of x; ``rounds``: with the gradients' rows rounded, after the weight's scales are folded in."""
    h = rounded_rows(x) @ up.weight.T + up.bias

    def back(grad: Matrix, layer: Layer) -> Matrix:
        result: Matrix = rounded_rows(grad * layer.scale) @ layer.q if rounds else grad @ layer.weight
        return result

    return back(back(grad_y, down) * gelu_slope(h), up)
