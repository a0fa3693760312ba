"""Scale the loss for fp16 products, and undo an update whose scaled gradients overflow, without a host read.

torch.amp.GradScaler reads from the device to skip a step, unless the optimizer skips it itself. Here the scale is
computed by GradScaler's own kernel, and an update is undone on the device: bit for bit, except that step counters on
the host still count the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simpletune.engine.optim.state import State
from simpletune.system.options import Json

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # as in torch.amp.GradScaler
SMALLEST = 1.0
"""A step whose gradients overflow at this scale or less would overflow without scaling, too."""
PORTION = 1 << 22
"""How many elements are updated, and can be undone, together: 48 MiB of copies for AdamW in fp32."""


class LossScale:
    """The scale of the loss, a power of two, on the device of the gradients."""

    def __init__(self, device: torch.device):
        self.scale = torch.full((), INITIAL, device=device)  # fp32 []
        self._grown = torch.zeros((), dtype=torch.int32, device=device)  # steps since the last change
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the last step was undone."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place; exact, and an overflow stays infinite or NaN."""
        torch._foreach_mul_(list(gradients), self.scale.reciprocal())

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer, portion by portion, and undo it if the step overflowed (``update``)."""
        (group,) = optimizer.param_groups
        whole = group["params"]
        try:
            for portion in portions(whole):
                group["params"] = portion
                with undo_if(self.overflow, optimizer, portion):
                    optimizer.step()
        finally:
            group["params"] = whole

    def update(self, norm: Tensor) -> None:
        """Find from the norm of all unscaled gradients whether the step overflows. Halve the scale of the next step if
        it does; double it after ``INTERVAL`` steps without an overflow."""
        self.overflow = ~norm.isfinite()
        torch._amp_update_scale_(self.scale, self._grown, self.overflow.float(), GROWTH, BACKOFF, INTERVAL)

    def state(self) -> Json:
        """Return what a checkpoint stores; read from the device."""
        return {"scale": self.scale.item(), "steps_since_change": self._grown.item()}

    def load(self, state: Json) -> None:
        """Restore what ``state`` returned."""
        self.scale.fill_(float(state["scale"]))
        self._grown.fill_(int(state["steps_since_change"]))


def portions(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split the parameters that have a gradient into lists of at most ``PORTION`` elements, or one parameter."""
    portion: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if portion and size + parameter.numel() > PORTION:
            yield portion
            portion, size = [], 0
        portion.append(parameter)
        size += parameter.numel()
    if portion:
        yield portion


@contextmanager
def undo_if(overflow: Tensor, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Undo, on the device, what an optimizer does to some parameters and their state in this context.

    State that the undone update created keeps the values that zero gradients give it, with a step counter of 0.

    Args:
        overflow: bool [], whether to undo.
        parameters: the only ones that are updated; all must have a gradient, which is zeroed if that is undone.
    """
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.masked_fill_(overflow, 0)
        weights = [(parameter.detach(), parameter.detach().clone()) for parameter in parameters]
        states: list[State] = [optimizer.state[parameter] for parameter in parameters]
        before = [{name: v.clone() for name, v in _device_state(state, overflow.device)} for state in states]
    yield
    with torch.no_grad():
        for weight, old in weights:
            weight.copy_(torch.where(overflow, old, weight))
        for state, earlier in zip(states, before, strict=True):
            for name, value in _device_state(state, overflow.device):
                if name in earlier:
                    value.copy_(torch.where(overflow, earlier[name], value))
                elif name == "step":
                    value.masked_fill_(overflow, 0)


def _device_state(state: State, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a parameter's state on a device, without bitsandbytes' constant tables."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device == device and not name.startswith("qmap"):
            yield name, value
