"""Arithmetic on low-rank updates: singular values, truncation, and the rank that keeps a fraction of the energy.

Shapes: o outputs, i inputs, r rank, m number of singular values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from simpletune.adapters.files.lokr_loha import LokrUpdate
from simpletune.adapters.files.updates import LoraUpdate, Update
from simpletune.adapters.methods.lokr_layer import full_factor


def svd_of_product(update: LoraUpdate) -> tuple[Tensor, Tensor, Tensor]:  # fp64 [o, m], [m], [m, i]; m <= r
    """Compute U, S, V^T of scale * up @ down by QR of both factors, without forming [o, i].

    up = Q1 R1, down^T = Q2 R2, so up @ down = Q1 (R1 R2^T) Q2^T, and the middle factor is at most r x r.
    """
    left, small_left = torch.linalg.qr(update.up.double() * update.scale)
    right, small_right = torch.linalg.qr(update.down.double().T)
    u, s, vt = torch.linalg.svd(small_left @ small_right.T, full_matrices=False)
    return left @ u, s, vt @ right.T


def svd_of(update: Update) -> tuple[Tensor, Tensor, Tensor]:  # fp64 [o, m], [m], [m, i]
    """Compute U, S, V^T of an update; for LoKr, as Kronecker products of its factors' in descending order."""
    if not isinstance(update, LokrUpdate) or not update.is_own:
        return svd_of_product(update.plain())
    parts = [
        torch.linalg.svd(full_factor(update.factors, name).double(), full_matrices=False)
        for name in ("lokr_w1", "lokr_w2")
    ]
    (u1, s1, v1), (u2, s2, v2) = parts
    s, order = torch.kron(s1, s2).sort(descending=True)
    signed = torch.kron(u1, u2)[:, order] * (-1 if update.scale < 0 else 1)
    return signed, s * abs(update.scale), torch.kron(v1, v2)[order]


def truncate(
    u: Tensor,  # [o, m]
    s: Tensor,  # [m]
    vt: Tensor,  # [m, i]
    rank: int,
) -> LoraUpdate:
    """Return the best fp32 update of a given rank (Eckart and Young 1936), with sqrt(S) in each factor."""
    root = s[:rank].sqrt()
    return LoraUpdate((root[:, None] * vt[:rank]).float().contiguous(), (u[:, :rank] * root).float().contiguous())


def rank_for(s: Tensor, rank: int | None, energy: float | None) -> int:
    """Return how many singular values to keep.

    Args:
        s: the singular values, in descending order.
        rank: the largest number to keep; None does not limit it.
        energy: keep the fewest whose squares sum to this fraction of all squares; None keeps all.

    Returns:
        At least 1.
    """
    kept = int((s > s[0] * torch.finfo(s.dtype).eps * len(s)).sum()) if len(s) else 1
    if energy is not None:
        share = s.double().square().cumsum(0) / s.double().square().sum().clamp_min(1e-300)
        kept = min(kept, int((share < energy).sum()) + 1)
    return max(1, min(kept, rank or len(s)))


def resize_update(update: Update, rank: int | None, energy: float | None) -> tuple[LoraUpdate, float]:
    """Change the rank of an update; approximate LoKr or LoHa by a LoRA.

    Args:
        update: the update.
        rank: the new rank. A larger rank adds columns of zeros to ``up``, which does not change the product.
        energy: alternatively, use the smallest rank that keeps this fraction of the squared singular values.

    Returns:
        The fp32 update, and its squared error (Frobenius).
    """
    u, s, vt = svd_of(update)
    kept = rank_for(s, rank, energy)
    smaller = replace(truncate(u, s, vt, kept), pointwise=update.pointwise)
    if rank is not None and energy is None:
        smaller = _widened(smaller, rank)
    return smaller, float(s[kept:].square().sum())


def _widened(update: LoraUpdate, rank: int) -> LoraUpdate:
    """Add seeded normal rows to ``down`` and zeros to ``up``, which leaves the product unchanged but trainable."""
    missing = rank - update.rank
    if missing <= 0:
        return update
    generator = torch.Generator().manual_seed(missing)
    rows = torch.randn(missing, update.down.shape[1], generator=generator) / update.down.shape[1] ** 0.5
    up = torch.cat([update.up, torch.zeros(len(update.up), missing)], dim=1)
    return replace(update, down=torch.cat([update.down, rows]), up=up)
