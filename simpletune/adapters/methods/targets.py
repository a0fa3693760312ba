"""Training methods that update chosen layers of a frozen model, and how these layers are chosen."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import OUTPUT, Shapes, TrainingMethod
from simpletune.models.lora_registry import (
    SHORT,
    TARGETS,
    factor_layout,
    is_convolution,
    is_residual,
    is_target,
    matches_layer,
    suited_layouts,
)
from simpletune.models.shared.lora_layout import ALPHA
from simpletune.system.options import Option, Problem, join_names, plural

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


class LayerSettings(Option):
    """What differs in some of the layers that an adapter updates."""

    pattern: Annotated[str, Field(min_length=1)]
    """The layers: consecutive words of their names, between dots. A word may contain * and, for the numbers of blocks,
    be 0-11 or 0,2,5-7. The first word may be blocks (SD3's), down, mid or up (a U-Net's): blocks.0-11, mid,
    up.1.attentions.0, attn2, to_v."""
    lr_ratio: Annotated[float, Field(ge=0)] | None = None
    """Learning rate of these layers, as a multiple of optimizer.lr. 0: they get no update. null: as without this
    entry."""


class RankedLayers(LayerSettings):
    """What differs in some of the layers of an adapter with a rank."""

    rank: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Rank in these layers. 0: they get no update. null: as without this entry."""


