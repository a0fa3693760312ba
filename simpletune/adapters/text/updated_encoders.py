"""Text encoders with updated weights, and with replaced rows in their token embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simpletune.adapters.files.updates import Update
from simpletune.adapters.text.side import AppliedText, LayerUpdates
from simpletune.models.shared.t5_layers import EMBEDDINGS, Tensors
from simpletune.system.options import UserError, join_names


class UpdatedT5Tensors:
    """A T5 encoder's tensors with updates, and with additional rows at the end of its token table.

    Args:
        tensors: the encoder's own tensors.
        updates: the updates by layer.
        rows: the additional rows, [d] each.
    """

    def __init__(
        self,
        tensors: Tensors,
        updates: LayerUpdates,
        rows: Sequence[Tensor],
    ):
        self.tensors, self.updates, self.rows, self.tables = tensors, updates, rows, EMBEDDINGS
        if lost := [layer for layer in updates if f"{layer}.weight" not in tensors.shapes]:
            raise UserError(f"T5 has no layer {join_names(lost, 3)}, which {updates[lost[0]][0][1].name} updates")

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the encoder's own tensors."""
        return self.tensors.shapes

    def get(self, name: str) -> Tensor:
        """Read one tensor on the host."""
        tensor = self.tensors.get(name)
        if name in self.tables and self.rows:
            return torch.cat([tensor, torch.stack(list(self.rows)).to(tensor.dtype)])
        layer = name.removesuffix(".weight")
        return _changed(layer, tensor, self.updates[layer]) if layer in self.updates else tensor


@contextmanager
def replaced_rows(table: nn.Module, rows: Mapping[int, Tensor]) -> Iterator[None]:
    """Replace rows of a token table's output for one prompt."""

    def replace_rows(module: nn.Module, inputs: object, output: Tensor) -> Tensor:  # [1, L, d]
        changed = output.clone()
        for row, vector in rows.items():
            changed[0, row] = vector.to(changed.device, changed.dtype)
        return changed

    handle = table.register_forward_hook(replace_rows)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def add_updates(clip: nn.Module, updates: LayerUpdates, encoder: str) -> None:
    """Add updates to a CLIP encoder's weights, in fp32, rounded once to their type."""
    layers = dict(clip.named_modules())
    for name, each in updates.items():
        layer = layers.get(name) or layers.get(name.removeprefix("text_model."))
        if not isinstance(layer, nn.Linear):
            raise UserError(f"{each[0][1].name}: {encoder} has no layer {name}. The LoRA belongs to another model")
        layer.weight.copy_(_changed(f"{name} of {encoder}", layer.weight, each))


def _changed(layer: str, weight: Tensor, updates: Sequence[tuple[Update, AppliedText]]) -> Tensor:
    """A weight with its updates, in its own type."""
    exact = weight.detach().float()
    changed = exact.clone()
    for update, lora in updates:
        if not update.fits(exact.shape):
            outputs, inputs = update.shape
            raise UserError(
                f"{lora.name}: {layer} has {inputs} inputs and {outputs} outputs; this model has {exact.shape[1]} and "
                f"{exact.shape[0]}. It belongs to another model"
            )
        changed += lora.strength * update.difference(exact).to(exact.device)
    return changed.to(weight.dtype)
