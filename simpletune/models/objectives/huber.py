"""The pseudo-Huber loss: quadratic for small errors, linear for large ones (arXiv:2403.16728)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option

if TYPE_CHECKING:
    from torch import Tensor


class Huber(Option):
    """Pseudo-Huber loss 2 c (sqrt(error^2 + c^2) - c), for robustness against faulty pictures."""

    c: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Error above which the loss is linear rather than quadratic; with a schedule, its value at the highest noise
    level. 0.1 is common."""
    schedule: Literal["constant", "exponential", "snr"] = "snr"
    """How c depends on the noise level (kohya's huber_schedule). constant: not at all; exponential: c falls
    exponentially, from 1 without noise to its value at the highest level; snr: c falls with the signal-to-noise ratio,
    from 1 to its value."""

    def c_at(self, level: Tensor, signal: Tensor) -> Tensor | float:  # [b, 1, 1, 1]
        """Return each sample's c, from its noise level [b] in 0..1 and the signal's share of signal + noise [b]."""
        if self.schedule == "constant":
            return self.c
        levels = self.c**level if self.schedule == "exponential" else (1 - self.c) * signal.square() + self.c
        return levels.view(-1, 1, 1, 1)


def errors(
    prediction: Tensor,  # [b, c, h, w]
    target: Tensor,  # [b, c, h, w]
    c: Tensor | float | None,
) -> Tensor:  # [b, c, h, w], fp32
    """Compute squared errors, or with c their pseudo-Huber form, which approaches them where they are far below c^2."""
    squares = (prediction.float() - target.float()).square()
    if c is None:
        return squares
    # 2 c (sqrt(error^2 + c^2) - c), without subtracting numbers of the same size
    return 2 * c * squares / ((squares + c**2).sqrt() + c)
