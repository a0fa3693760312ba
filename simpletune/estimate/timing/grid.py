"""Seconds of an operation by shape: measured at the points of a grid, interpolated between them. Imports no torch.

Times are power laws of each extent over long ranges (constant while a launch dominates, proportional once a rate does),
so interpolation is linear in the logarithms of extents and seconds. Beyond the last point the time is proportional to
the extent; below the first point it is constant.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Annotated

from pydantic import Field

from simpletune.system.options import Option


class Grid(Option):
    """Seconds of one kind of operation."""

    axes: dict[str, list[int]]
    """Extents of each axis, ascending, by name."""
    seconds: list[Annotated[float, Field(gt=0)] | None]
    """One for each point, with the last axis varying fastest; null: not measured, because it takes too long."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The number of points along each axis."""
        return tuple(len(values) for values in self.axes.values())

    @cached_property
    def _filled(self) -> list[float]:
        """Logarithms of the seconds; fills points that were not measured from a neighbour, in proportion to the work.

        Raises:
            ValueError: the first point was not measured, or the number of points is wrong.
        """
        if len(self.seconds) != math.prod(self.shape):
            raise ValueError(f"{len(self.seconds)} points for axes of {self.shape}")
        if self.seconds[0] is None:
            raise ValueError("the smallest point was not measured")
        filled: list[float] = []
        for index, (seconds, point) in enumerate(zip(self.seconds, points(self.axes), strict=True)):
            if seconds is not None:
                filled.append(math.log(seconds))
                continue
            below = [(*self._before(index, axis), axis) for axis in range(len(self.shape))]
            steps = [(filled[near] + math.log(point[axis] / extent)) for near, extent, axis in below if near >= 0]
            filled.append(min(steps))  # larger work is no less efficient
        return filled

    def _before(self, index: int, axis: int) -> tuple[int, int]:
        """The index of the point one step down an axis, and its extent there; -1 if there is none."""
        stride = math.prod(self.shape[axis + 1 :])
        place = index // stride % self.shape[axis]
        return (-1, 1) if place == 0 else (index - stride, list(self.axes.values())[axis][place - 1])

    def time(self, *point: float) -> float:
        """Interpolate the seconds at a point.

        Args:
            point: an extent for each axis, at least 1.
        """
        corners, beyond = [], 1.0
        for values, extent in zip(self.axes.values(), point, strict=True):
            corners.append(_weights(values, min(extent, values[-1])))
            beyond *= max(1.0, extent / values[-1])
        total = 0.0
        for chosen in product(*corners):
            index, weight = 0, 1.0
            for (place, share), length in zip(chosen, self.shape, strict=True):
                index, weight = index * length + place, weight * share
            total += weight * self._filled[index]
        return math.exp(total) * beyond


def _weights(values: Sequence[int], extent: float) -> tuple[tuple[int, float], ...]:
    """Indices on an axis and their weights, which add up to 1."""
    if len(values) == 1 or extent <= values[0]:
        return ((0, 1.0),)
    low = min(bisect_right(values, extent), len(values) - 1) - 1
    share = math.log(extent / values[low]) / math.log(values[low + 1] / values[low])
    return ((low, 1 - share), (low + 1, share))


def points(axes: dict[str, list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield a grid's points in the order of its seconds."""
    return product(*axes.values())
