"""What families trained by rectified flow do differently: the network's time and sign, and sampling's noise levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from simpletune.models.shared.model_config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def linear_mu(scheduler: ModelConfig, tokens: int, steps: int) -> float:
    """Compute mu, linear in the number of picture tokens (``calculate_shift`` of diffusers' pipelines, from FLUX.1)."""
    rise = scheduler["max_shift"] - scheduler["base_shift"]
    slope = rise / (scheduler["max_image_seq_len"] - scheduler["base_image_seq_len"])
    return tokens * slope + (scheduler["base_shift"] - slope * scheduler["base_image_seq_len"])


def empirical_mu(scheduler: ModelConfig, tokens: int, steps: int) -> float:
    """Compute FLUX.2's mu, linear in tokens at 10 and at 200 steps and in steps between (``compute_empirical_mu`` of
    diffusers' pipelines); the scheduler's configuration, which has values of FLUX.1, does not count."""
    at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    slope = (at_200 - at_10) / 190.0
    return slope * steps + at_200 - 200.0 * slope


class FlowConventions(NamedTuple):
    """What a family's network reads and predicts under the objective ``flow``, and how its pipeline in diffusers spaces
    the noise levels of sampling. The defaults are SD3's."""

    time_at_0: float = 0.0
    """What the network receives as its timestep at sigma 0, where z_t is the picture."""
    time_at_1: float = 1000.0
    """The same at sigma 1, where z_t is the noise; linear between."""
    sign: Literal[1, -1] = 1
    """The network predicts this times the velocity noise - z_0."""
    mu: Callable[[ModelConfig, int, int], float] = linear_mu
    """The logarithm of the shift for a scheduler's configuration with ``use_dynamic_shifting``, a number of picture
    tokens, and a number of steps; without, the shift is the configuration's constant."""
    from_one: bool = False
    """Whether n steps begin, before the shift, with the levels 1, 1 - 1/n, ..., 1/n, or with the scheduler's own."""
    shift: float | None = None
    """The shift of a family whose published models' schedulers tell none, because these are no flows: ``objective``
    begins with it, and sampling takes the objective's. None: the scheduler's configuration tells that of sampling."""

    def time(self, sigma: Tensor) -> Tensor:  # [n] -> [n]
        """Return the network's timestep at a noise level."""
        time = (self.time_at_1 - self.time_at_0) * sigma
        return self.time_at_0 + time if self.time_at_0 else time


USUAL = FlowConventions()
"""Those of a family that states no others."""
