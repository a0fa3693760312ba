"""Independent scores of pictures and sets of pictures: plain sums over pairs, float64, one number at a time.

Written from the papers' definitions: DINO, CLIP-I, CLIP-T, PRES (arXiv:2208.12242, section 4.2), KID (arXiv:1801.01401,
section 4), CMMD (arXiv:2401.09603, section 4), MMD's two estimators (Gretton et al. 2012, eq. 3 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Vector = Sequence[float]


def dot(x: Vector, y: Vector) -> float:
    return math.fsum(float(a) * float(b) for a, b in zip(x, y, strict=True))


def cosine(x: Vector, y: Vector) -> float:
    return dot(x, y) / math.sqrt(dot(x, x) * dot(y, y))


def mean_of_pairs(generated: Sequence[Vector], real: Sequence[Vector]) -> float:
    """DINO, CLIP-I and PRES: the mean over all pairs."""
    return math.fsum(cosine(x, y) for x in generated for y in real) / (len(generated) * len(real))


def mean_of_matches(images: Sequence[Vector], prompts: Sequence[Vector]) -> float:
    """CLIP-T."""
    return math.fsum(cosine(x, y) for x, y in zip(images, prompts, strict=True)) / len(images)


def diversity(images: Sequence[Vector]) -> float:
    pairs = [(a, b) for i, a in enumerate(images) for b in images[i + 1 :]]
    return 1.0 - math.fsum(cosine(a, b) for a, b in pairs) / len(pairs)


def share_copied(generated: Sequence[Vector], real: Sequence[Vector]) -> float:
    limit = max(cosine(a, b) for i, a in enumerate(real) for j, b in enumerate(real) if i != j)
    return sum(any(cosine(x, y) > limit for y in real) for x in generated) / len(generated)


def cubic(x: Vector, y: Vector) -> float:
    return (dot(x, y) / len(x) + 1.0) ** 3


def gaussian(x: Vector, y: Vector) -> float:
    a, b = math.sqrt(dot(x, x)), math.sqrt(dot(y, y))
    squares = math.fsum((p / a - q / b) ** 2 for p, q in zip(x, y, strict=True))
    return math.exp(-squares / 200.0)


def squared_mmd(
    x: Sequence[Vector], y: Sequence[Vector], kernel: Callable[[Vector, Vector], float], unbiased: bool
) -> float:
    def inside(z: Sequence[Vector]) -> float:
        pairs = [kernel(a, b) for i, a in enumerate(z) for j, b in enumerate(z) if not unbiased or i != j]
        return math.fsum(pairs) / len(pairs)

    return inside(x) + inside(y) - 2.0 * math.fsum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))


def kid(generated: Sequence[Vector], real: Sequence[Vector]) -> float:
    return squared_mmd(generated, real, cubic, unbiased=True)


def cmmd(generated: Sequence[Vector], real: Sequence[Vector]) -> float:
    return 1000.0 * squared_mmd(generated, real, gaussian, unbiased=False)
