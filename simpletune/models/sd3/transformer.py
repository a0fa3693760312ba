"""Build SD3's transformer and open its weights: from files, random, or uninitialised."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from simpletune.models.sd3.joint_block import use_joint_blocks
from simpletune.models.sd3.positions import TABLE, crop_positions
from simpletune.models.sd3.shapes import parameter_shapes, unit_names
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.denoiser import Denoiser, set_units
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.weights import EmptyTensors, TensorSource, random_weight
from simpletune.system.model_folder import weight_files
from simpletune.system.safetensors_file import WeightReader


class RandomTransformerTensors:
    """Random weights: each tensor is a function of the seed and its name.

    Weights are normal with standard deviation 1/sqrt(inputs), biases are zero, norms are one. Modulations and the
    output layer, which DiT initialises to zero (arXiv:2212.09748, section 3.2), get a hundredth of that deviation, so
    that gradients flow from the first step. The position table is a constant, read from the weights if there are any.

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
        small = ".linear." in name and "norm" in name or name.startswith("proj_out")
        return random_weight(name, self._shapes[name], self._seed, 0.01 if small else 1.0)


def empty_tensors(config: ModelConfig) -> EmptyTensors:
    """Return uninitialised tensors of the shapes in a ``config.json``, for simulation with fake tensors."""
    shapes = parameter_shapes(config)
    hidden = shapes["pos_embed.proj.bias"][0]
    return EmptyTensors({**shapes, TABLE: (1, config["pos_embed_max_size"] ** 2, hidden)})


def empty_denoiser(config: ModelConfig) -> Denoiser:
    """Build the transformer with all its tensors on the meta device.

    Args:
        config: its ``config.json``.
    """
    with init_empty_weights(include_buffers=True):
        model = SD3Transformer2DModel.from_config(config)
    use_joint_blocks(model.transformer_blocks)
    return set_units(cast(Denoiser, model), unit_names(parameter_shapes(config)), "norm_out")


def crop_to(model: nn.Module, sizes: Collection[Size], whole: Callable[[], TensorSource], dtype: torch.dtype) -> None:
    """Crop a model's position table in place to the pictures that it will see.

    Args:
        model: the loaded model.
        sizes: (width, height) of the pictures in pixels.
        whole: opens the tensors again, to export the whole table.
        dtype: the type of the table.
    """
    crop_positions(model.pos_embed, sizes, lambda: whole().get(TABLE).to(dtype))  # type: ignore[arg-type]