class TargetedMethod(TrainingMethod):
    """Update linear layers and convolutions of a frozen model. Members declare the fields ``targets: Targets``,
    ``layers: list[LayerSettings]``, or of a class that extends it, and ``start: StartName``; ``conv_rank`` if they
    update convolutions with a kernel larger than 1x1."""

    if TYPE_CHECKING:  # every member declares them, so that its tag and rank come first in JSON
        targets: Targets
        layers: Sequence[LayerSettings]
        start: StartName

    def modules(self, shapes: Shapes) -> list[str]:
        """Return the layers that get an update, from the base model's shapes."""
        return [name for name in _layers(shapes) if not self.is_untouched(name)]

    def is_untouched(self, module: str) -> bool:
        return not self.is_targeted(module) or 0 in (self.setting("rank", module), self.setting("lr_ratio", module))

    def is_targeted(self, layer: str) -> bool:
        """Return whether ``targets`` chooses a layer, which ``layers`` may then leave out."""
        if is_convolution(layer) and not self.updates_convolutions:
            return False
        if isinstance(self.targets, str):
            return is_target(self.targets, layer) or self.updates_convolutions and is_residual(layer)
        return any(_ends(layer, ending) for ending in self.targets)

    @property
    def updates_convolutions(self) -> bool:
        """Whether convolutions with a kernel larger than 1x1 get an update, too."""
        return getattr(self, "conv_rank", None) is not None

    def setting(self, field: str, layer: str) -> Any:
        """Return what ``layers`` sets for a field in a layer: its last matching entry that sets it; None if none
        does."""
        values = (getattr(each, field, None) for each in reversed(self.layers) if matches_layer(each.pattern, layer))
        return next((value for value in values if value is not None), None)

    def rank_of(self, layer: str) -> int | None:
        """Return the rank in a layer that gets an update; None of a method, or of a matrix, without."""
        found = self.setting("rank", layer)
        own = "conv_rank" if is_convolution(layer) else "rank"
        return getattr(self, own, None) if found is None else found

    def lr_ratio(self, name: str) -> float:
        found = self.setting("lr_ratio", _OF_UPDATE.sub("", name))
        return 1.0 if found is None else found

    def size_of(self, layers: Sequence[str], shapes: Shapes) -> str:
        """Format how large the updates of some layers are, for ``describe``: ``of rank 16``."""
        return f"of rank {spread(rank for rank in map(self.rank_of, layers) if rank is not None)}"

    def describe(self, shapes: Shapes) -> str:
        """Describe the updates' size, the counted layers and the choice; convolutions with a larger kernel apart."""
        modules, counts = self.modules(shapes), Counter[str]()
        for name in modules:
            counts["x".join(map(str, shapes[f"{name}.weight"][2:]))] += 1
        kernels = [name for name in modules if is_convolution(name)]
        others = [name for name in modules if not is_convolution(name)]
        groups = []
        if others or not kernels:
            pointwise = f" and {counts['1x1']} 1x1 convolutions" if counts["1x1"] else ""
            groups.append(f"{self.size_of(others, shapes)}, on {counts['']} linear layers{pointwise}")
        if kernels:
            listed = [f"{n} {kernel} convolutions" for kernel, n in counts.items() if kernel not in ("", "1x1")]
            groups.append(f"{self.size_of(kernels, shapes)}, on {' and '.join(listed)}")
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        if isinstance(self.targets, str) and self.updates_convolutions:
            targets += " and resnets"
        left_out = sum(map(self.is_targeted, _layers(shapes))) - len(modules)
        ratios = [ratio for ratio in (self.setting("lr_ratio", name) for name in modules) if ratio not in (None, 1)]
        without = f"; adapter.layers leaves out {left_out}" if left_out else ""
        rates = f", learning rate times {spread(ratios)} in {len(ratios)}" if ratios else ""
        return f"{self.title} {', and '.join(groups)} ({targets}{without}){rates}"

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        layers = _layers(shapes)
        targeted = [layer for layer in layers if self.is_targeted(layer)]
        yield from self._problems_of_layers(layers, targeted)
        yield from self._problems_of_convolutions(layers)
        if isinstance(self.targets, str):
            if not any(is_target(self.targets, layer) for layer in layers):
                known = [name for name in TARGETS if any(is_target(name, layer) for layer in layers)]
                remedy = f"Use {', '.join(known)}" if known else "Use a list of name endings"
                yield Problem("adapter.targets", f"{self.targets!r} names no layer of this model. {remedy}")
            return
        examples = dict.fromkeys(".".join(la.split(".")[-2:]) for la in layers if is_target("attention", la))
        for ending in self.targets:
            found = [layer for layer in layers if _ends(layer, ending)]
            if not found:
                remedy = f"Use endings such as {', '.join(list(examples)[:3])}"
                yield Problem("adapter.targets", f"{ending!r} matches no linear layer or convolution. {remedy}")
            elif not any(map(self.is_targeted, found)):
                said = f"{ending!r} matches only convolutions with a kernel larger than 1x1"
                yield Problem("adapter.targets", f"{said}. {self._remedy_of_convolutions()}")

    def _problems_of_convolutions(self, layers: Sequence[str]) -> Iterator[Problem]:
        rank = getattr(self, "conv_rank", None)
        if rank is None:
            return
        known = [layer for layer in layers if is_convolution(layer)]
        if not known:
            yield Problem(
                "adapter.conv_rank",
                f"{rank} is for a U-Net's convolutions, and this model has none. Leave it out",
            )
        elif not any(map(self.is_targeted, known)):
            yield Problem(
                "adapter.conv_rank",
                f"{rank} is for convolutions with a kernel larger than 1x1, and adapter.targets names none. Add "
                "endings such as conv1 and conv2, or leave it out",
            )

    def _remedy_of_convolutions(self) -> str:
        if hasattr(self, "conv_rank"):
            return "Give them a rank by adapter.conv_rank"
        return f"{self.title} does not update them. Use other adapter.targets, or adapter.method lora"

    def _problems_of_layers(self, layers: Sequence[str], targeted: Sequence[str]) -> Iterator[Problem]:
        for number, each in enumerate(self.layers if targeted else ()):
            if any(matches_layer(each.pattern, layer) for layer in targeted):
                continue
            if any(matches_layer(each.pattern, layer) for layer in layers):
                found = [layer for layer in layers if matches_layer(each.pattern, layer)]
                convolutions = not self.updates_convolutions and all(map(is_convolution, found))
                remedy = self._remedy_of_convolutions() if convolutions else "Choose them by adapter.targets"
                said = f"{each.pattern!r} matches only layers without an update. {remedy}"
            else:
                near = difflib.get_close_matches(each.pattern, _parts_of_names(targeted), n=3, cutoff=0)
                said = f"{each.pattern!r} matches no layer. The nearest names are {join_names(near)}"
            yield Problem(f"adapter.layers.{number}.pattern", said)
        if targeted and all(map(self.is_untouched, targeted)):
            yield Problem(
                "adapter.layers", f"leaves out {plural(len(targeted), 'layer')}, all that adapter.targets chooses"
            )


_OF_UPDATE = re.compile(r"\.(lora_[AB]|magnitude|lokr_\w+|hada_\w+|oft_\w+)(\..*)?$")
"""What the name of a trained parameter adds to that of its layer."""


def spread(numbers: Iterable[float]) -> str:
    """Format the smallest and the largest of some numbers: ``4 to 16``; a single one, or none, as it is."""
    found = sorted(set(numbers))
    return " to ".join(f"{number:g}" for number in dict.fromkeys((found[0], found[-1]))) if found else ""


