"""Partial fine-tuning: train only the parameters that match a pattern, and freeze the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import Shapes, TrainingMethod
from simpletune.adapters.methods.full import Full
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from torch import nn


class Partial(TrainingMethod):
    """Train the parameters whose names match a pattern."""

    method: Literal["partial"] = "partial"
    """Partial fine-tuning: train the parameters that match a pattern, and freeze the others."""
    layers: Annotated[list[str], Field(min_length=1)] = ["*.attn*"]
    """Glob patterns of parameter names, such as *.attn* (every attention) or transformer_blocks.1?.ff.*."""

    trains_base: ClassVar[bool] = True

    def names(self, shapes: Shapes) -> list[str]:
        """List the trained parameters."""
        return [name for name in shapes if any(fnmatchcase(name, pattern) for pattern in self.layers)]

    def describe(self, shapes: Shapes) -> str:
        """Describe what is trained."""
        return f"{len(self.names(shapes))} of the model's {len(shapes)} tensors ({', '.join(self.layers)})"

    def trainable(self, shapes: Shapes) -> int:
        """Count the matching parameters."""
        return sum(math.prod(shapes[name]) for name in self.names(shapes))

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        """Report patterns that match nothing."""
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                remedy = "Use a pattern such as *.attn*"
                yield Problem("adapter.layers", f"{pattern!r} matches no parameter. {remedy}")

    def attach(self, model: nn.Module, seed: int) -> None:
        """Unfreeze the matching parameters and freeze the others."""
        parameters = dict(model.named_parameters())
        trained = set(self.names({name: tuple(parameter.shape) for name, parameter in parameters.items()}))
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)

    def disabled(self, model: nn.Module) -> AbstractContextManager[None]:
        """Refuse: the base weights are gone.

        Raises:
            TypeError: always.
        """
        raise TypeError("partial fine-tuning changes the base weights: load the base again instead")

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write the whole transformer as a diffusers folder."""
        return Full().export(model, folder, metadata)
