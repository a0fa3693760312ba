"""Layers that wrap and update a frozen layer: PEFT's LoRA layers and those of this package.

Several can wrap the same layer: each is then the ``base_layer`` of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from simpletune.engine.quant.int8_conv import Geometry
from simpletune.engine.tensors import all_tensors
from simpletune.system.rng import reseed_global

ADAPTER = "default"  # PEFT's name for the first adapter, the only one in training


class UpdateLayer(nn.Module):
    """A frozen layer with an update that is not PEFT's. Subclasses register only ``base_layer`` and the update's
    parameters.

    Args:
        base_layer: the frozen linear layer or convolution, quantised or not, or another wrapping layer.
        adapter: name by which ``scaling`` holds the strength.
    """

    own_layers: ClassVar[tuple[str, ...]] = ()
    """The names of its submodules that wrap a layer, too, as parts of this update."""

    def __init__(self, base_layer: nn.Module, adapter: str = ADAPTER):
        super().__init__()
        self.base_layer = base_layer
        self.shape = shape_of(innermost_layer(base_layer))
        self.scaling = {adapter: 1.0}
        self.enabled = True

    @property
    def strength(self) -> float:
        """The factor on the update; 1 in training."""
        return next(iter(self.scaling.values()))

    def forward(self, x: Tensor) -> Tensor:  # [..., i] or [b, i, h, w] -> [..., o] or [b, o, h', w']
        """Return the layer's output with the update; exactly that of the base layer if updates are disabled."""
        y: Tensor = self.base_layer(x)
        if not self.enabled:
            return y
        if self.shape is None or len(self.shape) == 2:
            return self.add_linear(y, x)
        if self.shape[2:] != (1, 1):
            return self.add_convolution(y, x)
        return self.add_linear(y.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def add_linear(self, y: Tensor, x: Tensor) -> Tensor:  # [..., o], [..., i] -> [..., o]
        """Add the update to the base layer's output y, which may be overwritten, in the type of y.

        The tensors of a 1x1 convolution have their channels last.
        """
        raise NotImplementedError

    def add_convolution(self, y: Tensor, x: Tensor) -> Tensor:  # [b, o, h', w'], [b, i, h, w] -> [b, o, h', w']
        """Add the update to y as ``add_linear`` does, of a convolution with a larger kernel, channels first."""
        raise NotImplementedError

    def merge(self, weight: Tensor) -> Tensor:
        """Return the fp32 weight, [o, i] or [o, i, kh, kw], with the update at its strength."""
        raise NotImplementedError

    def enable_adapters(self, enabled: bool) -> None:
        """Enable or disable the update, by the name that PEFT's layers have for it."""
        self.enabled = enabled


class FactorLayer(UpdateLayer):
    """A layer whose update consists of factors, its parameters by the names that they have in files."""

    cast_first: ClassVar[tuple[str, ...]] = ()
    """The factors that are used in the activations' type and have gradients in it: ``cast_together`` may convert them
    before the layer's pass, without another value."""

    def __init__(self, base_layer: nn.Module, factors: Mapping[str, Tensor], adapter: str = ADAPTER):
        super().__init__(base_layer, adapter)
        device = next(tensor.device for tensor in all_tensors(base_layer))
        for name, factor in factors.items():
            self.register_parameter(name, nn.Parameter(factor.to(device)))

    @staticmethod
    def initial_factors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return the first fp32 factors, which give an update of zero, drawn from the global generator if at all."""
        raise NotImplementedError

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors, within a block's pass those that the block has cast."""
        own = {name: factor for name, factor in self._parameters.items() if factor is not None}
        return own | self.__dict__.get("cast", {})


def innermost_layer(layer: nn.Module) -> nn.Module:
    """Return the frozen layer inside all wrapping layers."""
    while isinstance(layer, UpdateLayer | BaseTunerLayer):
        layer = layer.base_layer
    return layer


def shape_of(module: nn.Module) -> tuple[int, ...] | None:
    """Return the logical shape of the weight of a linear layer, [o, i], or a convolution, [o, i, kh, kw], that can have
    an update; else None. A quantised layer's weight may be stored in another shape."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.padding_mode != "zeros":
        return None
    if isinstance(module.padding, str) or module.kernel_size == (1, 1) != module.stride:
        return None
    return module.out_channels, module.in_channels, *module.kernel_size


def geometry_of(layer: nn.Module) -> Geometry:
    """Return the geometry of the convolution inside all wrapping layers."""
    found = innermost_layer(layer)
    assert isinstance(found, nn.Conv2d)
    return found.stride, found.padding, found.dilation, found.groups  # type: ignore[return-value]  # no string


def layer_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the layers that can have an update, by name."""
    found = {name: shape_of(module) for name, module in model.named_modules()}
    return {name: shape for name, shape in found.items() if shape is not None}


def freeze_for_updates(model: nn.Module, seed: int) -> dict[str, tuple[int, ...]]:
    """Freeze a model, and seed the global generator, from which an adapter draws its first values. Returns the shapes
    of the weights that can have an update, by parameter name."""
    model.requires_grad_(False)
    reseed_global(seed, "adapter")
    return {f"{name}.weight": shape for name, shape in layer_shapes(model).items()}


def all_layers(model: nn.Module) -> Iterator[tuple[str, UpdateLayer | BaseTunerLayer]]:
    """Yield every wrapping layer with its name, outer ones first; not those that are parts of another one's update."""
    parts: set[str] = set()
    for name, module in model.named_modules():  # outer modules come first
        if name in parts:
            continue
        if isinstance(module, UpdateLayer):
            parts.update(f"{name}.{part}" for part in module.own_layers)
        if isinstance(module, UpdateLayer | BaseTunerLayer):
            yield name, module


def outer_layers(model: nn.Module) -> list[tuple[str, UpdateLayer | BaseTunerLayer]]:
    """List the outermost wrapping layer of each updated layer, with the updated layer's name."""
    return [(name, layer) for name, layer in all_layers(model) if not name.endswith(".base_layer")]


def wrap(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace the layer of this name by another."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


@contextmanager
def updates_disabled(model: nn.Module) -> Iterator[None]:
    """Disable all updates within this context; the layers then compute exactly what the frozen ones do."""
    layers = [layer for _, layer in all_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def at_strength(model: nn.Module, strength: float) -> Iterator[None]:
    """Multiply every update by a strength within this context, without changing a tensor."""
    before = [(layer.scaling, dict(layer.scaling)) for _, layer in all_layers(model)]
    for scaling, values in before:
        scaling.update({name: value * strength for name, value in values.items()})
    try:
        yield
    finally:
        for scaling, values in before:
            scaling.update(values)


def detach(model: nn.Module) -> None:
    """Remove every update and put the original layers back."""
    for name, layer in outer_layers(model):
        wrap(model, name, innermost_layer(layer))
    if hasattr(model, "peft_config"):
        del model.peft_config  # otherwise PEFT takes the next update for a second adapter of the same name


def rescale(model: nn.Module, scale: float) -> None:
    """Set the scale of the first adapter's updates."""
    for _, layer in all_layers(model):
        if ADAPTER in layer.scaling:
            layer.scaling[ADAPTER] = scale


def move_updates(model: nn.Module, device: torch.device) -> None:
    """Move only the updates to a device: next to offloaded weights, they are created in host memory."""
    for _, layer in outer_layers(model):
        frozen = {id(tensor) for tensor in all_tensors(innermost_layer(layer))}
        for tensor in all_tensors(layer):
            if id(tensor) not in frozen:
                tensor.data = tensor.data.to(device)
