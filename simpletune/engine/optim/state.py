"""A parameter's state as torch keeps it, and what an optimizer may prepare before the updates of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

State = dict[str, Any]
"""A parameter's optimizer state or a group's settings, as in torch: tensors and plain values by name."""


def begin_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer compute what the updates of the next step share; most share nothing and have no such method."""
    prepare = getattr(optimizer, "begin_step", None)
    if prepare is not None:
        prepare()
