"""Norms of updates and of updated weights in closed form: neither B A nor W + s B A is built.

Shapes: o outputs, i inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TINY = 1e-30


def product_norm(
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
) -> Tensor:  # fp32 []
    """||B A|| (Frobenius) = sqrt(trace((A A^T) (B^T B)))."""
    a, b = a.float(), b.float()
    return ((a @ a.T) * (b.T @ b)).sum().clamp_min(0).sqrt()


@torch.no_grad()
def limit_norms(factors: Iterable[tuple[Tensor, Tensor]], scale: float, limit: float) -> None:
    """Scale the factors of every update with ||s B A|| > limit in place, both by the same factor, so that it is limit.

    Like kohya's ``scale_weight_norms``. Reads nothing from the device.

    Args:
        factors: A [r, i] and B [o, r] of each update; those of convolutions may have sides of 1.
        scale: s.
        limit: the largest norm.
    """
    for a, b in factors:
        norm = scale * product_norm(a.flatten(1), b.flatten(1))
        root = (limit / norm.clamp_min(TINY)).clamp_max(1).sqrt()
        a.mul_(root)
        b.mul_(root)


def row_norms(
    squares: Tensor,  # fp32 [o]
    projected: Tensor,  # [o, r]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # fp32 [o]
    """||W_j + s B_j A|| of every row j = sqrt(||W_j||^2 + 2 s B_j (W A^T)_j + s^2 B_j (A A^T) B_j^T).

    Args:
        squares: ||W_j||^2.
        projected: W A^T.
        a: first factor.
        b: second factor.
        scale: s.
    """
    a, b = a.float(), b.float()
    crossed = (b * projected.float()).sum(1)
    own = ((b @ (a @ a.T)) * b).sum(1)
    return (squares + 2 * scale * crossed + scale**2 * own).clamp_min(0).sqrt()
