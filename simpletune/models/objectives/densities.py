"""Densities of a noise level in (0, 1) as quantile functions, in float64. One function serves random draws, the fixed
levels of the evaluation, and the part of a density between two levels.

``quantile(q)`` is the level below which a share q of the levels lies, ``cdf(x)`` the share of levels below x. Every
density is positive within (0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

SMALLEST = 2.0**-54
"""Quantiles are clamped this far from 0 and 1, where a level would not lie within (0, 1)."""
STEEPEST = 2 / (math.pi - 2)
"""The largest ``Mode.scale`` for which the quantile function still rises everywhere."""


@dataclass(frozen=True)
class Uniform:
    """All levels are equally probable."""

    def quantile(self, q: float) -> float:
        return q

    def cdf(self, x: float) -> float:
        return x


@dataclass(frozen=True)
class LogitNormal:
    """The logit log(x / (1 - x)) is normal (arXiv:2403.03206, eq. 19)."""

    mean: float
    std: float

    def quantile(self, q: float) -> float:
        return 1.0 / (1.0 + math.exp(-NormalDist(self.mean, self.std).inv_cdf(q)))

    def cdf(self, x: float) -> float:
        if x <= 0 or x >= 1:
            return float(x >= 1)
        return NormalDist(self.mean, self.std).cdf(math.log(x / (1 - x)))


@dataclass(frozen=True)
class Mode:
    """Mode sampling with heavy tails (arXiv:2403.03206, eq. 20): favours the middle without making any level rare."""

    scale: float  # s, from -1 to ``STEEPEST``: below 0 the middle is thinned out, 0 is uniform, above 0 it is favoured

    def quantile(self, q: float) -> float:
        """Compute f(u) = 1 - u - s (cos^2(pi u / 2) - 1 + u) at u = 1 - q."""
        return q - self.scale * (math.sin(math.pi * q / 2) ** 2 - q)

    def cdf(self, x: float) -> float:
        return float(x >= 1) if x <= 0 or x >= 1 else inverse(self.quantile, x)


@dataclass(frozen=True)
class CosMap:
    """Levels with the signal-to-noise ratios of the cosine schedule (arXiv:2403.03206, eq. 21)."""

    def quantile(self, q: float) -> float:
        return 1.0 - 1.0 / (math.tan(math.pi * q / 2) + 1.0)

    def cdf(self, x: float) -> float:
        return 2 / math.pi * math.atan2(x, 1 - x)


@dataclass(frozen=True)
class Beta:
    """The Beta distribution: x^(alpha - 1) (1 - x)^(beta - 1), normalised."""

    alpha: float
    beta: float

    def quantile(self, q: float) -> float:
        return inverse(self.cdf, q)

    def cdf(self, x: float) -> float:
        """Compute the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22), which converges
        fast below the mean; above it, by symmetry."""
        if x <= 0 or x >= 1:
            return float(x >= 1)
        a, b = self.alpha, self.beta
        if x > (a + 1) / (a + b + 2):
            return 1.0 - Beta(b, a).cdf(1 - x)
        logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
        fraction = 1.0
        for m in range(40, 0, -1):  # from the innermost term outward
            even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
            odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
            fraction = 1.0 + odd / (1.0 + even / fraction)
        return math.exp(logarithm) / (a * fraction)


Density: TypeAlias = Uniform | LogitNormal | Mode | CosMap | Beta


def inverse(rising: Callable[[float], float], y: float) -> float:
    """Find x in [0, 1] with rising(x) = y, by bisection to the last bits."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high and high - low > 1e-16:
        low, high = (middle, high) if rising(middle) < y else (low, middle)
    return (low + high) / 2


def between(density: Density, q: float, low: float, high: float) -> float:
    """Return the quantile q of a density restricted to the range between two levels, where it keeps its shape."""
    first, last = density.cdf(low), density.cdf(high)
    q = min(max(first + q * (last - first), SMALLEST), 1 - SMALLEST)
    return min(max(density.quantile(q), low), high)
