"""Building SD3's transformer layer by layer: from files or from random numbers, quantised as each layer arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from simpletune.models.sd3_shapes import parameter_shapes
from simpletune.models.single_file import OriginalReader
from simpletune.models.weights import WeightReader, move_own_tensors, own_tensors, set_tensor, to_device, weight_files
from simpletune.options import UserError
from simpletune.quant.precision import WeightPrecision
from simpletune.streams import key_of

LISTED = 8


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU."""


class RandomTensors:
    """Random weights by name: each tensor is a function of the seed and its name.

    Weights are normal with standard deviation 1/sqrt(inputs), biases zero, norms one; modulations and the output, which
    start at zero in training from scratch (arXiv:2212.09748, section 3.2), are a hundredth of that, so that gradients
    flow at once.
    """

    def __init__(self, config: Mapping[str, Any], seed: int):
        with init_empty_weights(include_buffers=False):
            empty = SD3Transformer2DModel.from_config({**config, "num_layers": 0})
        with init_empty_weights():
            self._model = SD3Transformer2DModel.from_config(config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        self._pos_embed = {"pos_embed.pos_embed": empty.pos_embed.pos_embed}
        self._seed = seed

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shapes)

    def get(self, name: str) -> Tensor:
        """One tensor in fp32, on the CPU."""
        if name in self._pos_embed:
            return self._pos_embed[name]
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if "norm" in name and name.endswith(".weight") else torch.zeros(shape)
        generator = torch.Generator().manual_seed(key_of(self._seed, "init", name) % 2**63)
        small = ".linear." in name and "norm" in name or name.startswith("proj_out")
        std = (0.01 if small else 1.0) / math.sqrt(math.prod(shape[1:]))
        return torch.empty(shape).normal_(0, std, generator=generator)


class EmptyTensors:
    """Tensors that have shapes and no values, for fake tensors: nothing is read, nothing is drawn."""

    def __init__(self, config: Mapping[str, Any]):
        self._shapes = parameter_shapes(config)
        hidden = self._shapes["pos_embed.proj.bias"][0]
        self._shapes["pos_embed.pos_embed"] = (1, config["pos_embed_max_size"] ** 2, hidden)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shapes)

    def get(self, name: str) -> Tensor:
        """One tensor in fp32, on the CPU."""
        return torch.empty(self._shapes[name])


def load(
    config: Mapping[str, Any],
    source: Path | TensorSource | None,
    precision: WeightPrecision,
    device: torch.device,
    seed: int = 0,
    on_host: Callable[[str], bool] = lambda name: False,
) -> nn.Module:
    """Build the transformer on the meta device and fill it layer by layer.

    Args:
        config: the transformer's ``config.json``.
        source: the folder of its weights, or a single file in the original layout; a source of tensors; None for
            random ones.
        precision: how weights are held; a quantised layer replaces its linear as soon as that is loaded.
        device: where to.
        seed: for random weights.
        on_host: whether the module of that name stays in host memory. It is quantised on the device all the same.

    Raises:
        UserError: tensors are missing, unexpected, or of another shape.
    """
    tensors: TensorSource = RandomTensors(config, seed) if source is None else _open(source)
    with init_empty_weights():
        model = SD3Transformer2DModel.from_config(config)
    _compare(model, tensors, source)
    for name in [name for name, _ in model.named_modules()]:  # names only: a replaced layer must not be kept alive
        module = model.get_submodule(name)
        quantised = isinstance(module, nn.Linear) and precision.quantises(name)
        for own, expected in own_tensors(module):
            tensor = tensors.get(f"{name}.{own}")
            if tensor.shape != expected.shape:
                shapes = f"{list(tensor.shape)}, not {list(expected.shape)} as its config.json says"
                raise UserError(f"{source}: {name}.{own} has shape {shapes}")
            set_tensor(module, own, to_device(tensor, device, None if quantised else precision.base_dtype()))
        if quantised:
            parent, _, leaf = name.rpartition(".")
            module = precision.convert(module)
            setattr(model.get_submodule(parent), leaf, module)
        if on_host(name):
            move_own_tensors(module, torch.device("cpu"))
    return model.eval().requires_grad_(False)


def _open(source: Path | TensorSource) -> TensorSource:
    if not isinstance(source, Path):
        return source
    return OriginalReader(source) if source.is_file() else WeightReader(weight_files(source))


def _compare(model: nn.Module, tensors: TensorSource, source: Path | TensorSource | None) -> None:
    """Names in the file against names in the model."""
    expected = set(model.state_dict())
    complaints = []
    for title, names in (("missing", expected - tensors.names), ("unexpected", tensors.names - expected)):
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            complaints.append(f"{title}: {', '.join(sorted(names)[:LISTED])}{more}")
    if complaints:
        raise UserError(f"{source}: the weights do not fit their config.json. " + "; ".join(complaints))
