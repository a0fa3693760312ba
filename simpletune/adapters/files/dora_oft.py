"""Updates that depend on the weight they change: DoRA and OFT. Without the weight they have no matrix to add.

Shapes: o outputs, i inputs, r rank, k blocks of d outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from simpletune.adapters.files.module_kind import DORA, OFT
from simpletune.adapters.files.updates import LoraUpdate, Update, split
from simpletune.adapters.methods.dora_layers import DoraLayer
from simpletune.adapters.methods.layers import UpdateLayer, innermost_layer, shape_of
from simpletune.adapters.methods.oft_layer import OftLayer, named_blocks, triangle_of, turned_rows
from simpletune.engine.tensors import exchanged_halves
from simpletune.models.shared.lora_names import DORA_SCALE, MAGNITUDE, Layout, LoraNames
from simpletune.system.options import UserError


@dataclass(frozen=True)
class DoraUpdate(Update):
    """DoRA's weight, m (W + s B A) / ||W + s B A||, by rows.

    Args:
        update: s B A.
        magnitude: m [o], or None if the file contains only ``relative``.
        relative: m ||W|| / ||W + s B A|| [o], which is applied without the norm of the sum: ``dora_scale`` as made for
            ComfyUI.
    """

    update: LoraUpdate
    magnitude: Tensor | None = None
    relative: Tensor | None = None
    kind: ClassVar[str] = DORA

    @property
    def shape(self) -> tuple[int, int]:
        """As for ``Update``."""
        return self.update.shape

    @property
    def rank(self) -> int:
        """r."""
        return self.update.rank

    @property
    def scale(self) -> float:
        """s."""
        return self.update.scale

    @property
    def pointwise(self) -> bool:
        """As for ``Update``."""
        return self.update.pointwise

    def difference(self, weight: Tensor) -> Tensor:  # fp32 [o, i] -> [o, i]
        """Return W' - W for a weight."""
        turned = weight + self.update.delta()
        if self.magnitude is not None:
            gain = _ratio(self.magnitude, turned.norm(dim=1))
        else:
            assert self.relative is not None
            gain = _ratio(self.relative, weight.norm(dim=1))
        return gain[:, None] * turned - weight

    def layer(self, base: nn.Module, adapter: str) -> UpdateLayer:
        """As for ``Update``; the norms are fixed."""
        layer = DoraLayer(base, self.rank, self.scale, adapter=adapter)
        with torch.no_grad():
            layer.lora_A.weight.copy_(self.update.down)
            layer.lora_B.weight.copy_(self.update.up)
            if self.magnitude is not None:
                layer.magnitude.copy_(self.magnitude)
            else:
                assert self.relative is not None
                own = layer.magnitude.detach().clone()  # ||W||
                layer.magnitude.copy_(_ratio(self.relative.to(own.device) * layer.exact_norms(), own))
        layer.settle()
        return layer

    def parts(self, count: int) -> list[DoraUpdate]:
        """Return the updates of the layers that a fused one stacks."""
        parts: Sequence[LoraUpdate | None] = split(self.update, count)
        whole = [replace(self.update, up=up.contiguous()) for up in self.update.up.chunk(count)]
        vectors = [[None] * count if v is None else v.chunk(count) for v in (self.magnitude, self.relative)]
        return [
            DoraUpdate(part or other, *two) for part, other, *two in zip(parts, whole, *vectors, strict=True)
        ]  # fmt: skip

    def swapped(self) -> DoraUpdate:
        """As for ``Update``."""
        vectors = (None if v is None else exchanged_halves(v) for v in (self.magnitude, self.relative))
        return DoraUpdate(self.update.swapped(), *vectors)


@dataclass(frozen=True)
class OftUpdate(Update):
    """OFT's weight R W, with a block-diagonal orthogonal R on the outputs.

    Args:
        blocks: [k, d, d]; only B - B^T matters.
        original: the layer's name and its family's names if the blocks are in the order of the original layout, which
            may swap halves; the blocks alone do not tell.
    """

    blocks: Tensor
    original: tuple[str, LoraNames] | None = None
    kind: ClassVar[str] = OFT

    @property
    def shape(self) -> tuple[int, int]:
        """(o, 0): the blocks do not tell the inputs."""
        return self.blocks.shape[0] * self.blocks.shape[1], 0

    @property
    def rank(self) -> int:
        """As for ``Update``."""
        return self.shape[0]

    @property
    def dim(self) -> None:
        """None: readers do not scale the blocks by alpha."""

    def difference(self, weight: Tensor) -> Tensor:  # fp32 [o, i] -> [o, i]
        """Return (R - I) W."""
        return turned_rows(weight, self._triangle(weight.shape[1]))

    def layer(self, base: nn.Module, adapter: str) -> UpdateLayer:
        """As for ``Update``."""
        shape = shape_of(innermost_layer(base))
        assert shape is not None
        return OftLayer(base, self._triangle(shape[1]), adapter)

    def swapped(self) -> OftUpdate:
        """Return the update itself, which records its order."""
        return self

    def _triangle(self, inputs: int) -> Tensor:
        """Return the entries above the diagonal of the skew-symmetric blocks, in diffusers' order."""
        blocks = self.blocks.float()
        if self.original is not None and self.original[1].halves_swapped(self.original[0], self.shape[0], inputs):
            blocks = exchanged_halves(blocks)
        return triangle_of(blocks)


