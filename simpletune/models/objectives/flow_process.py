"""Rectified flow on tensors: noising, target, loss and the estimate of z_0 (arXiv:2403.03206).

Shapes: b samples, c = 16 latent channels, h and w are the latent's height and width (an eighth of the picture's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpletune.models.objectives.huber import Huber, errors

if TYPE_CHECKING:
    from torch import Tensor


class FlowProcess:
    """Rectified flow on tensors; a noise level is sigma in (0, 1).

    Args:
        huber: the pseudo-Huber loss; None: squared errors.
    """

    def __init__(self, huber: Huber | None = None):
        self.huber = huber

    def noised(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """z_t of samples [b, c, h, w] at their levels [b]."""
        return interpolate(z_0, noise, level)

    def target(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """What the network should predict: the velocity."""
        return velocity_target(z_0, noise)

    def loss(self, prediction: Tensor, target: Tensor, level: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean error, weighted by [b, 1, h or 1, w or 1] if given: an fp32 scalar."""
        c = None if self.huber is None else self.huber.c_at(level, 1 - level)
        return flow_loss(prediction, target, weight, c)

    def time(self, level: Tensor) -> Tensor:
        """The timestep that the network receives: 1000 sigma."""
        return timestep_of(level)

    def clean(self, z_t: Tensor, prediction: Tensor, level: Tensor) -> Tensor:
        """Estimate z_0 = z_t - sigma velocity."""
        return z_t - level.view(-1, 1, 1, 1) * prediction


def timestep_of(sigma: Tensor) -> Tensor:
    """The timestep that the transformer receives: 1000 sigma."""
    return 1000.0 * sigma


def interpolate(
    z_0: Tensor,  # [b, c, h, w]
    noise: Tensor,  # [b, c, h, w]
    sigma: Tensor,  # [b]
) -> Tensor:  # [b, c, h, w]
    """z_t = (1 - sigma) z_0 + sigma noise (arXiv:2403.03206, eq. 13)."""
    sigma = sigma.view(-1, 1, 1, 1)
    return (1 - sigma) * z_0 + sigma * noise


def velocity_target(z_0: Tensor, noise: Tensor) -> Tensor:
    """dz_t / dsigma = noise - z_0 (arXiv:2403.03206, section 2)."""
    return noise - z_0


def flow_loss(
    velocity: Tensor, target: Tensor, weight: Tensor | None = None, c: Tensor | float | None = None
) -> Tensor:
    """The mean squared error over all elements in fp32 (with c, the mean pseudo-Huber error), weighted by [b, 1, h or
    1, w or 1] if given."""
    found = errors(velocity, target, c)
    return (found if weight is None else weight * found).mean()
