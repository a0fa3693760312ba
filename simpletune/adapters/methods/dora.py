"""DoRA: LoRA whose updated weight is normalised, with a trained magnitude for each output (arXiv:2402.09353)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.adapters.methods.adapter import OUTPUT, Shapes
from simpletune.adapters.methods.lora import Lora
from simpletune.models.lora_registry import result_layout
from simpletune.models.shared.lora_layout import DORA_MARK

if TYPE_CHECKING:
    from torch import Tensor, nn

    from simpletune.adapters.methods.dora_layers import DoraLayer


class Dora(Lora):
    """Train directions by low-rank updates, and one magnitude for each output."""

    title: ClassVar[str] = "DoRA"
    method: Literal["dora"] = "dora"  # type: ignore[assignment]  # the tag of this member
    """DoRA: weight-decomposed LoRA, m (W + s B A) / ||W + s B A|| with a trained magnitude m for each output. The
    result is a LoRA file with magnitudes; docs/how-to/choose-a-method.md says which tools apply it exactly."""

    def trainable(self, shapes: Shapes) -> int:
        return super().trainable(shapes) + sum(shapes[f"{name}.weight"][0] for name in self.modules(shapes))

    def exported(self, shapes: Shapes) -> int:
        # the trained parameters, and the scale of each output that ComfyUI reads
        return self.trainable(shapes) + sum(shapes[f"{name}.weight"][0] for name in self.modules(shapes))

    def before_diffusers(self, layout: str) -> str | None:
        if layout == "diffusers":
            return None
        convert = f"simpletune lora export {OUTPUT} --format diffusers"
        return f"diffusers needs its own names: convert it first with `{convert}`."

    def attach(self, model: nn.Module, seed: int) -> None:
        """Freeze the model and wrap the targets. Reads each frozen weight once for the norms of its rows."""
        from simpletune.adapters.methods.dora_layers import DoraLayer
        from simpletune.adapters.methods.formulas import FLOATS
        from simpletune.adapters.methods.layers import freeze_for_updates, wrap

        dropouts = self.dropout, self.rank_dropout, self.module_dropout
        for name in self.modules(freeze_for_updates(model, seed)):
            rank, scale = self.rank_of(name), self.scale_of(name)
            layer = DoraLayer(model.get_submodule(name), rank, scale, FLOATS[self.dtype], dropouts=dropouts)
            wrap(model, name, layer)

    def factors(self, model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
        return ((name, layer.lora_A.weight, layer.lora_B.weight) for name, layer in dora_layers(model))

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors, which ComfyUI applies exactly; so does diffusers for SD3."""
        from simpletune.system.safetensors_file import write_safetensors

        layers = list(dora_layers(model))
        layout = result_layout(model)
        state = {
            layout.key(layout.module(name), role): tensor
            for name, layer in layers
            for role, tensor in layer.saved(name, layout).items()
        }
        return write_safetensors(state, folder / OUTPUT, {**metadata, **DORA_MARK})


def dora_layers(model: nn.Module) -> Iterator[tuple[str, DoraLayer]]:
    """Yield the layers with a DoRA update, with their names."""
    from simpletune.adapters.methods.dora_layers import DoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, DoraLayer))
