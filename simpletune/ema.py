"""Exponential moving average of the trained weights: what is drawn, evaluated and exported, where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from simpletune.options import Option

if TYPE_CHECKING:
    from torch import Tensor, nn


class Ema(Option):
    """The average that stands for the trained weights in pictures, loss at fixed noise and result."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the old average that a step keeps; early steps keep (1 + step) / (10 + step), so that the first weights
    are forgotten. About 1 / (1 - decay) steps count. Costs 4 bytes of memory per trained parameter."""

    def build(self, parameters: Mapping[str, nn.Parameter]) -> Average:
        """Start an average at the parameters' present values."""
        return Average(parameters, self.decay)


def averaged(average: Average | None) -> AbstractContextManager[None]:
    """Within this context the parameters hold the average, if one is kept."""
    return nullcontext() if average is None else average.in_place()


class Average:
    """fp32 averages of parameters, by diffusers' ``EMAModel``.

    Args:
        parameters: what trains, by name.
        decay: share of the old average that a step keeps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        import torch
        from diffusers.training_utils import EMAModel

        self.names, self.parameters = list(parameters), list(parameters.values())
        self._ema = EMAModel(self.parameters, decay=decay)
        self._ema.to(dtype=torch.float32)

    def update(self) -> None:
        """Take one step's new values in."""
        self._ema.step(self.parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context the parameters hold the average."""
        self._ema.store(self.parameters)
        try:
            self._ema.copy_to(self.parameters)
            yield
        finally:
            self._ema.restore(self.parameters)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by name, fp32."""
        return dict(zip(self.names, self._ema.shadow_params, strict=True))

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Put back what ``tensors`` gave after ``step`` steps, bit for bit.

        Raises:
            KeyError: a parameter has no average.
        """
        for name, average in zip(self.names, self._ema.shadow_params, strict=True):
            average.copy_(tensors[name])
        self._ema.optimization_step = step
