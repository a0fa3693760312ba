"""Training methods that wrap each chosen layer in one of this package's own layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.adapters.methods.adapter import Shapes
from simpletune.adapters.methods.lora import OUTPUT
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.models.lora_names import result_layout
from simpletune.models.shared.lora_names import ALPHA

if TYPE_CHECKING:
    from torch import Tensor, nn

    from simpletune.adapters.methods.layers import UpdateLayer


class LayerMethod(TargetedMethod):
    """Update chosen layers by trained factors. Members declare ``targets`` and ``dtype``."""

    if TYPE_CHECKING:
        dtype: Literal["fp32", "bf16"]

    output_name: ClassVar[str] = OUTPUT

    def before_diffusers(self, denoiser: str) -> str | None:
        """As for ``TrainingMethod``."""
        return (
            f"diffusers does not load {self.title}: convert it to a LoRA first with `simpletune export {OUTPUT} "
            "--format diffusers --rank 32`, which prints what is left out."
        )

    def factor_shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the factors of one layer's update, by their names in files."""
        raise NotImplementedError

    def initialised(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        """Draw the fp32 factors of one layer's update from the global generator; the update is zero at first."""
        raise NotImplementedError

    def layer(self, base: nn.Module, factors: dict[str, Tensor]) -> UpdateLayer:
        """Wrap a frozen layer."""
        raise NotImplementedError

    @property
    def alpha(self) -> float:
        """Alpha of every module in a file. Equal to the number that readers divide it by, so that the scale is 1."""
        raise NotImplementedError

    def trainable(self, shapes: Shapes) -> int:
        """Sum the sizes of all factors."""
        sides = (shapes[f"{name}.weight"][:2] for name in self.modules(shapes))
        return sum(math.prod(shape) for o, i in sides for shape in self.factor_shapes(o, i).values())

    def attach(self, model: nn.Module, seed: int) -> None:
        """Freeze the model and wrap its layers, with factors in ``dtype`` and products in the activations' type."""
        from simpletune.adapters.methods.layers import FLOATS, freeze_for_updates, wrap

        shapes = freeze_for_updates(model, seed)
        for name in self.modules(shapes):
            factors = self.initialised(*shapes[f"{name}.weight"][:2])
            cast = {factor: tensor.to(FLOATS[self.dtype]) for factor, tensor in factors.items()}
            wrap(model, name, self.layer(model.get_submodule(name), cast))

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors with the factors as trained, under the keys that ComfyUI reads."""
        import torch

        from simpletune.adapters.methods.layers import UpdateLayer, outer_layers
        from simpletune.system.safetensors_file import write_safetensors

        layers = {name: layer for name, layer in outer_layers(model) if isinstance(layer, UpdateLayer)}
        layout = result_layout(layers, "lycoris")
        state: dict[str, Tensor] = {}
        for name, layer in layers.items():
            state |= {layout.key(name, factor): tensor for factor, tensor in layer.state().items()}
            state[layout.key(name, ALPHA)] = torch.tensor(float(self.alpha))
        return write_safetensors(state, folder / OUTPUT, metadata)
