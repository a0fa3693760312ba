"""OFT: orthogonal fine-tuning, which rotates the outputs of frozen layers (arXiv:2306.07280)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import OUTPUT, Shapes
from simpletune.adapters.methods.targets import LayerMethod, LayerSettings, StartName, Targets
from simpletune.models.lora_registry import result_layout
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from torch import nn

    from simpletune.adapters.methods.layers import FactorLayer


class Oft(LayerMethod):
    """Train rotations of the outputs of frozen layers."""

    title: ClassVar[str] = "OFT"
    method: Literal["oft"] = "oft"
    """OFT: train orthogonal matrices that turn blocks of a layer's outputs, which keeps the norms and angles between
    the weights of a block. ComfyUI loads the result, no other tool does."""
    block_size: Annotated[int, Field(ge=2, le=256)] = 32
    """Largest size of the blocks. Each layer uses the largest divisor of half its number of outputs up to this.
    Parameters grow with it, and so does what an update can express."""
    targets: Targets = "attention"
    """Layers to update, as for LoRA: attention, attention_qv, attention_image, attention_mlp, all_linear, or a list of
    name endings such as ["attn.to_q", "ff.net.2"]."""
    layers: list[LayerSettings] = []
    """Other learning rates for some of these layers, by a pattern of their names, as for LoRA."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the blocks, their gradients and the file. With bf16 keep optimizer.rounding stochastic, or small
    changes are lost."""
    start: StartName = None
    """OFT to start from instead of from zero: a file, a run, RUN@STEP or a hub name, of the same block size. Read once,
    before the first step; takes no memory. null: start from zero."""

    def side(self, outputs: int) -> int:
        """Return the block size of a layer: a divisor of half of its outputs, because some layouts swap the halves."""
        whole = outputs // 2 if outputs % 2 == 0 else outputs
        return next(side for side in range(min(self.block_size, whole), 0, -1) if whole % side == 0)

    def factor_shapes(
        self, outputs: int, inputs: int, layer: str = "", kernel: tuple[int, ...] = ()
    ) -> dict[str, tuple[int, ...]]:
        side = self.side(outputs)
        return {"oft_triangle": (outputs // side, side * (side - 1) // 2)}  # above each block's diagonal

    def layer_class(self) -> type[FactorLayer]:
        from simpletune.adapters.methods.oft_layer import OftLayer

        return OftLayer

    def before_diffusers(self, layout: str) -> str | None:
        merge = f"simpletune lora merge {OUTPUT} --out merged"
        return f"diffusers does not load OFT: merge it into its base first with `{merge}`."

    def exported(self, shapes: Shapes) -> int:
        outputs = (shapes[f"{name}.weight"][0] for name in self.modules(shapes))
        return sum(count * self.side(count) for count in outputs)  # whole blocks, with zeros below the diagonal

    def size_of(self, layers: Sequence[str], shapes: Shapes) -> str:
        sides = sorted({self.side(shapes[f"{name}.weight"][0]) for name in layers})
        return f"in blocks of {', '.join(map(str, sides))}"

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        yield from super().problems(shapes)
        for name in self.modules(shapes):
            if self.side(outputs := shapes[f"{name}.weight"][0]) == 1:
                yield Problem(
                    "adapter.block_size",
                    f"{self.block_size}: no number from 2 to this divides the {outputs} outputs of {name}. Use a "
                    "larger one, or other adapter.targets",
                )
                return

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors in kohya's layout, the only one in which ComfyUI rotates every layer
        of SD3 correctly; without alpha, which it would take for a limit on the rotation."""
        from simpletune.adapters.methods.formulas import named_blocks, upper
        from simpletune.adapters.methods.layers import outer_layers
        from simpletune.adapters.methods.oft_layer import OftLayer
        from simpletune.engine.tensors import swap_halves
        from simpletune.system.safetensors_file import write_safetensors

        layers = {name: layer for name, layer in outer_layers(model) if isinstance(layer, OftLayer)}
        layout, blocks = result_layout(model, "kohya"), {}
        for name, layer in layers.items():
            blocks[name] = upper(layer.oft_triangle.detach(), layer.side)
            if layout.original and layout.names.halves_swapped(name, *(layer.shape or ())[:2]):
                blocks[name] = swap_halves(blocks[name])
        return write_safetensors(named_blocks(blocks, layout), folder / OUTPUT, metadata)
