"""Hypernetworks: networks before the keys and values of a U-Net's attention, as AUTOMATIC1111's web UI trains them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from simpletune.adapters.methods.adapter import OUTPUT, Shapes, TrainingMethod
from simpletune.adapters.methods.hypernetwork_structure import (
    LARGEST_MULTIPLE,
    LONGEST,
    Activation,
    Structure,
    is_layer_structure,
)
from simpletune.models.lora_registry import context_widths
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from torch import nn


def _structure(multiples: list[float]) -> list[float]:
    if not is_layer_structure(multiples):
        raise ValueError(
            f"{multiples} must begin and end with 1, have 2 to {LONGEST} entries and none over {LARGEST_MULTIPLE}. "
            "Use a list such as [1, 2, 1]"
        )
    return multiples


class Hypernetwork(TrainingMethod):
    """Train networks that transform the inputs from which a U-Net's attention computes its keys and values."""

    title: ClassVar[str] = "hypernetwork"
    method: Literal["hypernetwork"] = "hypernetwork"
    """Hypernetwork, for Stable Diffusion 1.5 and 2: train small networks before the keys and values of the attention,
    in the form of AUTOMATIC1111's web UI, which few other tools read. An older method: prefer lora, whose smaller files
    every tool reads."""
    widths: Literal["text", "all"] | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = "text"
    """Widths of attention inputs that get a pair of networks, which all attentions of that width share. text: the
    prompt's (768 in Stable Diffusion 1.5, 1024 in 2), so only the attention to the prompt changes; all: also those of
    the picture (320, 640, 1280); or a list of widths."""
    layer_structure: Annotated[list[float], AfterValidator(_structure)] = [1.0, 2.0, 1.0]
    """Width of each network before and after each of its linear layers, as multiples of its input's width."""
    activation: Activation = "relu"
    """Activation after every linear layer but the last. linear means none, so that a network is only a linear map of
    its input; swish is the hard form, as in the web UI."""
    layer_norm: bool = False
    """Put a layer norm after every linear layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout after every linear layer but the last; the web UI's is 0.3. Draws follow from seed and step."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the networks, their gradients and the file. With bf16 keep optimizer.rounding stochastic, or small
    changes are lost."""

    output_name: ClassVar[str] = OUTPUT
    in_comfyui: ClassVar[bool] = False
    needs_contexts: ClassVar[bool] = True

    @property
    def structure(self) -> Structure:
        return Structure(tuple(self.layer_structure), self.activation, self.layer_norm, self.dropout)

    def before_diffusers(self, layout: str) -> str | None:
        return (
            "diffusers has no hypernetworks. AUTOMATIC1111's web UI and ComfyUI's node HypernetworkLoader read the "
            f"file that `simpletune lora export {OUTPUT} --format a1111` writes, from `models/hypernetworks`."
        )

    def chosen(self, shapes: Shapes) -> list[int]:
        """Return the widths that get networks, from the base model's shapes."""
        text, image = context_widths(shapes)
        known = {"text": text, "all": text | image}
        return sorted(known[self.widths] if isinstance(self.widths, str) else set(self.widths))

    def describe(self, shapes: Shapes) -> str:
        widths = ", ".join(map(str, self.chosen(shapes)))
        multiples = ", ".join(f"{multiple:g}" for multiple in self.layer_structure)
        return f"hypernetwork of structure {multiples}, {self.activation}, for attention inputs of width {widths}"

    def trainable(self, shapes: Shapes) -> int:
        return sum(self.structure.parameters(width) for width in self.chosen(shapes))

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        text, image = context_widths(shapes)
        for width in self.chosen(shapes):
            if text and width not in text | image:
                known = ", ".join(map(str, sorted(text | image)))
                yield Problem(
                    "adapter.widths", f"{width}: no attention of this model has an input of this width. Use {known}"
                )

    def is_untouched(self, module: str) -> bool:
        return not module.endswith((".to_k", ".to_v"))

    def attach(self, model: nn.Module, seed: int) -> None:
        from simpletune.adapters.methods.formulas import FLOATS
        from simpletune.adapters.methods.hypernetwork_layer import put_before, random_networks
        from simpletune.adapters.methods.layers import freeze_for_updates

        widths, dtype = self.chosen(freeze_for_updates(model, seed)), FLOATS[self.dtype]
        put_before(model, {width: random_networks(width, self.structure, dtype) for width in widths})

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors with names such as ``768.k.linear.0.weight``, which only simpletune
        reads."""
        from simpletune.adapters.methods.hypernetwork_files import write_hypernetwork
        from simpletune.adapters.methods.hypernetwork_layer import networks_of

        return write_hypernetwork(networks_of(model), self.structure, folder / OUTPUT, metadata)
