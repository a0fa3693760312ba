"""Building SD3's transformer layer by layer: from files or from random numbers, quantised as each layer arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol, cast

import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from simpletune.models.buckets import Size
from simpletune.models.positions import TABLE, crop_positions
from simpletune.models.sd3_shapes import ModelConfig, parameter_shapes
from simpletune.models.single_file import OriginalReader
from simpletune.models.transformer import Transformer
from simpletune.options import UserError, shortened
from simpletune.quant.precision import WeightPrecision
from simpletune.system.model_folder import weight_files
from simpletune.system.rng import key_of
from simpletune.system.safetensors_file import WeightReader
from simpletune.tensors import move_own_tensors, own_tensors, set_tensor, to_device


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
    flow at once. The position table is a constant, not a weight: where there are weights, it is theirs.

    Args:
        config: the transformer's ``config.json``.
        seed: of the weights.
        beside: the folder of that config; without weights in it, the table is the one that the config implies.
    """

    def __init__(self, config: ModelConfig, seed: int, beside: Path | None = None):
        with init_empty_weights(include_buffers=True):
            model = SD3Transformer2DModel.from_config(config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._config, self._seed, self._beside = config, seed, beside

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shapes)

    def get(self, name: str) -> Tensor:
        """One tensor in fp32, on the CPU."""
        if name == TABLE:
            if self._beside is not None and any(self._beside.glob("*.safetensors")):
                return WeightReader(weight_files(self._beside)).get(TABLE).float()
            with init_empty_weights(include_buffers=False):  # diffusers computes the table as it builds a model
                return SD3Transformer2DModel.from_config({**self._config, "num_layers": 0}).pos_embed.pos_embed
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if "norm" in name and name.endswith(".weight") else torch.zeros(shape)
        generator = torch.Generator().manual_seed(key_of(self._seed, "init", name) % 2**63)
        small = ".linear." in name and "norm" in name or name.startswith("proj_out")
        std = (0.01 if small else 1.0) / math.sqrt(math.prod(shape[1:]))
        return torch.empty(shape).normal_(0, std, generator=generator)


class EmptyTensors:
    """Tensors that have shapes and no values, for fake tensors: nothing is read, nothing is drawn."""

    def __init__(self, config: ModelConfig):
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
    config: ModelConfig,
    tensors: TensorSource,
    precision: WeightPrecision,
    device: torch.device,
    on_host: Callable[[str], bool] = lambda name: False,
    place: str = "the model",
) -> Transformer:
    """Build the transformer on the meta device and fill it layer by layer.

    Args:
        config: the transformer's ``config.json``.
        tensors: its weights.
        precision: how weights are held; a quantised layer replaces its linear as soon as that is loaded.
        device: where to.
        on_host: whether the module of that name stays in host memory. It is quantised on the device all the same.
        place: where the weights are, for messages.

    Raises:
        UserError: tensors are missing, unexpected, or of another shape.
    """
    model = empty_transformer(config)
    _compare(model, tensors, place)
    for name in [name for name, _ in model.named_modules()]:  # names only: a replaced layer must not be kept alive
        module = model.get_submodule(name)
        linear = module if isinstance(module, nn.Linear) and precision.quantises(name) else None
        for own, expected in own_tensors(module):
            tensor = tensors.get(f"{name}.{own}")
            if tensor.shape != expected.shape:
                shapes = f"{list(tensor.shape)}, not {list(expected.shape)} as its config.json says"
                raise UserError(f"{place}: {name}.{own} has shape {shapes}")
            set_tensor(module, own, to_device(tensor, device, precision.base_dtype() if linear is None else None))
        if linear is not None:
            module = precision.convert(name, linear)
            put_module(model, name, module)
        if on_host(name):
            move_own_tensors(module, torch.device("cpu"))
    model.eval().requires_grad_(False)
    return model


def empty_transformer(config: ModelConfig) -> Transformer:
    """The transformer with all its tensors on the meta device.

    Args:
        config: its ``config.json``.
    """
    with init_empty_weights(include_buffers=True):
        return cast(Transformer, SD3Transformer2DModel.from_config(config))


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of that name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def open_tensors(source: Path) -> TensorSource:
    """The tensors of a folder in diffusers' layout, or of a single file in the original one."""
    return OriginalReader(source) if source.is_file() else WeightReader(weight_files(source))


def crop_to(model: nn.Module, sizes: Collection[Size], whole: Callable[[], TensorSource], dtype: torch.dtype) -> None:
    """Cut a model's table of positions to the pictures that it will see, in place.

    Args:
        model: loaded.
        sizes: (width, height) in pixels.
        whole: opens the tensors again, for an export of the whole table.
        dtype: of the table.
    """
    crop_positions(model.pos_embed, sizes, lambda: whole().get(TABLE).to(dtype))  # type: ignore[arg-type]


def _compare(model: nn.Module, tensors: TensorSource, place: str) -> None:
    """Names in the file against names in the model."""
    expected = set(model.state_dict())
    complaints = []
    for title, names in (("missing", expected - tensors.names), ("unexpected", tensors.names - expected)):
        if names:
            complaints.append(f"{title}: {shortened(sorted(names))}")
    if complaints:
        raise UserError(f"{place}: the weights do not fit their config.json. " + "; ".join(complaints))
