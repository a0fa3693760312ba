"""Build SD3's transformer layer by layer, from files or random weights, quantising each layer as it loads."""

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
    """A source of a model's tensors."""

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""

    def get(self, name: str) -> Tensor:
        """Read one tensor on the CPU."""


class RandomTensors:
    """Random weights: each tensor is a function of the seed and its name.

    Weights are normal with standard deviation 1/sqrt(inputs), biases are zero, norms are one. Modulations and the
    output layer, which DiT initialises to zero (arXiv:2212.09748, section 3.2), get a hundredth of that deviation, so
    that gradients flow from the first step. The position table is a constant: it is read from the weights if there are
    any.

    Args:
        config: the transformer's ``config.json``.
        seed: the seed of the weights.
        beside: the folder of that config. If it contains no weights, the table is computed from the config.
    """

    def __init__(self, config: ModelConfig, seed: int, beside: Path | None = None):
        with init_empty_weights(include_buffers=True):
            model = SD3Transformer2DModel.from_config(config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._config, self._seed, self._beside = config, seed, beside

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._shapes)

    def get(self, name: str) -> Tensor:
        """Draw one fp32 tensor on the CPU."""
        if name == TABLE:
            if self._beside is not None and any(self._beside.glob("*.safetensors")):
                return WeightReader(weight_files(self._beside)).get(TABLE).float()
            with init_empty_weights(include_buffers=False):  # diffusers computes the table when it builds a model
                return SD3Transformer2DModel.from_config({**self._config, "num_layers": 0}).pos_embed.pos_embed
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if "norm" in name and name.endswith(".weight") else torch.zeros(shape)
        generator = torch.Generator().manual_seed(key_of(self._seed, "init", name) % 2**63)
        small = ".linear." in name and "norm" in name or name.startswith("proj_out")
        std = (0.01 if small else 1.0) / math.sqrt(math.prod(shape[1:]))
        return torch.empty(shape).normal_(0, std, generator=generator)


class EmptyTensors:
    """Uninitialised tensors of the right shapes, for simulation with fake tensors."""

    def __init__(self, config: ModelConfig):
        self._shapes = parameter_shapes(config)
        hidden = self._shapes["pos_embed.proj.bias"][0]
        self._shapes["pos_embed.pos_embed"] = (1, config["pos_embed_max_size"] ** 2, hidden)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._shapes)

    def get(self, name: str) -> Tensor:
        """Allocate one fp32 tensor on the CPU."""
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
        precision: the weight precision; a quantised layer replaces each linear layer as soon as it is loaded.
        device: the target device.
        on_host: whether the module of a given name stays in host memory; it is still quantised on the device.
        place: the location of the weights, for messages.

    Raises:
        UserError: tensors are missing, unexpected, or have the wrong shape.
    """
    model = empty_transformer(config)
    _compare(model, tensors, place)
    for name in [name for name, _ in model.named_modules()]:  # names only, so that replaced layers are freed
        module = model.get_submodule(name)
        linear = module if isinstance(module, nn.Linear) and precision.quantises(name) else None
        for own, expected in own_tensors(module):
            tensor = tensors.get(f"{name}.{own}")
            if tensor.shape != expected.shape:
                shapes = f"{list(tensor.shape)}; its config.json requires {list(expected.shape)}"
                raise UserError(f"{place}: {name}.{own} has shape {shapes}. Download the model again")
            set_tensor(module, own, to_device(tensor, device, precision.base_dtype() if linear is None else None))
        if linear is not None:
            module = precision.convert(name, linear)
            put_module(model, name, module)
        if on_host(name):
            move_own_tensors(module, torch.device("cpu"))
    model.eval().requires_grad_(False)
    return model


def empty_transformer(config: ModelConfig) -> Transformer:
    """Build the transformer with all its tensors on the meta device.

    Args:
        config: its ``config.json``.
    """
    with init_empty_weights(include_buffers=True):
        return cast(Transformer, SD3Transformer2DModel.from_config(config))


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of that name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def open_tensors(source: Path) -> TensorSource:
    """Open the tensors of a folder in diffusers' layout, or of a single file in the original layout."""
    return OriginalReader(source) if source.is_file() else WeightReader(weight_files(source))


def crop_to(model: nn.Module, sizes: Collection[Size], whole: Callable[[], TensorSource], dtype: torch.dtype) -> None:
    """Crop a model's position table in place to the pictures that it will see.

    Args:
        model: the loaded model.
        sizes: (width, height) of the pictures in pixels.
        whole: opens the tensors again, to export the whole table.
        dtype: the type of the table.
    """
    crop_positions(model.pos_embed, sizes, lambda: whole().get(TABLE).to(dtype))  # type: ignore[arg-type]


def _compare(model: nn.Module, tensors: TensorSource, place: str) -> None:
    """Compare the names of the tensors with those in the model."""
    expected = set(model.state_dict())
    complaints = []
    for title, names in (("missing", expected - tensors.names), ("unexpected", tensors.names - expected)):
        if names:
            complaints.append(f"{title}: {shortened(sorted(names))}")
    if complaints:
        raise UserError(
            f"{place}: the weights do not match their config.json ({'; '.join(complaints)}). Download the model again"
        )
