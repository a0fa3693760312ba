"""A training step with products in fp16: the loss scale, and the blocks that overflow.

A step whose gradients overflow is undone on the device and halves the scale. A block whose activations overflow
computes in fp32 from the second step after that: the host reads a step's flags after launching the next step, and the
change must not depend on when exactly it reads them, so that a resumed run repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from simpletune.engine.fp16_blocks import Fp16Blocks, flagged_blocks
from simpletune.engine.optim.loss_scale import SMALLEST, LossScale
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.variant import GradientNorms, StepVariant
from simpletune.system.options import Json

LATER = 2
"""Steps from a block's overflow until the block computes in fp32."""


class Fp16(StepVariant):
    """Scales the loss, undoes a step that overflows, and widens blocks.

    Args:
        inner: the step to change.
        scale: the loss scale.
        blocks: the denoiser's blocks, which watch their activations.
        parameters: the trained parameters.
        optimizer: updates them.
    """

    def __init__(
        self,
        inner: StepVariant,
        scale: LossScale,
        blocks: Fp16Blocks,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ):
        super().__init__(inner)
        self.scale, self.blocks, self.parameters, self.optimizer = scale, blocks, parameters, optimizer
        self.wide_from: dict[int, int] = {}
        """The first step (counted from 0) at which a block computes in fp32, by block."""
        self.figures = torch.empty(0)
        """The last step's loss scale and the blocks' flags, fp32 [1 + blocks], on the device."""

    def follow_schedule(self, step: int, steps: int) -> None:
        self.blocks.wide = frozenset(block for block, first in self.wide_from.items() if first <= step)
        super().follow_schedule(step, steps)

    def accumulate(self, batches: Sequence[Batch], compute: Callable[[Batch], Tensor]) -> Tensor:
        self.blocks.clear()
        return super().accumulate(batches, compute)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.scale.scale)

    def norms(self) -> GradientNorms:
        scaled = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if scaled:  # updates in the backward pass have unscaled and freed theirs
            self.scale.unscale(scaled)
        norms = super().norms()
        self.figures = torch.cat([self.scale.scale[None], self.blocks.flags(norms.whole.device).float()])
        self.scale.update(norms.whole)  # the scale of the next step: this one's gradients are unscaled
        return norms

    def update(self) -> None:
        self.scale.step(self.optimizer)

    def widen(self, step: int, flags: Sequence[float]) -> list[int]:
        """Compute flagged blocks in fp32, starting ``LATER`` steps after ``step``; return those that are new."""
        new = [block for block in flagged_blocks(flags) if block not in self.wide_from]
        self.wide_from |= dict.fromkeys(new, step + LATER)
        return new

    def state(self) -> Json:
        """Return what a checkpoint stores; reads from the device."""
        return {**self.scale.state(), "fp32_blocks": {str(block): step for block, step in self.wide_from.items()}}

    def load(self, state: Json) -> None:
        """Restore what ``state`` returned. Raises KeyError, TypeError or ValueError if it is not such a state."""
        self.scale.load(state)
        self.wide_from = {int(block): int(step) for block, step in state["fp32_blocks"].items()}


def is_overflow(loss: float, norm: float, figures: Sequence[float]) -> bool:
    """Return whether a step overflowed only because of fp16, which the next steps correct, from its loss, the norm of
    its unscaled gradients, and ``Fp16.figures``, which are empty if products are not in fp16."""
    if not figures or (math.isfinite(loss) and math.isfinite(norm)):
        return False
    scale, *flags = figures
    return bool(flagged_blocks(flags)) or (math.isfinite(loss) and scale > SMALLEST)