MERGE = "Merge it into its base with simpletune merge"


def limit_blocks(blocks: Tensor, alpha: float | None) -> Tensor:
    """Scale OFT's blocks so that ||B - B^T|| is at most alpha, as ComfyUI does; unchanged if alpha is None or 0."""
    norm = float((blocks - blocks.transpose(1, 2)).norm())
    return blocks * (alpha / norm) if alpha and norm > alpha > 0 else blocks


def _ratio(value: Tensor, norms: Tensor) -> Tensor:
    """Divide by norms; 0 for rows of zeros."""
    return value / torch.where(norms > 0, norms, torch.inf)


def magnitudes_of(updates: Mapping[str, DoraUpdate], layout: Layout) -> dict[str, Tensor]:
    """Return the tensors by which tools scale the updated rows, by key; in fp32, because rounding them changes whole
    rows.

    ``lora_magnitude_vector`` is for diffusers, which reads only its own layout; ``dora_scale`` is for ComfyUI. A file
    gets both if both are known.

    Raises:
        UserError: the update lacks what this layout needs, or is only part of a fused q, k, v.
    """
    for layer, update in updates.items():
        if layout.alpha and update.relative is None:
            raise UserError(
                f"{layer} has a magnitude but no norm of its base's rows, which ComfyUI's dora_scale needs. {MERGE}"
            )
        if not layout.alpha and update.magnitude is None:
            raise UserError(f"{layer} has only ComfyUI's dora_scale, which diffusers cannot apply. {MERGE}")
    tensors: dict[str, Tensor] = {}
    scales = {layer: update.relative for layer, update in updates.items() if update.relative is not None}
    exchanged = {layer for layer, update in updates.items() if layout.names.halves_swapped(layer, *update.shape)}
    for layer in exchanged & scales.keys():  # rows are in ComfyUI's order, whatever the names
        scales[layer] = exchanged_halves(scales[layer])
    for module, vector in _named(scales, layout).items():
        sides = (1, 1, 1) if module in updates and updates[module].pointwise else (1,)
        tensors[layout.key(module, DORA_SCALE)] = vector.float().view(-1, *sides).clone()
    magnitudes = {layer: update.magnitude for layer, update in updates.items() if update.magnitude is not None}
    for layer in exchanged & magnitudes.keys() if layout.original else ():
        magnitudes[layer] = exchanged_halves(magnitudes[layer])
    tensors |= {layout.key(k, MAGNITUDE): v.float().clone() for k, v in _named(magnitudes, layout).items()}
    return tensors


def _named(vectors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return vectors by the layout's modules; under the original names, those of q, k and v are stacked."""
    if not layout.original:
        return dict(vectors)
    found: dict[str, Tensor] = {}
    thirds: dict[str, dict[int, Tensor]] = {}
    for layer, vector in vectors.items():
        module, third = layout.names.original(layer)
        if third is not None:
            thirds.setdefault(module, {})[third] = vector
        else:
            found[module] = vector
    for module, parts in thirds.items():
        if len(parts) < 3:
            raise UserError(
                f"{module} fuses q, k and v, and this DoRA has {len(parts)} of them; the norms of the others' rows are "
                "unknown. Use --format diffusers, which ComfyUI reads too"
            )
        found[module] = torch.cat([parts[number] for number in range(3)])
    return found


def blocks_of(updates: Mapping[str, OftUpdate], layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of an OFT file by key.

    Raises:
        UserError: ComfyUI would rotate the wrong rows under this layout's names, or the update was read from such a
            layout.
    """
    for layer, update in updates.items():
        if not layout.alpha or layout.original != (update.original is not None):
            raise UserError(f"{layer} is OFT, which ComfyUI reads only under its own names. Use --format kohya")
    return named_blocks({layer: update.blocks for layer, update in updates.items()}, layout)
