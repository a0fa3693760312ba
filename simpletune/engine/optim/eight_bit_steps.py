"""bitsandbytes' 8-bit optimizers, with a step that only queues work on the device.

Their own step (bitsandbytes 0.50) calls ``torch.cuda.synchronize`` after the update of each parameter. Updates in the
backward pass would then drain the device's queue hundreds of times; copies of offloaded blocks, which the call also
waits for, would no longer overlap with the computation.

Stream order suffices: updates, gradients and weights share the default stream, on which bitsandbytes launches its
kernels and prefetches. Only the host's reads of paged state need to wait (``state_to_tensors``).
"""

from __future__ import annotations

from typing import Any

import bitsandbytes.optim
import torch
from torch._subclasses.fake_tensor import FakeTensor

ENTRIES = 256  # of a table for 8-bit numbers


class QueuedStep:
    """A step for bitsandbytes' optimizers in place of their own; state, arithmetic and order are theirs."""

    @torch.no_grad()
    def step(self: Any, closure: None = None) -> None:  # bitsandbytes has no types
        """Queue the update of every parameter that has a gradient."""
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        for group_number, group in enumerate(self.param_groups):
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.init_state(group, parameter, group_number, number)
                self.prefetch_state(parameter)
                self.update_step(group, parameter, group_number, number)

    def fill_qmap(self: Any) -> None:
        """Make the tables of 8-bit numbers; empty under fake tensors, because computing them would read values."""
        if isinstance(torch.empty(0), FakeTensor):
            self.name2qmap |= {name: torch.empty(ENTRIES) for name in ("dynamic", "udynamic")}
        else:
            super().fill_qmap()  # type: ignore[misc]


class QueuedAdamW8bit(QueuedStep, bitsandbytes.optim.AdamW8bit):
    """AdamW with 8-bit state."""


class QueuedPagedAdamW8bit(QueuedStep, bitsandbytes.optim.PagedAdamW8bit):
    """AdamW with 8-bit state in memory that the driver pages between host and device."""


class QueuedLion8bit(QueuedStep, bitsandbytes.optim.Lion8bit):
    """Lion with 8-bit state."""
