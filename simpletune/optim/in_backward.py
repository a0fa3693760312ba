"""The optimizer in the backward pass: a parameter is updated, and its gradient freed, as soon as that is ready.

Gradients then never stand together in memory: at most those of one layer do. Exact, but for clipping, which needs all
gradients at once unless each parameter's is clipped by itself. PyTorch calls a parameter's hook once in a backward
pass, after all its uses have added to the gradient and been done with the weight, so the update may write over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from simpletune.optim.optimizer import State
from simpletune.optim.rounding import RoundedOptimizer


def clip_each(parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Scale each parameter's gradient down to a norm, by itself; parameters without one are left alone."""
    for parameter in parameters:
        if parameter.grad is not None:
            torch.nn.utils.clip_grad_norm_([parameter], norm)


class Streaming(Protocol):
    """What brings parameters to the device and takes them home."""

    def updating(self, parameter: nn.Parameter, state: State) -> AbstractContextManager[None]:
        """Around the update of one parameter, whose optimizer state it brings and takes home."""


def step_in_backward(optimizer: RoundedOptimizer, clip_norm: float | None, streamed: Streaming | None = None) -> None:
    """Let the backward pass update the optimizer's parameters; its ``step`` then finds no gradient and does nothing.

    Args:
        optimizer: whose ``update`` is called for each parameter that has got its gradient, and looked up at each call.
        clip_norm: each parameter's gradient is scaled down to this norm; None: not clipped.
        streamed: where parameters live in host memory, what brings them in.
    """

    def take(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        optimizer.norms[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if clip_norm is not None:
            clip_each([parameter], clip_norm)
        with nullcontext() if streamed is None else streamed.updating(parameter, optimizer.state[parameter]):
            optimizer.update(parameter)
        parameter.grad = None

    for parameter in optimizer.param_groups[0]["params"]:
        parameter.register_post_accumulate_grad_hook(take)
