"""transformers' Adafactor (arXiv:1804.04235); torch's own reads from the device in every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.optimizer import OptimizerOption

if TYPE_CHECKING:
    import torch
    from torch import nn


class Adafactor(OptimizerOption):
    """Adafactor with the configured learning rate: factored second moments, no momentum."""

    name: Literal["adafactor"] = "adafactor"
    """Adafactor: almost no state (a row and a column for each matrix), no momentum."""
    clip_threshold: Annotated[float, Field(gt=0)] = 1.0
    """Clip the root mean square of an update to this value."""
    decay_rate: Annotated[float, Field(lt=0)] = -0.8
    """Exponent for the decay rate of the running mean of squares."""

    bytes_per_parameter: ClassVar[float] = 0.01
    no_fsdp_reason: ClassVar[str | None] = "keeps means over whole rows and columns"

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build transformers' Adafactor without relative steps and parameter scaling, which read from the device."""
        from transformers.optimization import Adafactor

        return Adafactor(
            parameters,
            lr=self.lr,
            clip_threshold=self.clip_threshold,
            decay_rate=self.decay_rate,
            weight_decay=self.weight_decay,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
        )
