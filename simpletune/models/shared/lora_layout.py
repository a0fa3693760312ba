"""A model family's facts about LoRA: named targets, and the names of its denoiser's layers in LoRA files.

A key in a file consists of a prefix, a module and a role. Layouts differ in all three: diffusers' names or the original
ones, with dots or underscores; ``lora_A`` or ``lora_down``; alpha in a tensor, in the header, or missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_encoders import LoraEncoder
from simpletune.models.shared.lora_verdicts import Verdict
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.system.options import UserError

DOWN, MID, UP, ALPHA = "down", "mid", "up", "alpha"
MAGNITUDE, DORA_SCALE = "lora_magnitude_vector", "dora_scale"  # DoRA's: by diffusers and PEFT, and by others
DORA_MARK = {"simpletune_dora_scale": "m ||W|| / ||W + s B A||"}  # in the header of a file whose scale is ComfyUI's
OFT_BLOCKS = "oft_blocks"


class LoraNames:
    """The names of one family's layers. A family extends this class once, in its own folder."""

    title: ClassVar[str]
    """The family's name in messages."""
    denoiser: ClassVar[str]
    """The denoiser's folder in a pipeline, which is also the prefix of its keys in diffusers' LoRA files."""
    targets: ClassVar[Mapping[str, re.Pattern[str]]]
    """Named values of ``adapter.targets``, each with a pattern that occurs in the names of its layers."""
    usual_targets: ClassVar[str] = "attention"
    """The one that ``adapter.targets`` begins with."""
    short: ClassVar[Mapping[str, str]]
    """What the first word of a pattern in ``adapter.layers`` may abbreviate: short names of the denoiser's blocks."""
    convolutions: ClassVar[re.Pattern[str] | None] = None
    """Its convolutions with a kernel larger than 1x1 that can have an update, by the ends of their names."""
    residual: ClassVar[re.Pattern[str] | None] = None
    """The layers that a named choice gets with ``adapter.conv_rank``, as with kohya's ``conv_dim``."""
    contexts: ClassVar[re.Pattern[str] | None] = None
    """The projections to keys and values of attentions that read the picture (group ``image``) or the prompt alone;
    None: the family's attention reads both at once."""
    input: ClassVar[str | None] = None
    """The layer that reads the latents, and more in inpainting models; None: the family has no such models."""
    by_text_width: ClassVar[Mapping[int, str]] = {}
    """The published models by the width of the text that an attention reads, where that tells them apart."""
    layers_of: ClassVar[Mapping[str, re.Pattern[str]]] = {}
    """Layers that only one of the published models has, by its title."""
    header: ClassVar[Mapping[str, Mapping[str, str]]]
    """What kohya's scripts and the model spec call each published model in a file's header; under the empty name, what
    is true of all of them."""
    verdicts: ClassVar[Sequence[Verdict]] = ()
    """How other tools read its files; empty: untested."""
    encoders: ClassVar[Sequence[LoraEncoder]] = ()
    """Its text encoders whose layers LoRA files may update."""
    one_alpha: ClassVar[bool] = False
    """Whether diffusers applies the most common alpha of a file in kohya's layout to all attention (0.42.1)."""
    reorders: ClassVar[bool] = False
    """Whether the original layout has some halves in another order (``halves_swapped``)."""
    kohya_blocks: ClassVar[tuple[int, int, int, int, int] | None] = None
    """How many blocks kohya's networks.lora counts before the way down, on it, in the middle, on the way up and after
    it; None: it counts none in this family."""

    def shows(self, name: str, inputs: int) -> int:
        """Return how clearly a name shows that a LoRA is for this family, where others have layers of the same names: 2
        with certainty, 1 by the name alone, 0 not at all.

        Args:
            name: a layer's, or a module's in a file of any layout.
            inputs: the width that it reads; 0 if unknown.
        """
        return 0

    def published(self, shapes: Mapping[str, Shape], roles: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the published model that a LoRA with names of this family is for, and what shows it, for messages;
        None: its shapes are another family's.

        Args:
            shapes: of the file's tensors, by key.
            roles: the role of each key that has one, such as ``DOWN``.
        """
        return self.title, "the names of its layers"

    def caution(self, targets: Collection[str]) -> str | None:
        """Return what is known to be wrong with a file by the modules that its trainer asked for, as PEFT's settings in
        the header have them; None: nothing."""
        return None

    def has_model(self, model: str) -> bool:
        """Return whether a title is the family's or that of one of its published models."""
        return bool(model) and (model == self.title or model in self.header)

    def kernel(self, layer: str, model: str) -> tuple[int, ...]:
        """Return the kernel of a published model's layer (``by_text_width``): (k, k) of a convolution, () if linear."""
        return ()

    def suits(self, config: ModelConfig) -> bool:
        """Return whether ``original`` gives the names that a model of this configuration has."""
        return True

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        """Return diffusers' names of the layers that a file's module updates: one, those that it fuses, or none.

        Args:
            module: the name in the file, without the layout's prefix.
            layout: the file's layout.
        """
        raise NotImplementedError

    def original(self, layer: str) -> tuple[str, Rows | None]:
        """Return the original module of one of diffusers' layers, and which rows of it the layer is; None for all of
        it. Raises KeyError if the family has no such layer."""
        raise NotImplementedError

    def block_numbers(self, config: ModelConfig) -> dict[str, int]:
        """Return the number, among ``kohya_blocks``, of each attention's block, by diffusers' name."""
        return {}

    def halves_swapped(self, layer: str, outputs: int, inputs: int) -> bool:
        """Return whether the halves of a layer's outputs have another order in the original layout."""
        return False


@dataclass(frozen=True)
class Layout:
    """The naming scheme of a kind of file."""

    name: str  # its name in commands and messages
    prefix: str  # the prefix of every key
    names: LoraNames
    original: bool = False  # whether modules have the original names instead of diffusers'
    dots: bool = True  # whether module names contain dots rather than underscores
    peft: bool = True  # whether keys end in ``lora_A`` and ``lora_B`` rather than ``lora_down`` and ``lora_up``
    alpha: bool = False  # whether files state alpha in a tensor for each module

    @property
    def down(self) -> str:
        """Key ending of the first factor, [rank, inputs]."""
        return "lora_A.weight" if self.peft else "lora_down.weight"

    @property
    def up(self) -> str:
        """Key ending of the second factor, [outputs, rank]."""
        return "lora_B.weight" if self.peft else "lora_up.weight"

    def key(self, module: str, role: str) -> str:
        """Return the key of a module's tensor; ``module`` contains dots. Factors but LoRA's end in their names."""
        ending = {DOWN: self.down, UP: self.up}.get(role, role)
        return f"{self.prefix}{self.spelt(module)}.{ending}"

    def module(self, layer: str) -> str:
        """Return the module, with dots, of a layer that has one of its own. Raises KeyError if the family has no such
        layer, and UserError if the module fuses the layer with others, so that no factors but LoRA's can be its own."""
        module, rows = self.place(layer)
        if rows is not None:
            raise UserError(
                f"{layer} is a part of {module} in the layout {self.name}, so this update has no tensors there. "
                "Approximate it by a LoRA: --format kohya --rank 32"
            )
        return module

    def place(self, layer: str) -> tuple[str, Rows | None]:
        """Return the module, with dots, and which rows of it the layer is (None: all). Raises as ``module``."""
        return self.names.original(layer) if self.original else (layer, None)

    def rows(self, layers: Sequence[str]) -> tuple[Rows, ...]:
        """Return which rows of their module each of the layers is that it fuses."""
        return tuple(rows for layer in layers if (rows := self.place(layer)[1]) is not None)

    def spelt(self, module: str) -> str:
        """Return a module's name with this layout's separators; ``module`` contains dots."""
        return module if self.dots else module.replace(".", "_")

    def layers(self, module: str) -> tuple[str, ...]:
        """Return diffusers' names of the layers that a file's module (with its prefix) updates."""
        return self.names.layers(module.removeprefix(self.prefix), self)
