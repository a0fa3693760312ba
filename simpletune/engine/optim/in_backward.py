"""Run the optimizer in the backward pass: update each parameter as soon as its gradient is ready, and free the
gradient.

At most one layer's gradients are in memory at a time, and those of a few MiB of small parameters (biases, norms), which
wait for each other: updated alone, each would cost as many launches as a large matrix. Exact, except that clipping must
treat each parameter separately, because a global norm needs all gradients at once. PyTorch calls a parameter's hook
once per backward pass, after all its uses have contributed to the gradient and finished with the weight, so the update
may overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from simpletune.engine.optim.loss_scale import LossScale, undo_if
from simpletune.engine.optim.rounding import RoundedOptimizer

if TYPE_CHECKING:
    from simpletune.engine.memory.block_offload import BlockOffload


FEW = 1 << 16
"""Largest number of elements of a parameter that waits for others."""
TOGETHER = 1 << 20
"""Number of elements with which those that wait are updated."""


def clip_each(parameters: Iterable[nn.Parameter], norm: float | None) -> list[Tensor]:
    """Clip each parameter's gradient to a norm separately, unless it is None; return the norms [] from before. Skip
    parameters without a gradient."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sizes = list(torch._foreach_norm(gradients, dtype=torch.float32)) if gradients else []
    if norm is not None and sizes:  # torch.nn.utils.clip_grads_with_norm_'s factors, computed together
        factors = (norm / (torch.stack(sizes) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factors.unbind())
    return sizes


def step_in_backward(
    optimizer: RoundedOptimizer,
    clip_norm: float | None,
    offloaded: BlockOffload | None = None,
    scale: LossScale | None = None,
) -> None:
    """Make the backward pass update the optimizer's parameters; its ``step`` then finds no gradients and does nothing.

    With a scaled loss, a parameter whose gradient overflowed is not updated; the others are.

    Args:
        optimizer: the optimizer, whose ``update`` is called for each large parameter (looked up at each call).
        clip_norm: clip each parameter's gradient to this norm; None disables clipping.
        offloaded: moves parameters that are stored in host memory.
        scale: the loss scale, if the loss is scaled.
    """

    def take(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if scale is not None:
            scale.unscale([gradient])
        norm = optimizer.norms[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([parameter], clip_norm, norm)
        with nullcontext() if offloaded is None else offloaded.updating(parameter, optimizer.state[parameter]):
            with nullcontext() if scale is None else undo_if(~norm.isfinite(), optimizer, [parameter]):
                optimizer.update(parameter)
        parameter.grad = None

    waiting: list[nn.Parameter] = []

    def take_later(parameter: nn.Parameter) -> None:
        if not waiting:
            Variable._execution_engine.queue_callback(take_waiting)  # at the end of this backward pass
        waiting.append(parameter)
        if sum(each.numel() for each in waiting) >= TOGETHER:
            take_waiting()

    def take_waiting() -> None:
        if waiting:
            optimizer.norms.update(zip(waiting, clip_each(waiting, clip_norm), strict=True))
            optimizer.update_together(waiting)
            for parameter in waiting:
                parameter.grad = None
            waiting.clear()

    optimizer.offloading = offloaded
    for parameter in optimizer.param_groups[0]["params"]:
        alone = parameter.numel() > FEW or offloaded is not None or scale is not None
        parameter.register_post_accumulate_grad_hook(take if alone else take_later)
