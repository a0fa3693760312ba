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


def model_units(model: nn.Module) -> list[nn.Module]:
    """The units of a model, in the order of the forward pass."""
    return [model.get_submodule(name) for name in model.units]  # type: ignore[union-attr]


def in_units(units: Sequence[str]) -> Callable[[str], bool]:
    """A predicate: whether the module or parameter of a given name belongs to one of these units."""
    prefixes = tuple(f"{name}." for name in units)
    return lambda name: f"{name}.".startswith(prefixes)


def in_trunk(units: Sequence[str]) -> Callable[[str], bool]:
    """A predicate: whether the module of a given name belongs to a unit or lies between units, as the projections
    around the transformer blocks of SDXL's attentions do; what comes before the first unit or after the last does not.
    """
    return in_units(list(dict.fromkeys(name.partition(".")[0] for name in units)))


def layers_between_units(model: nn.Module) -> list[nn.Module]:
    """The layers with weights between a model's units."""
    trunk, within = in_trunk(model.units), in_units(model.units)  # type: ignore[arg-type]
    outside = (layer for name, layer in model.named_modules() if trunk(name) and not within(name))
    return [layer for layer in outside if next(layer.parameters(recurse=False), None) is not None]


def modules_around_units(model: nn.Module) -> list[nn.Module]:
    """The modules that hold layers between units, and so may add to what these compute, as SDXL's attentions do."""
    between = set(map(id, layers_between_units(model)))
    return [module for module in model.modules() if any(id(child) in between for child in module.children())]


def quantised_layers(model: nn.Module, precision: WeightPrecision) -> frozenset[str]:
    """The names of the layers inside of a model's units and between them that a precision quantises, before any of
    them is."""
    trunk = in_trunk(model.units)  # type: ignore[arg-type]
    return frozenset(name for name, layer in model.named_modules() if trunk(name) and precision.quantises(layer))


def quantised_layer(model: nn.Module, name: str, precision: WeightPrecision) -> nn.Module:
    """The quantised twin of a model's layer; see ``WeightPrecision.convert``."""
    return precision.convert(model.get_submodule(name), name in model.per_sample)  # type: ignore[operator]


def model_device(model: nn.Module) -> torch.device:
    """The device on which a model computes: that of its parameters outside of the units, which are never offloaded."""
    within = in_units(model.units)  # type: ignore[arg-type]
    return next(parameter.device for name, parameter in model.named_parameters() if not within(name))
