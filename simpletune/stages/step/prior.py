"""A step whose loss also compares with the base's predictions (``prior``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.variant import PlainStep, StepVariant, untrained
from simpletune.system.phases import phase


class Prior(StepVariant):
    """Adds the loss against what the base predicts for the same micro-batch, weighted by ``Batch.prior``.

    Args:
        inner: the step to change.
        plain: the innermost step.
    """

    def __init__(self, inner: StepVariant, plain: PlainStep):
        super().__init__(inner)
        self.plain = plain
        self._of_base: Tensor | None = None

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        # The base first: nothing of the training pass is in memory yet.
        self._of_base = None if batch.prior is None else self._predicted_by_base(batch)
        return super().predict(model, batch)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        loss = super().loss(prediction, batch)
        target, self._of_base = self._of_base, None
        return loss if target is None else loss + self.plain.compared(prediction, target, batch, batch.prior)

    @torch.no_grad()
    def _predicted_by_base(self, batch: Batch) -> Tensor:  # [b, c, h, w]
        base = self.plain.denoiser  # without DDP's bookkeeping
        with phase("prior"), untrained(self.plain.config.adapter, base):
            return super().predict(base, batch)
