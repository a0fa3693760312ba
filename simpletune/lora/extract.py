"""A LoRA from two checkpoints: the singular value decomposition of their difference, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from simpletune.lora.bases import Base
from simpletune.lora.factors import rank_for, truncated
from simpletune.lora.updates import Update
from simpletune.options import UserError, shortened


@dataclass
class LayerResult:
    """One layer of an extraction.

    Args:
        layer: diffusers' name.
        rank: kept.
        norm: Frobenius norm of the difference.
        residual: Frobenius norm of what the update leaves out.
    """

    layer: str
    rank: int
    norm: float
    residual: float

    @property
    def relative(self) -> float:
        """residual / norm."""
        return self.residual / self.norm


@dataclass
class Extracted:
    """What came of an extraction.

    Args:
        updates: by layer, fp32.
        rows: one a layer.
        left_out: tensors that differ and that no LoRA can hold (biases, norms, convolutions), with the norm of the
            difference.
    """

    updates: dict[str, Update] = field(default_factory=dict)
    rows: list[LayerResult] = field(default_factory=list)
    left_out: dict[str, float] = field(default_factory=dict)

    @property
    def relative(self) -> float:
        """The residual of all linear layers together, relative to their difference."""
        whole = sum(row.norm**2 for row in self.rows)
        return (sum(row.residual**2 for row in self.rows) / whole) ** 0.5 if whole else 0.0

    @property
    def left_out_share(self) -> float:
        """The norm of what no LoRA can hold, relative to the whole difference."""
        others = sum(norm**2 for norm in self.left_out.values())
        whole = others + sum(row.norm**2 for row in self.rows)
        return (others / whole) ** 0.5 if whole else 0.0


def extract(
    base: Base,
    tuned: Base,
    rank: int | None,
    energy: float | None,
    device: torch.device,
    done: Callable[[], None] = lambda: None,
) -> Extracted:
    """The LoRA that comes nearest to TUNED - BASE at a rank, in every linear layer that differs.

    Args:
        base: the checkpoint to which the LoRA will be applied.
        tuned: the fine-tuned one.
        rank: at most so much a layer; None: as much as ``energy`` takes, or all.
        energy: the share of squared singular values to keep in each layer; None: all that ``rank`` allows.
        device: where the decompositions are computed.
        done: called after each tensor.

    Raises:
        UserError: the two are not the same model, or do not differ.
    """
    _require_same(base, tuned)
    found = Extracted()
    linears = base.linear_shapes()
    for name in sorted(base.shapes):
        difference = tuned.get(name).to(device, torch.float32) - base.get(name).to(device, torch.float32)
        norm = float(difference.double().norm())
        layer = name.removesuffix(".weight")
        if norm > 0 and name != layer and layer in linears:
            u, s, vt = torch.linalg.svd(difference, full_matrices=False)
            kept = rank_for(s, rank, energy)
            found.updates[layer] = _on_host(truncated(u, s, vt, kept))
            found.rows.append(LayerResult(layer, kept, norm, float(s[kept:].double().square().sum().sqrt())))
        elif norm > 0:
            found.left_out[name] = norm
        done()
    if not found.updates:
        raise UserError(f"{base.name} and {tuned.name} do not differ in any linear layer: there is nothing to extract")
    return found


def _on_host(update: Update) -> Update:
    return Update(update.down.cpu(), update.up.cpu())


def _require_same(base: Base, tuned: Base) -> None:
    """Names and shapes of both."""
    for problem in _differences(base, tuned):
        raise UserError(f"{base.name} and {tuned.name} are not the same model: {problem}")


def _differences(base: Base, tuned: Base) -> Iterator[str]:
    for one, other in ((base, tuned), (tuned, base)):
        if lost := sorted(set(one.shapes) - set(other.shapes)):
            yield f"{other.name} has no {shortened(lost, 5)}"
    for name, shape in base.shapes.items():
        if tuned.shapes[name] != shape:
            yield f"{name} is {list(shape)} in one and {list(tuned.shapes[name])} in the other"
