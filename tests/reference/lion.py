"""Lion written down from its paper, for tests of steps that are computed otherwise."""

from __future__ import annotations

from torch import Tensor


def lion_step(
    parameter: Tensor, gradient: Tensor, mean: Tensor, lr: float, betas: tuple[float, float], weight_decay: float
) -> tuple[Tensor, Tensor]:
    """One update with decoupled weight decay (arXiv:2302.06675, algorithm 2).

    Returns:
        The parameter and the running mean of the gradient, after the step.
    """
    direction = (betas[0] * mean + (1 - betas[0]) * gradient).sign()
    return parameter - lr * (direction + weight_decay * parameter), betas[1] * mean + (1 - betas[1]) * gradient
