"""Training methods that update chosen layers of a frozen model, and how these layers are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import Shapes, TrainingMethod
from simpletune.models.lora_names import TARGETS, is_target
from simpletune.system.options import Problem

Targets = (
    Literal["attention", "attention_qv", "attention_image", "attention_mlp", "all_linear"]
    | Annotated[list[str], Field(min_length=1)]
)
"""A named choice of layers, or a list of name endings."""


class TargetedMethod(TrainingMethod):
    """Update linear layers and 1x1 convolutions of a frozen model. Members declare the field ``targets: Targets``."""

    if TYPE_CHECKING:  # every member declares it, so that its tag and rank come first in JSON
        targets: Targets

    def modules(self, shapes: Shapes) -> list[str]:
        """The layers that get an update, from the base model's shapes."""
        return [name for name in _layers(shapes) if not self.is_untouched(name)]

    def is_untouched(self, module: str) -> bool:
        if isinstance(self.targets, str):
            return not is_target(self.targets, module)
        return not any(_ends(module, ending) for ending in self.targets)

    def counted(self, shapes: Shapes) -> str:
        """Count the layers that get an update, and name the choice, for ``describe``."""
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        modules = self.modules(shapes)
        pointwise = sum(len(shapes[f"{name}.weight"]) == 4 for name in modules)
        convolutions = f" and {pointwise} 1x1 convolutions" if pointwise else ""
        return f"{len(modules) - pointwise} linear layers{convolutions} ({targets})"

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        layers = _layers(shapes)
        if isinstance(self.targets, str):
            if not self.modules(shapes):
                known = [name for name in TARGETS if any(is_target(name, layer) for layer in layers)]
                remedy = f"Use {', '.join(known)}" if known else "Use a list of name endings"
                yield Problem("adapter.targets", f"{self.targets!r} names no layer of this model. {remedy}")
            return
        examples = dict.fromkeys(".".join(la.split(".")[-2:]) for la in layers if is_target("attention", la))
        for ending in self.targets:
            if not any(_ends(layer, ending) for layer in layers):
                remedy = f"Use endings such as {', '.join(list(examples)[:3])}"
                yield Problem("adapter.targets", f"{ending!r} matches no linear layer or 1x1 convolution. {remedy}")


def _layers(shapes: Shapes) -> list[str]:
    """The names of the linear layers and 1x1 convolutions, found by their weights' shapes."""
    weights = (name for name, shape in shapes.items() if len(shape) == 2 or len(shape) == 4 and shape[2:] == (1, 1))
    return [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]


def _ends(layer: str, ending: str) -> bool:
    return layer == ending or layer.endswith("." + ending)
