"""A step that trains the text side, too: token embeddings, and LoRAs of the CLIP encoders."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from simpletune.adapters.text.update import TextUpdate
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.variant import StepVariant
from simpletune.system.phases import phase


class TrainedText(StepVariant):
    """Inserts what trains into the cached prompt embeddings of each micro-batch.

    Args:
        inner: the step to change.
        text: what trains on the text side, on the device.
    """

    def __init__(self, inner: StepVariant, text: TextUpdate):
        super().__init__(inner)
        self.text = text

    def at_step(self, step: int, steps: int) -> None:
        self.text.at_step(step, steps)
        super().at_step(step, steps)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        if batch.text is not None:
            with phase("text"):
                prompt_embeds, pooled = self.text(batch.prompt_embeds, batch.pooled, batch.text)
            batch = replace(batch, prompt_embeds=prompt_embeds, pooled=pooled)
        return super().predict(model, batch)

    def constrain(self) -> None:
        super().constrain()
        self.text.constrain()
