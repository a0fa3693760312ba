"""What every training method offers: attach to a model, name what trains, export a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from simpletune.options import Option, Problem

if TYPE_CHECKING:
    from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter names of a model and their shapes."""


class TrainingMethod(Option):
    """What is trained, and in which form the result leaves the run. Members define ``method`` (the tag)."""

    trains_base: ClassVar[bool] = False
    """Whether base weights change; they must then be in a trainable precision."""
    output_name: ClassVar[str]
    """File or folder in the run's folder that holds the result."""

    def describe(self, shapes: Shapes) -> str:
        """What is trained, in words."""
        raise NotImplementedError

    def trainable(self, shapes: Shapes) -> int:
        """Number of parameters that will be trained, from the base model's shapes alone."""
        raise NotImplementedError

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        """What does not fit the base model's shapes."""
        yield from ()

    def is_untouched(self, module: str) -> bool:
        """Whether the module of that name is the base's own throughout: it neither trains nor gets an update, and no
        result holds it. It may then be kept apart from the model."""
        return False

    def attach(self, model: nn.Module, seed: int) -> None:
        """Make the model trainable by this method, in place; everything else is frozen.

        Args:
            model: the loaded, possibly quantised, transformer.
            seed: seeds the initialisation.
        """
        raise NotImplementedError

    def disabled(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within this context the model is the base model, exactly. Only for methods that leave the base alone."""
        raise NotImplementedError

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write the result in the form other tools read.

        Args:
            model: the trained transformer.
            folder: where ``output_name`` is written.
            metadata: goes into the safetensors header.

        Returns:
            The file or folder written.
        """
        raise NotImplementedError

    @property
    def exports_to_checkpoints(self) -> bool:
        """Whether checkpoints also hold the exported form, a safetensors file: when it is small."""
        return not self.trains_base
