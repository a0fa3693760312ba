"""Define the interface of training methods: attach to a model, list trained parameters, export the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.system.options import Option, Problem

if TYPE_CHECKING:
    from torch import nn

OUTPUT = "pytorch_lora_weights.safetensors"
"""The result of methods that do not change the base, by diffusers' name."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a model's parameters by name."""


class TrainingMethod(Option):
    """Choose what is trained and how the result is exported. Members define ``method`` (the tag)."""

    trains_base: ClassVar[bool] = False
    """Whether base weights change, which requires a trainable precision."""
    trains: ClassVar[bool] = True
    """Whether any part of the denoiser trains."""
    supports_fsdp: ClassVar[bool] = False
    """Whether all weights train, so that processes can divide them among themselves."""
    holds_lora: ClassVar[bool] = False
    """Whether its result is a LoRA file, which a LoRA on the text encoders can join."""
    title: ClassVar[str] = "LoRA"
    """What messages call the result of a method that does not change the base."""
    output_name: ClassVar[str | None] = None
    """File of the result inside the run's folder; None: the folder of the denoiser, ``transformer`` or ``unet``."""

    in_comfyui: ClassVar[bool] = True
    """Whether ComfyUI loads the result of a method that does not change the base from ``models/loras``."""
    needs_contexts: ClassVar[bool] = False
    """Whether it needs attention layers that read only the picture or only the prompt, like a U-Net's."""

    def result(self, denoiser: str) -> str:
        """Return the file or folder of the result inside the run's folder."""
        return self.output_name or denoiser

    def before_diffusers(self, layout: str) -> str | None:
        """Say what to do before diffusers loads the result, which has that layout; None if it loads it."""
        return None

    def describe(self, shapes: Shapes) -> str:
        """Describe what is trained."""
        raise NotImplementedError

    def trainable(self, shapes: Shapes) -> int:
        """Count the trained parameters from the base model's shapes alone."""
        raise NotImplementedError

    def exported(self, shapes: Shapes) -> int:
        """Count the parameters in the exported result of a method that does not change the base."""
        return self.trainable(shapes)

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        """Check the options against the base model's shapes."""
        yield from ()

    def is_untouched(self, module: str) -> bool:
        """Return whether a module keeps its base weights: it neither trains nor gets an update, and is not part of the
        result. Such a module may be removed from the model."""
        return False

    def trains_weight(self, name: str) -> bool:
        """Return whether every value of a parameter of the base trains."""
        return False

    def attach(self, model: nn.Module, seed: int) -> None:
        """Prepare the model for training in place, and freeze everything else.

        Args:
            model: loaded, possibly quantised, denoiser.
            seed: seed for the initialisation.
        """
        raise NotImplementedError

    def lr_ratio(self, name: str) -> float:
        """Return the factor on the learning rate of a trained parameter, by its name in the model."""
        return 1.0

    def constrain(self, model: nn.Module) -> None:
        """Bring the trained parameters back within their bounds after an update. Must not read from the device."""

    def disabled(self, model: nn.Module) -> AbstractContextManager[None]:
        """Restore the exact base model within this context, by disabling all updates. Only for methods that do not
        change the base."""
        from simpletune.adapters.methods.layers import updates_disabled

        return updates_disabled(model)

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write the result in a format that other tools read.

        Args:
            model: trained denoiser.
            folder: folder for the result.
            metadata: strings for the safetensors header.

        Returns:
            The written file or folder.
        """
        raise NotImplementedError

    @property
    def exports_to_checkpoints(self) -> bool:
        """Whether checkpoints also contain the exported safetensors file, because it is small."""
        return not self.trains_base


class NoAdapter(TrainingMethod):
    """Leave the denoiser as it is, and train only what ``text`` names."""

    method: Literal["none"] = "none"
    """The denoiser stays frozen; only the text side trains (text.embeddings, text.lora)."""

    trains: ClassVar[bool] = False
    holds_lora: ClassVar[bool] = True
    output_name: ClassVar[str] = OUTPUT

    def describe(self, shapes: Shapes) -> str:
        return "nothing of the denoiser"

    def trainable(self, shapes: Shapes) -> int:
        return 0

    def is_untouched(self, module: str) -> bool:
        return True

    def attach(self, model: nn.Module, seed: int) -> None:
        model.requires_grad_(False)

    def disabled(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        return folder / self.output_name  # writes nothing: a LoRA of the text encoders goes there
