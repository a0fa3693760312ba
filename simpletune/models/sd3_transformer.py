"""Building SD3's transformer layer by layer: from files or from random numbers, quantised as each layer arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from simpletune.data.buckets import Size
from simpletune.memory.positions import TABLE, crop_positions
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
        with init_empty_weights(include_buffers=True):
            model = SD3Transformer2DModel.from_config(config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._config, self._seed = config, seed

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shapes)

    def get(self, name: str) -> Tensor:
        """One tensor in fp32, on the CPU."""
        if name == TABLE:
            with init_empty_weights(include_buffers=False):  # diffusers computes the table as it builds a model
                return SD3Transformer2DModel.from_config({**self._config, "num_layers": 0}).pos_embed.pos_embed
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if "norm" in name and name.endswith(".weight") else torch.zeros(shape)
        generator = torch.Generator().manual_seed(key_of(self._seed, "init", name) % 2**63)
        small = ".linear." in name and "norm" in name or name.startswith("proj_out")
        std = (0.01 if small else 1.0) / math.sqrt(math.prod(shape[1:]))
        return torch.empty(shape).normal_(0, std, generator=generator)


def load(
    config: Mapping[str, Any],
    source: Path | None,
    precision: WeightPrecision,
    device: torch.device,
    seed: int = 0,
    on_host: Callable[[str], bool] = lambda name: False,
    sizes: Collection[Size] | None = None,
) -> nn.Module:
    """Build the transformer on the meta device and fill it layer by layer.

    Args:
        config: the transformer's ``config.json``.
        source: the folder of its weights, or a single file in the original layout; None for random ones.
        precision: how weights are held; a quantised layer replaces its linear as soon as that is loaded.
        device: where to.
        seed: for random weights.
        on_host: whether the module of that name stays in host memory. It is quantised on the device all the same.
        sizes: (width, height) in pixels of all pictures it will see: positions are cut to them; None: kept whole.

    Raises:
        UserError: tensors are missing, unexpected, or of another shape.
    """
    tensors = _tensors_of(config, source, seed)
    with init_empty_weights(include_buffers=True):
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
        if name == "pos_embed" and sizes is not None:
            again = _tensors_of(config, source, seed)  # of its own: what the first has read must not stay mapped
            crop_positions(module, sizes, _reader_of(again, TABLE, precision.base_dtype()))
        if quantised:
            parent, _, leaf = name.rpartition(".")
            module = precision.convert(module)
            setattr(model.get_submodule(parent), leaf, module)
        if on_host(name):
            move_own_tensors(module, torch.device("cpu"))
    return model.eval().requires_grad_(False)


def _tensors_of(config: Mapping[str, Any], source: Path | None, seed: int) -> TensorSource:
    if source is None:
        return RandomTensors(config, seed)
    return OriginalReader(source) if source.is_file() else WeightReader(weight_files(source))


def _reader_of(tensors: TensorSource, name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: tensors.get(name).to(dtype)


def _compare(model: nn.Module, tensors: TensorSource, source: Path | None) -> None:
    """Names in the file against names in the model."""
    expected = set(model.state_dict())
    complaints = []
    for title, names in (("missing", expected - tensors.names), ("unexpected", tensors.names - expected)):
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            complaints.append(f"{title}: {', '.join(sorted(names)[:LISTED])}{more}")
    if complaints:
        raise UserError(f"{source}: the weights do not fit their config.json. " + "; ".join(complaints))
