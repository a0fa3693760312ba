"""A family's trained model as the levers see it: its units, and the device that it computes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from simpletune.engine.quant.precision import WeightPrecision


class Denoiser(nn.Module):
    """The protocol of a family's trained model (SD3's transformer, SD 1.5's UNet).

    A class rather than a ``Protocol``, because it must also be an ``nn.Module``. Never instantiated: families load
    diffusers' classes, and set what follows.
    """

    units: tuple[str, ...]
    """The names of the modules that are checkpointed, offloaded and compiled one by one, in the order of the forward
    pass. Each runs once in a forward pass."""
    after_units: str
    """The name of the module that takes the last unit's output: a norm."""
    per_sample: frozenset[str]
    """The names of the layers that see one row for each sample (``Architecture.per_sample``)."""
    unquantised: frozenset[str]
    """The names of the layers within the units that no precision quantises."""


def model_units(model: nn.Module) -> list[nn.Module]:
    """Return the units of a model, in the order of the forward pass."""
    return [model.get_submodule(name) for name in model.units]  # type: ignore[union-attr]


def unit_filter(units: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: whether the module or parameter of a given name belongs to one of these units."""
    prefixes = tuple(f"{name}." for name in units)
    return lambda name: f"{name}.".startswith(prefixes)


def trunk_filter(units: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: whether the module of a given name belongs to a unit or lies between units."""
    # Between them lie the projections around the transformer blocks of SDXL's attentions.
    return unit_filter(list(dict.fromkeys(name.partition(".")[0] for name in units)))


def layers_between_units(model: nn.Module) -> list[nn.Module]:
    """Return the layers with weights between a model's units."""
    trunk, within = trunk_filter(model.units), unit_filter(model.units)  # type: ignore[arg-type]
    outside = (layer for name, layer in model.named_modules() if trunk(name) and not within(name))
    return [layer for layer in outside if next(layer.parameters(recurse=False), None) is not None]


def modules_around_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold layers between units, and so may add to what these compute, as SDXL's attentions
    do."""
    between = set(map(id, layers_between_units(model)))
    return [module for module in model.modules() if any(id(child) in between for child in module.children())]


def quantised_layers(model: nn.Module, precision: WeightPrecision) -> frozenset[str]:
    """Return the names of the layers in and between a model's units that a precision quantises, before any of them
    is."""
    trunk = trunk_filter(model.units)  # type: ignore[arg-type]
    names = (name for name, layer in model.named_modules() if trunk(name) and precision.quantises(layer))
    return frozenset(names) - model.unquantised  # type: ignore[operator]


def quantised_layer(model: nn.Module, name: str, precision: WeightPrecision) -> nn.Module:
    """Return the quantised twin of a model's layer; see ``WeightPrecision.convert``."""
    return precision.convert(model.get_submodule(name), name in model.per_sample)  # type: ignore[operator]


def model_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: that of its parameters outside of the units, which are never
    offloaded."""
    within = unit_filter(model.units)  # type: ignore[arg-type]
    return next(parameter.device for name, parameter in model.named_parameters() if not within(name))
