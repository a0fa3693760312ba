"""Training methods that update chosen layers of a frozen model, and how these layers are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import OUTPUT, Shapes, TrainingMethod
from simpletune.models.lora_names import TARGETS, is_target, result_layout
from simpletune.models.shared.lora_names import ALPHA
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from simpletune.adapters.methods.layers import FactorLayer

Targets = (
    Literal["attention", "attention_qv", "attention_image", "attention_mlp", "all_linear"]
    | Annotated[list[str], Field(min_length=1)]
)
"""A named choice of layers, or a list of name endings."""
StartName = Annotated[str, Field(min_length=1)] | None
"""A LoRA that the first step begins with."""


class TargetedMethod(TrainingMethod):
    """Update linear layers and 1x1 convolutions of a frozen model. Members declare the fields ``targets: Targets``
    and ``start: StartName``."""

    if TYPE_CHECKING:  # every member declares them, so that its tag and rank come first in JSON
        targets: Targets
        start: StartName

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


class LayerMethod(TargetedMethod):
    """Wrap each chosen layer in one of this package's own, with trained factors. Members also declare ``dtype``, and
    ``rank`` unless they export in their own way."""

    if TYPE_CHECKING:
        dtype: Literal["fp32", "bf16"]
        rank: int | None

    output_name: ClassVar[str] = OUTPUT

    def before_diffusers(self, denoiser: str) -> str | None:
        return (
            f"diffusers does not load {self.title}: convert it to a LoRA first with `simpletune export {OUTPUT} "
            "--format diffusers --rank 32`, which prints what is left out."
        )

    def factor_shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, int]]:
        """The shapes of the factors of one layer's update, by their names in files."""
        raise NotImplementedError

    def layer_class(self) -> type[FactorLayer]:
        """The class of layers that wrap a frozen one, whose ``initial_factors`` draws the first values of factors of
        given shapes. Imports torch."""
        raise NotImplementedError

    def trainable(self, shapes: Shapes) -> int:
        sides = (shapes[f"{name}.weight"][:2] for name in self.modules(shapes))
        return sum(math.prod(shape) for o, i in sides for shape in self.factor_shapes(o, i).values())

    def attach(self, model: nn.Module, seed: int) -> None:
        """Freeze the model and wrap its layers, with factors in ``dtype`` and products in the activations' type."""
        from simpletune.adapters.methods.formulas import FLOATS
        from simpletune.adapters.methods.layers import freeze_for_updates, wrap

        shapes, layer_class = freeze_for_updates(model, seed), self.layer_class()
        for name in self.modules(shapes):
            factors = layer_class.initial_factors(self.factor_shapes(*shapes[f"{name}.weight"][:2]))
            cast = {factor: tensor.to(FLOATS[self.dtype]) for factor, tensor in factors.items()}
            wrap(model, name, layer_class(model.get_submodule(name), cast))

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors with the factors as trained, under the keys that ComfyUI reads."""
        import torch

        from simpletune.adapters.methods.layers import FactorLayer, outer_layers
        from simpletune.system.safetensors_file import write_safetensors

        layers = {name: layer for name, layer in outer_layers(model) if isinstance(layer, FactorLayer)}
        layout = result_layout(layers, "lycoris")
        state: dict[str, Tensor] = {}
        for name, layer in layers.items():
            state |= {layout.key(name, factor): tensor for factor, tensor in layer.factors.items()}
            # readers divide it by the rank, so the scale is 1; they ignore it where all of LoKr's matrices are whole
            state[layout.key(name, ALPHA)] = torch.tensor(float(self.rank or 1))
        return write_safetensors(state, folder / OUTPUT, metadata)