def _parts_of_names(layers: Sequence[str]) -> list[str]:
    """Return what could stand in a pattern: beginnings, with short names of blocks, and ends of layers' names."""
    short = {whole: each for each, whole in SHORT}
    found: dict[str, None] = {}
    for first, *words in (layer.split(".") for layer in layers):
        whole = [short.get(first, first), *words]
        found |= dict.fromkeys(".".join(whole[:end]) for end in range(1, len(whole) + 1))
        found |= dict.fromkeys(".".join(words[start:]) for start in range(len(words)))
    return list(found)


def _layers(shapes: Shapes) -> list[str]:
    """Return the names of the layers that can have an update: by their weights' shapes, of convolutions with a kernel
    larger than 1x1 by their names."""
    weights = ((name.removesuffix(".weight"), s) for name, s in shapes.items() if name.endswith(".weight"))
    return [name for name, s in weights if len(s) == 2 or len(s) == 4 and (s[2:] == (1, 1) or is_convolution(name))]


def _ends(layer: str, ending: str) -> bool:
    return layer == ending or layer.endswith("." + ending)


class LayerMethod(TargetedMethod):
    """Wrap each chosen layer in one of this package's own, with trained factors. Members also declare ``dtype``, and
    ``rank`` unless they export in their own way."""

    if TYPE_CHECKING:
        dtype: Literal["fp32", "bf16"]
        rank: int | None

    output_name: ClassVar[str] = OUTPUT

    def before_diffusers(self, layout: str) -> str | None:
        return (
            f"diffusers does not load {self.title}: convert it to a LoRA first with `simpletune lora export {OUTPUT} "
            "--format diffusers --rank 32`, which prints what is left out."
        )

    def factor_shapes(
        self, outputs: int, inputs: int, layer: str = "", kernel: tuple[int, ...] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the factors of one layer's update, by their names in files. ``kernel``: of a
        convolution; one of 1x1 counts as a linear layer."""
        raise NotImplementedError

    def layer_class(self) -> type[FactorLayer]:
        """Return the class of layers that wrap a frozen one, whose ``initial_factors`` draws the first values of
        factors of given shapes. Imports torch."""
        raise NotImplementedError

    def trainable(self, shapes: Shapes) -> int:
        found = (self.shapes_of(name, shapes) for name in self.modules(shapes))
        return sum(math.prod(shape) for each in found for shape in each.values())

    def shapes_of(self, layer: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Return ``factor_shapes`` of a layer, from the base model's shapes."""
        outputs, inputs, *kernel = shapes[f"{layer}.weight"]
        return self.factor_shapes(outputs, inputs, layer, tuple(kernel))

    def attach(self, model: nn.Module, seed: int) -> None:
        """Freeze the model and wrap its layers, with factors in ``dtype`` and products in the activations' type."""
        from simpletune.adapters.methods.formulas import FLOATS
        from simpletune.adapters.methods.layers import freeze_for_updates, wrap
        from simpletune.adapters.methods.lora_layers import cast_together

        shapes, layer_class = freeze_for_updates(model, seed), self.layer_class()
        for name in self.modules(shapes):
            factors = layer_class.initial_factors(self.shapes_of(name, shapes))
            cast = {factor: tensor.to(FLOATS[self.dtype]) for factor, tensor in factors.items()}
            wrap(model, name, layer_class(model.get_submodule(name), cast))
        cast_together(model.get_submodule(name) for name in getattr(model, "units", ()))  # of a denoiser

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors with the factors as trained, under the keys that ComfyUI reads."""
        import torch

        from simpletune.adapters.methods.layers import FactorLayer, outer_layers
        from simpletune.system.safetensors_file import write_safetensors

        layers = {name: layer for name, layer in outer_layers(model) if isinstance(layer, FactorLayer)}
        layout = factor_layout(suited_layouts(model))
        state: dict[str, Tensor] = {}
        for name, layer in layers.items():
            module = layout.module(name)
            for factor, tensor in layer.factors.items():
                if factor == "lokr_w2" and tensor.dim() < len(layer.shape or ()):
                    tensor = tensor[:, :, None, None]  # LyCORIS loads no matrix into a convolution of 1x1
                state[layout.key(module, factor)] = tensor
            # readers divide it by the rank, so the scale is 1; they ignore it where all of LoKr's matrices are whole
            state[layout.key(module, ALPHA)] = torch.tensor(float(self.rank_of(name) or 1))
        return write_safetensors(state, folder / OUTPUT, metadata)
