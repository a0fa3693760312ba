"""Extract a LoRA from two checkpoints by a singular value decomposition of their difference, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from simpletune.adapters.files.base_reader import BaseReader
from simpletune.adapters.files.factors import rank_for, truncate
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.models.lora_registry import is_convolution
from simpletune.system.options import UserError, join_names


@dataclass
class LayerResult:
    """One layer of an extraction: the update's rank, and the Frobenius norms of the difference and of the part that the
    update omits."""

    layer: str
    rank: int
    norm: float
    residual: float

    @property
    def relative(self) -> float:
        """residual / norm."""
        return self.residual / self.norm


@dataclass
class ExtractionResult:
    """Updates in fp32 by layer, one result per layer, and tensors that differ but that have no update (biases, norms,
    unless wanted also convolutions), with the norm of the difference."""

    updates: dict[str, LoraUpdate] = field(default_factory=dict)
    rows: list[LayerResult] = field(default_factory=list)
    left_out: dict[str, float] = field(default_factory=dict)

    @property
    def relative(self) -> float:
        """The residual of all linear layers together, relative to their difference."""
        whole = sum(row.norm**2 for row in self.rows)
        return (sum(row.residual**2 for row in self.rows) / whole) ** 0.5 if whole else 0.0


def extract(
    base: BaseReader,
    tuned: BaseReader,
    rank: int | None,
    energy: float | None,
    device: torch.device,
    done: Callable[[], None] = lambda: None,
    conv_rank: int | None = None,
) -> ExtractionResult:
    """Compute the best approximation of TUNED - BASE at a rank, for every linear layer and 1x1 convolution, and with
    ``conv_rank`` for larger convolutions that can have an update.

    ``rank`` and ``conv_rank`` are the largest rank of a layer, ``energy`` the fraction of squared singular values to
    keep in each. Calls ``done`` after each tensor. Raises UserError if the checkpoints have different architectures, or
    do not differ.
    """
    _require_same(base, tuned)
    found = ExtractionResult()
    weights = base.weight_shapes()
    for name in sorted(base.shapes):
        difference = tuned.get(name).to(device, torch.float32) - base.get(name).to(device, torch.float32)
        norm = float(difference.double().norm())
        layer = name.removesuffix(".weight")
        kernel = tuple(difference.shape[2:])
        most = rank if math.prod(kernel) == 1 else conv_rank
        wanted = math.prod(kernel) == 1 or conv_rank is not None and is_convolution(layer)
        if norm > 0 and name != layer and layer in weights and wanted:
            u, s, vt = torch.linalg.svd(difference.flatten(1), full_matrices=False)
            kept = rank_for(s, most, energy)
            best = truncate(u, s, vt, kept)
            found.updates[layer] = LoraUpdate(best.down.cpu(), best.up.cpu(), kernel=kernel)
            found.rows.append(LayerResult(layer, kept, norm, float(s[kept:].double().square().sum().sqrt())))
        elif norm > 0:
            found.left_out[name] = norm
        done()
    if not found.updates:
        spatial = any(is_convolution(name.removesuffix(".weight")) for name in found.left_out)
        raise UserError(
            f"{base.name} and {tuned.name} do not differ in any linear layer: there is nothing to extract. "
            + ("Give --conv-rank for their convolutions" if spatial else "Give a base and a fine-tuned checkpoint")
        )
    return found


def _require_same(base: BaseReader, tuned: BaseReader) -> None:
    """Check that both have the same names and shapes."""
    problems = [
        f"{other.name} has no {join_names(lost, 5)}"
        for one, other in ((base, tuned), (tuned, base))
        if (lost := sorted(set(one.shapes) - set(other.shapes)))
    ]
    problems = problems or [
        f"{name} is {list(shape)} in one and {list(tuned.shapes[name])} in the other"
        for name, shape in base.shapes.items()
        if tuned.shapes[name] != shape
    ]
    if problems:
        raise UserError(f"{base.name} and {tuned.name} have different architectures: {problems[0]}")
