"""Means with intervals over prompts, and differences from the base paired by prompt and seed.

Pictures of one prompt are not independent, so prompts are resampled, not pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simpletune.commands.evaluate.scores import Array
from simpletune.system.options import Json

LEVEL, RESAMPLES, SEED = 0.95, 2000, 24
NORMAL = 1.959964
"""Standard errors on each side of a mean that cover 95% of a normal distribution."""


@dataclass(frozen=True)
class ScoreInterval:
    """A value with its uncertainty over prompts.

    Args:
        value: the mean, or the distance of two sets.
        low: lower end of the 95% interval; None for a single prompt.
        high: upper end.
        error: standard error; None for a single prompt.
    """

    value: float
    low: float | None
    high: float | None
    error: float | None

    def as_json(self) -> Json:
        """Return the fields in `evaluation.json`."""
        named = {"value": self.value, "low": self.low, "high": self.high, "error": self.error}
        return {name: None if each is None else round(each, 6) for name, each in named.items()}


@lru_cache(maxsize=8)
def resamples(prompts: int) -> NDArray[np.int64]:  # [RESAMPLES, prompts]
    """Draw prompts with replacement; the same draws for every score and every point."""
    return np.random.default_rng([SEED, prompts]).integers(0, prompts, (RESAMPLES, prompts))


def mean_over_prompts(values: Sequence[float] | Array) -> ScoreInterval:  # one mean for each prompt
    """Bootstrap the mean of prompts: a percentile interval, and the standard error of the mean.

    Raises:
        ValueError: there is no prompt.
    """
    each = np.asarray(values, dtype=np.float64)
    if not len(each):
        raise ValueError("a mean of no prompts")
    if len(each) == 1:
        return ScoreInterval(float(each[0]), None, None, None)
    means = each[resamples(len(each))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return ScoreInterval(float(each.mean()), float(low), float(high), float(each.std(ddof=1) / np.sqrt(len(each))))


def over_sets(statistic: Callable[[Sequence[int]], float], prompts: int, interval: bool = True) -> ScoreInterval:
    """Compute a statistic of all pictures, and its interval by leaving out one prompt at a time (jackknife).

    A bootstrap would repeat pictures, and duplicates change a distance between sets.

    Args:
        statistic: computes the value from the prompts with these indices.
        prompts: number of prompts.
        interval: whether the statistic is defined with any one prompt left out.
    """
    everyone = range(prompts)
    value = statistic(everyone)
    if prompts < 3 or not interval:
        return ScoreInterval(value, None, None, None)
    without = np.array([statistic([other for other in everyone if other != left]) for left in everyone])
    error = float(np.sqrt((prompts - 1) / prompts * ((without - without.mean()) ** 2).sum()))
    return ScoreInterval(value, value - NORMAL * error, value + NORMAL * error, error)
