"""Dropout on the ranks of an update and on whole updates; dropout on an update's input is PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UpdateDropout(nn.Dropout):
    """Drop columns of an update's second factor, and whole updates, in training mode; drawn anew in every pass.

    A kept rank is multiplied by 1 / (1 - rank), so that the expected update stays the same; a kept module is not scaled
    (stochastic depth, arXiv:1603.09382, as kohya's scripts apply it to LoRA). Draws from the device's global generator,
    which the loop seeds for every step, and which checkpointing restores for the recomputation because this is a
    ``Dropout`` with ``p`` > 0.

    Args:
        rank: probability of dropping each rank.
        module: probability of dropping the whole update.
    """

    def __init__(self, rank: float, module: float):
        super().__init__(max(rank, module))
        self.rank, self.module = rank, module

    def forward(self, b: Tensor) -> Tensor:  # [o, r] -> [o, r]
        """Return the factor with zeros in the dropped columns; unchanged in evaluation mode."""
        if not self.training:
            return b
        draws = torch.rand(b.shape[1] + 1, device=b.device)
        kept = (draws[1:] >= self.rank) & (draws[0] >= self.module)
        return b * (kept.to(b.dtype) / (1 - self.rank))
