"""Full fine-tuning: train every parameter of the denoiser."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.adapters.methods.adapter import Shapes, TrainingMethod
from simpletune.models.families import family_of_config

if TYPE_CHECKING:
    from torch import nn


class Full(TrainingMethod):
    """Train the whole transformer or U-Net."""

    method: Literal["full"] = "full"
    """Full fine-tuning: train every parameter of the transformer or U-Net."""

    trains_base: ClassVar[bool] = True
    supports_fsdp: ClassVar[bool] = True

    def describe(self, shapes: Shapes) -> str:
        return "all parameters of the model"

    def trainable(self, shapes: Shapes) -> int:
        return sum(math.prod(shape) for shape in shapes.values())

    def trains_weight(self, name: str) -> bool:
        return True

    def attach(self, model: nn.Module, seed: int) -> None:
        model.requires_grad_(True)

    def disabled(self, model: nn.Module) -> AbstractContextManager[None]:
        raise TypeError(f"{self.method} fine-tuning changes the base weights: load the base again instead")

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write diffusers' folder of the denoiser, ``transformer/`` or ``unet/``: config.json and
        diffusion_pytorch_model.safetensors."""
        from simpletune.engine.fsdp.rank_zero import rank_zero_driver, restore_class, write_divided_folder
        from simpletune.system.model_folder import write_model_folder

        leading = rank_zero_driver(model)
        with nullcontext() if leading is None else restore_class(model):
            family = family_of_config({**getattr(model, "config", {}), "_class_name": type(model).__name__})
            place, whole = folder / family.denoiser, family.architecture.whole_tensors(model)
            if leading is None:
                return write_model_folder(model, place, metadata, whole)
            return write_divided_folder(model, leading, place, metadata, whole)
