"""Partial fine-tuning: only the parameters that patterns name train; the rest of the transformer stays as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.adapter import Shapes, TrainingMethod
from simpletune.adapters.full import Full
from simpletune.options import Problem

if TYPE_CHECKING:
    from torch import nn


class Partial(TrainingMethod):
    """Train the parameters whose names match a pattern."""

    method: Literal["partial"] = "partial"
    """Partial fine-tuning: the parameters that a pattern names train, the others are frozen."""
    layers: Annotated[list[str], Field(min_length=1)] = ["transformer_blocks.*.attn.*"]
    """Patterns of parameter names, with * for anything: transformer_blocks.*.attn.*, transformer_blocks.1?.ff.*."""

    trains_base: ClassVar[bool] = True
    output_name: ClassVar[str] = Full.output_name

    def names(self, shapes: Shapes) -> list[str]:
        """The parameters that train."""
        return [name for name in shapes if any(fnmatchcase(name, pattern) for pattern in self.layers)]

    def describe(self, shapes: Shapes) -> str:
        """What is trained, in words."""
        return f"{len(self.names(shapes))} of the transformer's {len(shapes)} tensors ({', '.join(self.layers)})"

    def trainable(self, shapes: Shapes) -> int:
        """The size of what the patterns name."""
        return sum(math.prod(shapes[name]) for name in self.names(shapes))

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        """Patterns that match nothing."""
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                remedy = "Use patterns such as transformer_blocks.*.attn.*"
                yield Problem("adapter.layers", f"{pattern!r} matches no parameter. {remedy}")

    def attach(self, model: nn.Module, seed: int) -> None:
        """Unfreeze what the patterns name."""
        parameters = dict(model.named_parameters())
        trained = set(self.names({name: tuple(parameter.shape) for name, parameter in parameters.items()}))
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)

    def disabled(self, model: nn.Module) -> AbstractContextManager[None]:
        """There is no way back to the base weights.

        Raises:
            TypeError: always.
        """
        raise TypeError("partial fine-tuning changes the base weights: load the base again instead")

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write the whole transformer as a diffusers folder."""
        return Full().export(model, folder, metadata)
