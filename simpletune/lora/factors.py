"""Arithmetic on low-rank updates: singular values through the factors, truncation, and rank for a share of the energy.

Shapes: o outputs, i inputs, r rank, k kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simpletune.lora.updates import Update


def svd_of_product(update: Update) -> tuple[Tensor, Tensor, Tensor]:  # fp64 [o, m], [m], [m, i]; m <= r
    """U, S, V^T of scale * up @ down, through QR of both factors: [o, i] is never formed.

    up = Q1 R1, down^T = Q2 R2, so up @ down = Q1 (R1 R2^T) Q2^T, and the middle is r x r at most.
    """
    left, small_left = torch.linalg.qr(update.up.double() * update.scale)
    right, small_right = torch.linalg.qr(update.down.double().T)
    u, s, vt = torch.linalg.svd(small_left @ small_right.T, full_matrices=False)
    return left @ u, s, vt @ right.T


def truncated(
    u: Tensor,  # [o, m]
    s: Tensor,  # [m]
    vt: Tensor,  # [m, i]
    rank: int,
) -> Update:
    """The best update of a rank (Eckart and Young 1936), sqrt(S) to either side, in fp32."""
    root = s[:rank].sqrt()
    return Update((root[:, None] * vt[:rank]).float().contiguous(), (u[:, :rank] * root).float().contiguous())


def rank_for(s: Tensor, rank: int | None, energy: float | None) -> int:
    """How many singular values to keep.

    Args:
        s: in descending order.
        rank: at most so many; None: all.
        energy: the fewest whose squares sum to this share of all squares; None: all.

    Returns:
        At least 1.
    """
    kept = int((s > s[0] * torch.finfo(s.dtype).eps * len(s)).sum()) if len(s) else 1
    if energy is not None:
        share = s.double().square().cumsum(0) / s.double().square().sum().clamp_min(1e-300)
        kept = min(kept, int((share < energy).sum()) + 1)
    return max(1, min(kept, rank or len(s)))


def resized(update: Update, rank: int | None, energy: float | None) -> tuple[Update, float]:
    """An update of another rank.

    Args:
        rank: the new rank; above the old one, columns of zeros are added to ``up`` and nothing changes.
        energy: or: the least rank that keeps this share of the squared singular values.

    Returns:
        The update, in fp32, and its squared error (Frobenius).
    """
    u, s, vt = svd_of_product(update)
    kept = rank_for(s, rank, energy)
    smaller = truncated(u, s, vt, kept)
    if rank is not None and energy is None:
        smaller = _widened(smaller, rank)
    return smaller, float(s[kept:].square().sum())


def _widened(update: Update, rank: int) -> Update:
    """Rows drawn from a seeded normal distribution for ``down``, zeros for ``up``: the same product, room to train."""
    missing = rank - update.rank
    if missing <= 0:
        return update
    generator = torch.Generator().manual_seed(missing)
    rows = torch.randn(missing, update.down.shape[1], generator=generator) / update.down.shape[1] ** 0.5
    return Update(torch.cat([update.down, rows]), torch.cat([update.up, torch.zeros(len(update.up), missing)], dim=1))
