"""Fill a model layer by layer from files, random weights or nothing, quantising each layer as it loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from simpletune.engine.denoiser import quantised_layer, quantised_layers
from simpletune.engine.memory.machine_weights import keep_on_host
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import own_tensors, set_tensor, to_device
from simpletune.models.shared.model_config import Shape
from simpletune.models.shared.parts import Part
from simpletune.models.shared.single_file import OriginalReader
from simpletune.system.model_folder import weight_files
from simpletune.system.options import UserError, join_names
from simpletune.system.rng import random_key
from simpletune.system.safetensors_file import WeightReader

Model = TypeVar("Model", bound=nn.Module)


class TensorSource(Protocol):
    """A source of a model's tensors."""

    @property
    def names(self) -> set[str]: ...

    def get(self, name: str) -> Tensor:
        """Read one tensor on the CPU."""


class MadeTensors:
    """Tensors that ``make`` makes, in fp32 on the CPU, from their names and shapes."""

    def __init__(self, shapes: Mapping[str, Shape], make: Callable[[str, Shape], Tensor]):
        self._shapes, self._make, self.names = shapes, make, set(shapes)

    def get(self, name: str) -> Tensor:
        return self._make(name, self._shapes[name])


def random_weight(name: str, shape: Shape, seed: int, scale: float = 1.0) -> Tensor:
    """Draw one fp32 parameter on the CPU, as a function of the seed and its name.

    Weights are normal with standard deviation scale / sqrt(inputs), biases are zero, norms are one.
    """
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)  # a norm's
    generator = torch.Generator().manual_seed(random_key(seed, "init", name) % 2**63)
    return torch.empty(shape).normal_(0, scale / math.sqrt(math.prod(shape[1:])), generator=generator)


def fill_model(
    model: Model,
    tensors: TensorSource,
    precision: WeightPrecision,
    device: torch.device,
    on_host: Callable[[str], bool] = lambda name: False,
    place: str = "the model",
) -> Model:
    """Fill a model on the meta device layer by layer, and freeze it.

    Args:
        model: the model, changed in place.
        tensors: its weights.
        precision: the weight precision; a quantised layer replaces each of its layers as soon as it is loaded.
        device: the target device.
        on_host: whether the module of a given name stays in host memory; it is still quantised on the device.
        place: the location of the weights, for messages.

    Raises:
        UserError: tensors are missing, unexpected, or have the wrong shape.
    """
    require_names(model, tensors, place)
    quantised = quantised_layers(model, precision)
    for name in [name for name, _ in model.named_modules()]:  # names only, so that replaced layers are freed
        fill_layer(model, name, tensors, precision, device, name in quantised, place)
        if on_host(name):
            keep_on_host(model.get_submodule(name))
    model.eval().requires_grad_(False)
    return model


def require_names(model: nn.Module, tensors: TensorSource, place: str) -> None:
    """Raise UserError if a source lacks a tensor of an empty model, or has others."""
    wanted, complaints = set(model.state_dict()), []
    for title, names in (("missing", wanted - tensors.names), ("unexpected", tensors.names - wanted)):
        if names:
            complaints.append(f"{title}: {join_names(sorted(names))}")
    if complaints:
        raise UserError(
            f"{place}: the weights do not match their config.json ({'; '.join(complaints)}). Download the model again"
        )


def fill_layer(
    model: nn.Module,
    name: str,
    tensors: TensorSource,
    precision: WeightPrecision,
    device: torch.device,
    quantised: bool,
    place: str,
) -> None:
    """Fill one module's own tensors, without its children's, and quantise it if it is to be ``quantised``. Raises
    UserError if one has the wrong shape."""
    module = model.get_submodule(name)
    for own, expected in own_tensors(module):
        full = f"{name}.{own}".removeprefix(".")  # a parameter of the model itself
        tensor = tensors.get(full)
        if tensor.shape != expected.shape:
            shapes = f"{list(tensor.shape)}; its config.json requires {list(expected.shape)}"
            raise UserError(f"{place}: {full} has shape {shapes}. Download the model again")
        set_tensor(module, own, to_device(tensor, device, None if quantised else precision.compute_dtype()))
    if quantised:
        put_module(model, name, quantised_layer(model, name, precision))


def open_tensors(part: Part) -> TensorSource:
    """Open a part's tensors, in a folder in diffusers' layout or in a single file in the original layout."""
    if part.file is not None:
        assert part.layout is not None
        return OriginalReader(part.file, part.layout)
    assert part.folder is not None
    return WeightReader(weight_files(part.folder))


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of that name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
