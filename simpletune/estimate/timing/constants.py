"""A device's speed constants, and the file in which ``simpletune doctor --calibrate`` stores them. Imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from simpletune.system.atomic import write_json
from simpletune.system.options import Option, UserError

VERSION = 1
FOLDER = "calibrations"


class Grid(Option):
    """Seconds of one kind of operation by shape: measured at the points of a grid, interpolated between them.

    Times are power laws of each extent over long ranges (constant while a launch dominates, proportional once a rate
    does), so interpolation is linear in the logarithms of extents and seconds. Beyond the last point the time is
    proportional to the extent; below the first point it is constant.
    """

    axes: dict[str, list[int]]
    """Extents of each axis, ascending, by name."""
    seconds: list[Annotated[float, Field(gt=0)] | None]
    """One for each point, with the last axis varying fastest; null: not measured, because it takes too long."""

    @cached_property
    def _filled(self) -> list[float]:
        """Logarithms of the seconds; fills points that were not measured from a neighbour, in proportion to the work.

        Raises:
            ValueError: the first point was not measured, or the number of points is wrong.
        """
        shape = tuple(map(len, self.axes.values()))
        if len(self.seconds) != math.prod(shape):
            raise ValueError(f"{len(self.seconds)} points for axes of {shape}")
        if self.seconds[0] is None:
            raise ValueError("the smallest point was not measured")
        filled: list[float] = []
        for index, (seconds, point) in enumerate(zip(self.seconds, points(self.axes), strict=True)):
            if seconds is not None:
                filled.append(math.log(seconds))
                continue
            steps, stride = [], len(self.seconds)
            for extent, values in zip(point, self.axes.values(), strict=True):
                stride //= len(values)
                if place := values.index(extent):  # else it has no neighbour below on this axis
                    steps.append(filled[index - stride] + math.log(extent / values[place - 1]))
            filled.append(min(steps))  # larger work is no less efficient
        return filled

    def time(self, *point: float) -> float:
        """Interpolate the seconds at a point: an extent for each axis, at least 1."""
        corners, beyond = [], 1.0
        for values, extent in zip(self.axes.values(), point, strict=True):
            corners.append(_weights(values, min(extent, values[-1])))
            beyond *= max(1.0, extent / values[-1])
        total = 0.0
        for chosen in product(*corners):
            index, weight = 0, 1.0
            for (place, share), values in zip(chosen, self.axes.values(), strict=True):
                index, weight = index * len(values) + place, weight * share
            total += weight * self._filled[index]
        return math.exp(total) * beyond


def _weights(values: Sequence[int], extent: float) -> tuple[tuple[int, float], ...]:
    """Return indices on an axis and their weights, which add up to 1."""
    if len(values) == 1 or extent <= values[0]:
        return ((0, 1.0),)
    low = min(bisect_right(values, extent), len(values) - 1) - 1
    share = math.log(extent / values[low]) / math.log(values[low + 1] / values[low])
    return ((low, 1 - share), (low + 1, share))


def points(axes: dict[str, list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield a grid's points in the order of its seconds."""
    return product(*axes.values())


class Composite(Option):
    """A timed whole step of a small model, and its operations."""

    seconds: float
    """Seconds of the step."""
    host: dict[str, int]
    """How often the host does each of its tasks."""
    work: list[tuple[str, str, list[int], int]]
    """The device's operations: kind, type, extents and number."""


class Constants(Option):
    """Measured speeds of one device."""

    version: int
    """Version of this format."""
    device: str
    """The device's name, from CUDA or the processor."""
    kind: str
    """cuda or cpu."""
    capability: list[int] | None
    """CUDA compute capability; null on a CPU."""
    memory_bytes: int | None
    """The card's memory; null on a CPU."""
    threads: int
    """Threads that torch computes with on the CPU."""
    date: str
    """When it was measured: YYYY-MM-DD."""
    versions: str
    """Versions of the libraries."""
    seconds: float
    """How long measuring took."""
    grids: dict[str, Grid]
    """Seconds on the device by kind of operation and type, such as product.bf16."""
    host: dict[str, float] = Field(default_factory=dict)
    """The host's overhead in seconds, by task: an operation, a module call, ..."""
    composites: list[Composite] = Field(default_factory=list)
    """Whole steps, the smallest model's first."""
    rates: dict[str, float] = Field(default_factory=dict)
    """Single figures, such as the seconds to read a pixel of a JPEG, and the reference load's seconds."""
    failed: dict[str, str] = Field(default_factory=dict)
    """What could not be measured here, and why."""


def constants_file(folder: Path, device: str, threads: int, kind: str) -> Path:
    """Name the file of a device's constants in the cache's ``folder``; ``threads`` matter for a CPU (``kind``) only."""
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return folder / FOLDER / f"{name}{f'-{threads}-threads' if kind == 'cpu' else ''}.json"


def write_constants(file: Path, constants: Constants) -> None:
    """Write the file of a device's constants."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, constants.model_dump(mode="json"), shared=True)


def read_constants(file: Path) -> Constants:
    """Read the file of a device's constants. Raises UserError if it cannot be read, or was written in another
    format."""
    try:
        return Constants.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(
            f"{file}: not a calibration of this version ({reason}). Run simpletune doctor --calibrate"
        ) from None
