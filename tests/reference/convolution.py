"""Convolution and its input gradient by their definition, in NumPy, one kernel offset at a time."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def forward(x: Array, weight: Array, bias: Array, stride: int, padding: int) -> Array:
    """y[b, o, r, c] = bias[o] + sum over i, j, k of weight[o, i, j, k] x[b, i, stride r + j - padding, ...].

    Args:
        x: [b, i, h, w].
        weight: [o, i, kh, kw].
        bias: [o].
        stride: of both dimensions, as ``padding``.

    Returns:
        [b, o, h', w'].
    """
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    kh, kw = weight.shape[2:]
    rows, columns = ((size - k) // stride + 1 for size, k in zip(x.shape[2:], (kh, kw), strict=True))
    y = np.tile(bias[None, :, None, None], (len(x), 1, rows, columns))
    for j in range(kh):
        for k in range(kw):
            seen = x[:, :, j : j + stride * rows : stride, k : k + stride * columns : stride]
            y = y + np.einsum("oi,birc->borc", weight[:, :, j, k], seen)
    return y


def input_gradient(grad_y: Array, weight: Array, size: tuple[int, int], stride: int, padding: int) -> Array:
    """Every output gives each pixel that it saw its gradient times the weight between them.

    Args:
        grad_y: [b, o, h', w'].
        weight: [o, i, kh, kw].
        size: (h, w) of the input.
        stride: of both dimensions, as ``padding``.

    Returns:
        [b, i, h, w].
    """
    h, w = size
    rows, columns = grad_y.shape[2:]
    padded = np.zeros((len(grad_y), weight.shape[1], h + 2 * padding, w + 2 * padding))
    for j in range(weight.shape[2]):
        for k in range(weight.shape[3]):
            given = np.einsum("oi,borc->birc", weight[:, :, j, k], grad_y)
            padded[:, :, j : j + stride * rows : stride, k : k + stride * columns : stride] += given
    return padded[:, :, padding : padding + h, padding : padding + w]
