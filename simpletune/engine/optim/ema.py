"""Exponential moving average (EMA) of the trained weights; when enabled, it is sampled, evaluated and exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import Field

from simpletune.system.options import Option

if TYPE_CHECKING:
    from torch import Tensor, nn


class Ema(Option):
    """Exponential moving average used in place of the trained weights for images, evaluation and the result."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Decay per step; early steps use (1 + step) / (10 + step) to forget the initial weights. Averages over about
    1 / (1 - decay) steps. Costs 4 bytes of memory per trained parameter."""

    def build(self, parameters: Mapping[str, nn.Parameter]) -> MovingAverage:
        """Start an average from the parameters' current values."""
        return MovingAverage(parameters, self.decay)


class Average(Protocol):
    """Average of the trained weights, kept by this module or by an optimizer."""

    def update(self, undone: Tensor | None = None) -> None:
        """Update the averages with the parameters' values after a step.

        Args:
            undone: bool [] on the device: whether the step was undone, which leaves the averages unchanged; None: it
                was not.
        """

    def swap_in(self) -> AbstractContextManager[None]:
        """Swap the average into the parameters within this context."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the fp32 averages by name."""

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Restore what ``tensors`` returned after ``step`` steps, bit for bit. Raises KeyError if a parameter has no
        average."""


def use_average(average: Average | None) -> AbstractContextManager[None]:
    """Swap the average into the parameters within this context; without an average, do nothing."""
    return nullcontext() if average is None else average.swap_in()


class MovingAverage:
    """An ``Average`` that decays, in fp32, with diffusers' ``EMAModel``."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        import torch
        from diffusers.training_utils import EMAModel

        self.names, self.parameters = list(parameters), list(parameters.values())
        self._ema = EMAModel(self.parameters, decay=decay)
        self._ema.to(dtype=torch.float32)

    def update(self, undone: Tensor | None = None) -> None:
        if undone is None:
            self._ema.step(self.parameters)
            return
        import torch

        self._ema.optimization_step += 1
        share = (1 - self._ema.get_decay(self._ema.optimization_step)) * (~undone).float()  # fp32 []
        with torch.no_grad():
            for average, parameter in zip(self._ema.shadow_params, self.parameters, strict=True):
                average.sub_(share * (average - parameter))

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        self._ema.store(self.parameters)
        try:
            self._ema.copy_to(self.parameters)
            yield
        finally:
            self._ema.restore(self.parameters)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self._ema.shadow_params, strict=True))

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        for name, average in zip(self.names, self._ema.shadow_params, strict=True):
            average.copy_(tensors[name])
        self._ema.optimization_step = step
