"""Norms, gated sums, activations and rotary positions of a transformer block, written from the papers (adaLN-Zero:
arXiv:2212.09748, section 3.2).

Shapes: b samples, n tokens, d width. All in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:  # [b, n, d], [b, d], [b, d]
    """(x - mean) / sqrt(variance + eps) * (1 + scale) + shift, with the variance over the width."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]
    return centred / (variance + eps) ** 0.5 * (1 + scale[:, None, :]) + shift[:, None, :]


def gated_sum(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:  # [b, n, d], [b, n, d], [b, d]
    """x + gate * y."""
    return x + gate[:, None, :] * y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., d], [d]
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


def swiglu(gate: Tensor, value: Tensor) -> Tensor:  # [..., d] each
    """gate / (1 + exp(-gate)) * value (arXiv:2002.05202, eq. 6)."""
    return gate / (1 + (-gate).exp()) * value


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [b, n, h, d], [1 or b, n, d / 2] each
    """Neighbouring pairs (p, q) of numbers become (p cos - q sin, q cos + p sin) (arXiv:2104.09864, eq. 13)."""
    p, q, cos, sin = x[..., ::2], x[..., 1::2], cos[:, :, None], sin[:, :, None]
    return torch.stack([p * cos - q * sin, q * cos + p * sin], dim=-1).flatten(3)
