"""A parameter's state as torch keeps it, and what an optimizer may prepare before the updates of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

State = dict[str, Any]
"""A parameter's optimizer state or a group's settings, as in torch: tensors and plain values by name."""


@runtime_checkable
class BeginsSteps(Protocol):
    """An optimizer whose updates of one step share a computation."""

    def begin_step(self) -> None:
        """Prepare for the updates of the next step."""


def begin_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer prepare for the updates of the next step; most have nothing to prepare."""
    if isinstance(optimizer, BeginsSteps):
        optimizer.begin_step()
