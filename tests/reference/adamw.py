"""AdamW written down from its paper, for tests of steps that are computed otherwise."""

from __future__ import annotations

from torch import Tensor


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    means: tuple[Tensor, Tensor],
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One update with decoupled weight decay (arXiv:1711.05101, algorithm 2); steps count from 1.

    Returns:
        The parameter and the running means of the gradient and of its square, after the step.
    """
    m = betas[0] * means[0] + (1 - betas[0]) * gradient
    v = betas[1] * means[1] + (1 - betas[1]) * gradient**2
    m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    return parameter - lr * (m_hat / (v_hat**0.5 + eps) + weight_decay * parameter), m, v
