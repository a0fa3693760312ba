"""The scores' formulas, over embeddings in numpy float64.

Legend: n generated pictures, m real ones, k pictures of one prompt, d width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kernel = Callable[[Array, Array], Array]

SIGMA, CMMD_SCALE = 10.0, 1000.0
"""Bandwidth of CMMD's kernel, and the factor that its paper prints it with (arXiv:2401.09603, section 4)."""


def unit(features: Array) -> Array:  # [n, d] -> [n, d]
    """Scale embeddings to length 1.

    Raises:
        ValueError: one is zero.
    """
    lengths = np.linalg.norm(features, axis=-1, keepdims=True)
    if not lengths.all():
        raise ValueError(f"{int((lengths == 0).sum())} of {len(features)} embeddings are zero and have no direction")
    return np.asarray(features / lengths)


def subject_fidelity(generated: Array, real: Array) -> Array:  # [n, d], [m, d] -> [n]
    """Mean cosine of each generated picture with all real ones; its mean is DINO or CLIP-I (arXiv:2208.12242, section
    4.2)."""
    return np.asarray((unit(generated) @ unit(real).T).mean(axis=1))


def prompt_fidelity(generated: Array, prompts: Array) -> Array:  # [n, d], [n, d] -> [n]
    """Cosine of each picture with its own prompt; its mean is CLIP-T (arXiv:2208.12242, section 4.2)."""
    return np.asarray((unit(generated) * unit(prompts)).sum(axis=-1))


def diversity(generated: Array) -> float:  # [k, d]
    """1 - the mean cosine of all pairs of pictures of one prompt; 0 if they are the same.

    Raises:
        ValueError: there is no pair.
    """
    count = len(generated)
    if count < 2:
        raise ValueError(f"diversity of {count} picture: at least 2 are needed")
    cosines = unit(generated) @ unit(generated).T
    return float(1.0 - (cosines.sum() - np.trace(cosines)) / (count * (count - 1)))


def nearest(generated: Array, real: Array) -> Array:  # [n, d], [m, d] -> [n]
    """Cosine of each generated picture with the real one that is most like it."""
    return np.asarray((unit(generated) @ unit(real).T).max(axis=1))


def own_nearest(real: Array) -> float:  # [m, d]
    """The largest cosine of two different real pictures: as alike as the data itself is.

    Raises:
        ValueError: there is no pair.
    """
    if len(real) < 2:
        raise ValueError(f"nearest neighbours of {len(real)} picture: at least 2 are needed")
    cosines = unit(real) @ unit(real).T
    np.fill_diagonal(cosines, -np.inf)
    return float(cosines.max())


def copied(generated: Array, real: Array) -> Array:  # [n, d], [m, d] -> [n] of 0 and 1
    """Whether each generated picture is more like a real one than any two real pictures are like each other.

    Raises:
        ValueError: there are fewer than 2 real pictures.
    """
    return np.asarray(nearest(generated, real) > own_nearest(real), dtype=np.float64)


def cubic(x: Array, y: Array) -> Array:  # [n, d], [m, d] -> [n, m]
    """KID's kernel, (x y / d + 1)^3 (arXiv:1801.01401, section 4)."""
    return np.asarray((x @ y.T / x.shape[1] + 1.0) ** 3)


def gaussian(x: Array, y: Array) -> Array:  # [n, d], [m, d] -> [n, m]
    """CMMD's kernel on embeddings of length 1, exp(-|x - y|^2 / (2 sigma^2)) (arXiv:2401.09603, section 4)."""
    x, y = unit(x), unit(y)
    squares = np.maximum((x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2.0 * x @ y.T, 0.0)
    return np.asarray(np.exp(-squares / (2.0 * SIGMA**2)))


def mmd(x: Array, y: Array, kernel: Kernel, unbiased: bool) -> float:  # [n, d], [m, d]
    """Squared maximum mean discrepancy of two sets (Gretton et al. 2012, eq. 3 and 5).

    Args:
        x: one set.
        y: the other.
        kernel: of pairs.
        unbiased: leave out pairs of a picture with itself. Equal distributions then give 0 on average, and also values
            below 0; otherwise equal sets give exactly 0, and small sets of one distribution a value above 0.

    Raises:
        ValueError: a set is too small.
    """
    least = 2 if unbiased else 1
    if min(len(x), len(y)) < least:
        raise ValueError(f"distance of sets of {len(x)} and {len(y)}: at least {least} pictures each are needed")
    within = sum(_mean(kernel(each, each), unbiased) for each in (x, y))
    return float(within - 2.0 * kernel(x, y).mean())


def _mean(values: Array, unbiased: bool) -> float:
    """The mean of a square kernel matrix, without its diagonal if unbiased."""
    count = len(values)
    return float((values.sum() - np.trace(values)) / (count * (count - 1)) if unbiased else values.mean())


def kid(generated: Array, real: Array) -> float:
    """KID's kernel distance of all pictures at once, unbiased, over any encoder; of Inception's features it is KID."""
    return mmd(generated, real, cubic, unbiased=True)


def cmmd(generated: Array, real: Array) -> float:
    """CMMD's distance x 1000, over any encoder; of CLIP ViT-L/14 at 336 px it is CMMD."""
    return CMMD_SCALE * mmd(generated, real, gaussian, unbiased=False)
