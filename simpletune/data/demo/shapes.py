"""Signed distances to the eight demo shapes, for antialiasing and outlines at any size.

Legend: p and q are pixel rows and columns. Coordinates are in units of the shape's radius, x right and y down;
every shape fits the unit circle's bounding box. Distances are negative inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float64]  # [p, q]


def circle(x: Field, y: Field, radius: float = 0.92) -> Field:
    """Compute the signed distance of a disc."""
    return np.hypot(x, y) - radius


def ring(x: Field, y: Field) -> Field:
    """Compute the signed distance of an annulus."""
    return np.abs(np.hypot(x, y) - 0.76) - 0.2


def polygon(corners: Sequence[tuple[float, float]]) -> Callable[[Field, Field], Field]:
    """Compute the exact signed distance of a closed polygon with these corners (x, y), in either order."""

    def distance(x: Field, y: Field) -> Field:
        squared = np.full(x.shape, np.inf)
        inside = np.zeros(x.shape, dtype=bool)
        for (x_0, y_0), (x_1, y_1) in zip(corners, [*corners[1:], corners[0]], strict=True):
            edge_x, edge_y = x_1 - x_0, y_1 - y_0
            along = np.clip(((x - x_0) * edge_x + (y - y_0) * edge_y) / (edge_x**2 + edge_y**2), 0.0, 1.0)
            squared = np.minimum(squared, (x - x_0 - along * edge_x) ** 2 + (y - y_0 - along * edge_y) ** 2)
            if edge_y != 0.0:  # even-odd rule: a ray to the right crosses this edge
                crosses = (y_0 > y) != (y_1 > y)
                inside ^= crosses & (x < x_0 + (y - y_0) * edge_x / edge_y)
        return np.where(inside, -1.0, 1.0) * np.sqrt(squared)

    return distance


def heart(x: Field, y: Field) -> Field:
    """Compute the signed distance of a square on its corner with a disc on each upper side (a union: exact outside)."""
    u, v = (x + y - 0.04) * math.sqrt(0.5), (y - x - 0.04) * math.sqrt(0.5)
    half = 0.62
    across, down = np.abs(u) - half, np.abs(v) - half
    outside = np.hypot(np.maximum(across, 0.0), np.maximum(down, 0.0))
    square_ = outside + np.minimum(np.maximum(across, down), 0.0)
    right, left = np.hypot(u, v + half) - half, np.hypot(u + half, v) - half
    return np.minimum(square_, np.minimum(left, right))


_ANGLES = [math.pi * k / 5 - math.pi / 2 for k in range(10)]
_STAR = [(r * math.cos(a), r * math.sin(a) + 0.08) for r, a in zip([1.02, 0.44] * 5, _ANGLES, strict=True)]
_ARM = 0.34  # half the width of the cross's arms
_CROSS = [
    *[(-_ARM, -0.96), (_ARM, -0.96), (_ARM, -_ARM), (0.96, -_ARM), (0.96, _ARM), (_ARM, _ARM)],
    *[(_ARM, 0.96), (-_ARM, 0.96), (-_ARM, _ARM), (-0.96, _ARM), (-0.96, -_ARM), (-_ARM, -_ARM)],
]

DISTANCES: dict[str, Callable[[Field, Field], Field]] = {
    "circle": circle,
    "square": polygon([(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)]),
    "triangle": polygon([(0.0, -0.92), (0.98, 0.8), (-0.98, 0.8)]),
    "diamond": polygon([(0.0, -1.0), (0.7, 0.0), (0.0, 1.0), (-0.7, 0.0)]),
    "star": polygon(_STAR),
    "cross": polygon(_CROSS),
    "ring": ring,
    "heart": heart,
}
