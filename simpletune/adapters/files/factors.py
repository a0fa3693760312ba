"""Arithmetic on low-rank updates: singular values, truncation, and the rank that keeps a fraction of the energy.

Shapes: o outputs, i inputs, r rank, m number of singular values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from simpletune.adapters.files.updates import LokrUpdate, LoraUpdate, Update, Updates
from simpletune.adapters.methods.formulas import full_factor


def _svd(update: Update) -> tuple[Tensor, Tensor, Tensor]:  # fp64 [o, m], [m], [m, i]; m <= r
    """Compute U, S, V^T of an update, without forming [o, i].

    up = Q1 R1, down^T = Q2 R2, so up @ down = Q1 (R1 R2^T) Q2^T, and the middle factor is at most r x r. Those of LoKr
    are Kronecker products of its factors' in descending order.
    """
    if isinstance(update, LokrUpdate) and update.is_own:
        (u1, s1, v1), (u2, s2, v2) = (
            torch.linalg.svd(full_factor(update.factors, name).double(), full_matrices=False)
            for name in ("lokr_w1", "lokr_w2")
        )
        s, order = torch.kron(s1, s2).sort(descending=True)
        signed = torch.kron(u1, u2)[:, order] * (-1 if update.scale < 0 else 1)
        return signed, s * abs(update.scale), torch.kron(v1, v2)[order]
    lora = update.as_lora()
    left, small_left = torch.linalg.qr(lora.up.double() * lora.scale)
    right, small_right = torch.linalg.qr(lora.down.double().T)
    u, s, vt = torch.linalg.svd(small_left @ small_right.T, full_matrices=False)
    return left @ u, s, vt @ right.T


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
    """Return how many singular values in descending order to keep, at least 1: at most ``rank``, and the fewest whose
    squares sum to the fraction ``energy`` of all squares."""
    kept = int((s > s[0] * torch.finfo(s.dtype).eps * len(s)).sum()) if len(s) else 1
    if energy is not None:
        share = s.double().square().cumsum(0) / s.double().square().sum().clamp_min(1e-300)
        kept = min(kept, int((share < energy).sum()) + 1)
    return max(1, min(kept, rank or len(s)))


def resize_all(
    updates: Updates, rank: int | None, energy: float | None, conv_rank: int | None = None
) -> tuple[dict[str, LoraUpdate], float]:
    """Resize every layer's update (``resize_update``); also return the residual's Frobenius norm relative to the
    updates. ``conv_rank``: of convolutions larger than 1x1; None: as the others."""
    ranks = {layer: conv_rank if conv_rank and update.is_spatial else rank for layer, update in updates.items()}
    changed = {layer: resize_update(update, ranks[layer], energy) for layer, update in updates.items()}
    whole = sum(float(update.delta().double().square().sum()) for update in updates.values())
    lost = (sum(error for _, error in changed.values()) / whole) ** 0.5 if whole else 0.0
    return {layer: update for layer, (update, _) in changed.items()}, lost


def resize_update(update: Update, rank: int | None, energy: float | None) -> tuple[LoraUpdate, float]:
    """Change the rank of an update; approximate LoKr or LoHa by a LoRA. With ``energy``: the smallest rank that keeps
    this fraction of the squared singular values.

    Returns:
        The fp32 update, and its squared error (Frobenius).
    """
    u, s, vt = _svd(update)
    kept = rank_for(s, rank, energy)
    smaller = replace(truncate(u, s, vt, kept), kernel=update.kernel)
    if rank is not None and energy is None and (missing := rank - smaller.rank) > 0:
        # seeded normal rows in down and zeros in up leave the product unchanged but trainable
        generator = torch.Generator().manual_seed(missing)
        rows = torch.randn(missing, smaller.down.shape[1], generator=generator) / smaller.down.shape[1] ** 0.5
        up = torch.cat([smaller.up, torch.zeros(len(smaller.up), missing)], dim=1)
        smaller = replace(smaller, down=torch.cat([smaller.down, rows]), up=up)
    return smaller, float(s[kept:].square().sum())
