"""Formulas of the scores, on embeddings in numpy float64, and their intervals.

Pictures of one prompt are not independent, so intervals are over prompts, not pictures; differences from the base are
paired by prompt and seed.

Legend: n generated pictures, m real ones, k pictures of one prompt, d width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simpletune.runs.best_checkpoint import FEWEST
from simpletune.system.options import Json

Array = NDArray[np.float64]
Kernel = Callable[[Array, Array], Array]

SIGMA, CMMD_SCALE = 10.0, 1000.0
"""Bandwidth of CMMD's kernel, and the factor by which its paper scales it (arXiv:2401.09603, section 4)."""
NORMAL = 1.959964
"""Standard errors on each side of a mean that cover 95% of a normal distribution."""


def unit(features: Array) -> Array:  # [n, d] -> [n, d]
    lengths = np.linalg.norm(features, axis=-1, keepdims=True)
    if not lengths.all():
        raise ValueError(f"{int((lengths == 0).sum())} of {len(features)} embeddings are zero and have no direction")
    return np.asarray(features / lengths)


def subject_fidelity(generated: Array, real: Array) -> Array:  # [n, d], [m, d] -> [n]
    """Compute each generated picture's mean cosine with all real ones: DINO or CLIP-I (arXiv:2208.12242, sec. 4.2)."""
    return np.asarray((unit(generated) @ unit(real).T).mean(axis=1))


def prompt_fidelity(generated: Array, prompts: Array) -> Array:  # [n, d], [n, d] -> [n]
    """Compute the cosine of each picture with its own prompt; its mean is CLIP-T (arXiv:2208.12242, section 4.2)."""
    return np.asarray((unit(generated) * unit(prompts)).sum(axis=-1))


def diversity(generated: Array) -> float:  # [k, d]
    """Compute 1 - the mean cosine of all pairs of pictures of one prompt; 0 if they are identical."""
    count = len(generated)
    if count < 2:
        raise ValueError(f"diversity of {count} picture: at least 2 are needed")
    cosines = unit(generated) @ unit(generated).T
    return float(1.0 - (cosines.sum() - np.trace(cosines)) / (count * (count - 1)))


def nearest_similarity(generated: Array, real: Array) -> Array:  # [n, d], [m, d] -> [n]
    """Compute the cosine of each generated picture with the most similar real one."""
    return np.asarray((unit(generated) @ unit(real).T).max(axis=1))


def find_copies(generated: Array, real: Array) -> Array:  # [n, d], [m, d] -> [n] of 0 and 1
    """Return whether each generated picture is more similar to a real one than any two real ones are to each other."""
    if len(real) < 2:
        raise ValueError(f"nearest neighbours of {len(real)} picture: at least 2 are needed")
    cosines = unit(real) @ unit(real).T
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(nearest_similarity(generated, real) > float(cosines.max()), dtype=np.float64)


def cubic(x: Array, y: Array) -> Array:  # [n, d], [m, d] -> [n, m]
    """Compute KID's kernel, (x y / d + 1)^3 (arXiv:1801.01401, section 4)."""
    return np.asarray((x @ y.T / x.shape[1] + 1.0) ** 3)


def gaussian(x: Array, y: Array) -> Array:  # [n, d], [m, d] -> [n, m]
    """Compute CMMD's kernel, exp(-|x - y|^2 / (2 sigma^2)), on unit embeddings (arXiv:2401.09603, section 4)."""
    x, y = unit(x), unit(y)
    squares = np.maximum((x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2.0 * x @ y.T, 0.0)
    return np.asarray(np.exp(-squares / (2.0 * SIGMA**2)))


def mmd(x: Array, y: Array, kernel: Kernel, unbiased: bool) -> float:  # [n, d], [m, d]
    """Compute the squared maximum mean discrepancy of two sets (Gretton et al. 2012, eq. 3 and 5).

    Unbiased leaves out the pairs of a picture with itself: equal distributions then give 0 on average, sometimes less.
    Otherwise equal sets give exactly 0, but small sets from one distribution a value above 0.
    """
    least = 2 if unbiased else 1
    if min(len(x), len(y)) < least:
        raise ValueError(f"distance of sets of {len(x)} and {len(y)}: at least {least} pictures each are needed")

    def mean(values: Array) -> float:
        count = len(values)
        return float((values.sum() - np.trace(values)) / (count * (count - 1)) if unbiased else values.mean())

    return float(sum(mean(kernel(each, each)) for each in (x, y)) - 2.0 * kernel(x, y).mean())


def kid(generated: Array, real: Array) -> float:
    """Compute KID's unbiased kernel distance over all pictures at once; with Inception's features it is KID."""
    return mmd(generated, real, cubic, unbiased=True)


def cmmd(generated: Array, real: Array) -> float:
    """Compute CMMD's distance x 1000, for any encoder; with CLIP ViT-L/14 at 336 px it is CMMD."""
    return CMMD_SCALE * mmd(generated, real, gaussian, unbiased=False)


@dataclass(frozen=True)
class ScoreInterval:
    """A value with its uncertainty over prompts."""

    value: float  # the mean, or the distance of two sets
    low: float | None  # lower end of the 95% interval; None for fewer than FEWEST prompts
    high: float | None  # upper end
    error: float | None  # standard error; None for a single prompt

    def as_json(self) -> Json:
        named = {"value": self.value, "low": self.low, "high": self.high, "error": self.error}
        return {name: None if each is None else round(each, 6) for name, each in named.items()}


def t_quantile(freedom: int) -> float:
    """Compute the 97.5% point of Student's t, by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5); within
    0.001 from 4 degrees of freedom on. A mean of n prompts has n - 1."""
    z, v = NORMAL, freedom
    return z + (
        (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def _interval(value: float, error: float, prompts: int) -> ScoreInterval:
    if prompts < FEWEST:
        return ScoreInterval(value, None, None, error)
    half = t_quantile(prompts - 1) * error
    return ScoreInterval(value, value - half, value + half, error)


def mean_over_prompts(values: Sequence[float] | Array) -> ScoreInterval:  # one mean for each prompt
    """Average prompts, with the standard error of the mean and an interval by Student's t."""
    each = np.asarray(values, dtype=np.float64)
    if not len(each):
        raise ValueError("a mean of no prompts")
    if len(each) == 1:
        return ScoreInterval(float(each[0]), None, None, None)
    return _interval(float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each))), len(each))


def jackknife(statistic: Callable[[Sequence[int]], float], prompts: int, interval: bool = True) -> ScoreInterval:
    """Compute a statistic of all pictures, and its interval by leaving out one prompt at a time (jackknife).

    A bootstrap would repeat pictures, and duplicates change a distance between sets.
    """
    everyone = range(prompts)
    value = statistic(everyone)
    if prompts < 3 or not interval:
        return ScoreInterval(value, None, None, None)
    without = np.array([statistic([other for other in everyone if other != left]) for left in everyone])
    error = float(np.sqrt((prompts - 1) / prompts * ((without - without.mean()) ** 2).sum()))
    return _interval(value, error, prompts)
