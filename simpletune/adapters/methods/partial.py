"""Partial fine-tuning: train only the parameters that match a pattern, and freeze the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import Shapes
from simpletune.adapters.methods.full import Full
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from torch import nn


class Partial(Full):
    """Train the parameters whose names match a pattern."""

    method: Literal["partial"] = "partial"  # type: ignore[assignment]  # the tag of this member
    """Partial fine-tuning: train the parameters that match a pattern, and freeze the others."""
    layers: Annotated[list[str], Field(min_length=1)] = ["*.attn*"]
    """Glob patterns of parameter names, such as *.attn* (every attention) or transformer_blocks.1?.ff.*."""

    supports_fsdp: ClassVar[bool] = False

    def names(self, shapes: Shapes) -> list[str]:
        return [name for name in shapes if self.trains_weight(name)]

    def trains_weight(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.layers)

    def describe(self, shapes: Shapes) -> str:
        return f"{len(self.names(shapes))} of the model's {len(shapes)} tensors ({', '.join(self.layers)})"

    def trainable(self, shapes: Shapes) -> int:
        return sum(math.prod(shapes[name]) for name in self.names(shapes))

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                remedy = "Use a pattern such as *.attn*"
                yield Problem("adapter.layers", f"{pattern!r} matches no parameter. {remedy}")

    def attach(self, model: nn.Module, seed: int) -> None:
        parameters = dict(model.named_parameters())
        trained = set(self.names({name: tuple(parameter.shape) for name, parameter in parameters.items()}))
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
