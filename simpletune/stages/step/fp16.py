"""A training step with products in fp16: the loss scale, and the blocks that overflow.

A step whose gradients overflow is undone on the device and halves the scale. A block whose activations overflow
computes in fp32 from the second step after that: the host reads a step's flags after launching the next step, and the
change must not depend on when exactly it reads them, so that a resumed run repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from simpletune.engine.optim.loss_scale import SMALLEST, LossScale
from simpletune.models.shared.fp16_blocks import Fp16Blocks, flagged_blocks
from simpletune.system.options import Json

LATER = 2
"""Steps from a block's overflow until the block computes in fp32."""


@dataclass
class Fp16:
    """State of training steps with products in fp16.

    Args:
        scale: the loss scale.
        blocks: the transformer's blocks, which watch their activations.
        wide_from: the first step (counted from 0) at which a block computes in fp32, by block.
    """

    scale: LossScale
    blocks: Fp16Blocks
    wide_from: dict[int, int] = field(default_factory=dict)
    figures: Tensor = field(default_factory=lambda: torch.empty(0))
    """The last step's loss scale and the blocks' flags, fp32 [1 + blocks], on the device."""

    def at_step(self, step: int) -> None:
        """Choose the blocks that compute in fp32 in a step."""
        self.blocks.wide = frozenset(block for block, first in self.wide_from.items() if first <= step)

    def begin(self) -> None:
        """Clear the last step's flags."""
        self.blocks.clear()

    def note(self, norm: Tensor) -> None:
        """Record, on the device, whether the step overflowed, its scale and its flags.

        Args:
            norm: the norm of all unscaled gradients, fp32 [].
        """
        self.scale.note(norm)
        self.figures = torch.cat([self.scale.scale[None], self.blocks.flags(norm.device).float()])

    def widen(self, step: int, flags: Sequence[float]) -> list[int]:
        """Compute flagged blocks in fp32, starting ``LATER`` steps after ``step``.

        Returns:
            The blocks that were not in fp32 before.
        """
        new = [block for block in flagged_blocks(flags) if block not in self.wide_from]
        self.wide_from |= dict.fromkeys(new, step + LATER)
        return new

    def state(self) -> Json:
        """What a checkpoint stores; reads from the device."""
        return {**self.scale.state(), "fp32_blocks": {str(block): step for block, step in self.wide_from.items()}}

    def load(self, state: Json) -> None:
        """Restore what ``state`` returned.

        Raises:
            KeyError, TypeError, ValueError: it is not such a state.
        """
        self.scale.load(state)
        self.wide_from = {int(block): int(step) for block, step in state["fp32_blocks"].items()}


def is_overflow(loss: float, norm: float, figures: Sequence[float]) -> bool:
    """Return whether a non-finite step overflowed only because of fp16, which the next steps correct.

    Args:
        loss: the step's loss.
        norm: the norm of its unscaled gradients.
        figures: ``Fp16.figures``; empty if products are not in fp16.
    """
    if not figures or (math.isfinite(loss) and math.isfinite(norm)):
        return False
    scale, *flags = figures
    return bool(flagged_blocks(flags)) or (math.isfinite(loss) and scale > SMALLEST)
