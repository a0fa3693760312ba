"""A step whose trained weights are divided among the processes (``train.fsdp``)."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.fsdp.fsdp_model import FsdpModel
from simpletune.stages.step.variant import GradientNorms, PlainStep


class Sharded(PlainStep):
    """Sums, measures and clips the gradients of this process's parts."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        fsdp: FsdpModel,
    ):
        super().__init__(config, model, optimizer, accelerator)
        self.fsdp = fsdp

    def norms(self) -> GradientNorms:
        whole = self.fsdp.take_gradients()
        return GradientNorms.of(dict(zip(whole, self.fsdp.norms(whole), strict=True)))

    def clip(self, norms: GradientNorms) -> None:
        option = self.config.train
        if option.clip == "per_parameter" and option.clip_norm is not None:
            self.fsdp.clip_each(norms.parameters, list(norms.each), option.clip_norm)
        else:
            super().clip(norms)
