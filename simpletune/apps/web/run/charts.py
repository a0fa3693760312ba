"""Lay out small line charts; ``chart.html`` draws SVG without scripts and styles, which the content policy forbids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, WIDE, HEIGHT = 560, 1120, 200  # size of the drawing; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 10, 30
LEAST = 1e-30

Dot = tuple[float, float]
"""Step and value."""


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Args:
        name: the name in the legend; empty: none.
        dots: dots by step.
        kind: its class in app.css: ``raw``, ``smooth`` or ``held``.
        errors: half the length of the bar through each dot; empty: no bars and no dots.
    """

    name: str
    dots: Sequence[Dot]
    kind: str
    errors: Sequence[float] = field(default_factory=tuple)


@dataclass(frozen=True)
class Bar:
    """A dot with its error, in pixels."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class LinePath:
    """A line in pixels."""

    name: str
    kind: str
    points: str
    bars: list[Bar]


@dataclass(frozen=True)
class ChartLayout:
    """A chart in pixels.

    Args:
        title: what it shows.
        about: a text alternative with the last values.
        lines: in the order in which they are drawn.
        values: (y, text) of each mark of the vertical axis.
        steps: (x, text) of each mark of the horizontal axis.
        width: the drawing's width.
    """

    title: str
    about: str
    lines: list[LinePath]
    values: list[tuple[float, str]]
    steps: list[tuple[float, str]]
    width: int

    height, left = HEIGHT, LEFT

    @property
    def right(self) -> int:
        """The right end of the horizontal axis."""
        return self.width - RIGHT


@dataclass(frozen=True)
class PlotArea:
    """Maps values to positions in a drawing.

    Args:
        last: last step; the first is 0.
        low: lowest value.
        high: highest value.
        width: the drawing's width.
    """

    last: float
    low: float
    high: float
    width: int

    def x(self, step: float) -> float:
        """Pixels from the left."""
        return round(LEFT + step / (self.last or 1) * (self.width - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Pixels from the top; clamps values to the frame."""
        share = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    def drawn(self, line: ChartLine) -> LinePath:
        """Lay out a line."""
        points = " ".join(f"{self.x(step)},{self.y(value)}" for step, value in line.dots)
        bars = [
            Bar(self.x(step), self.y(value), self.y(value - error), self.y(value + error))
            for (step, value), error in zip(line.dots, line.errors, strict=False)
        ]
        return LinePath(line.name, line.kind, points, bars)


def chart(title: str, lines: Sequence[ChartLine], steps: int | None = None, width: int = WIDTH) -> ChartLayout | None:
    """Lay out a chart; None if no line has a dot.

    Args:
        title: what it shows.
        lines: in the order in which they are drawn.
        steps: last step of the axis; None: the lines' last step.
        width: the drawing's width.
    """
    drawn = [line for line in lines if line.dots]
    if not drawn:
        return None
    frame = PlotArea(max(max(dot[0] for line in drawn for dot in line.dots), steps or 0), *limits(drawn), width)
    ends = [f"{each.name or title} {format_number(each.dots[-1][1])} at step {each.dots[-1][0]:,.0f}" for each in drawn]
    return ChartLayout(
        title,
        f"{title} by step: {', '.join(ends)}",
        [frame.drawn(line) for line in drawn],
        [(frame.y(value), format_number(value)) for value in ticks(frame.low, frame.high)],
        [(frame.x(step), f"{step:,.0f}") for step in ticks(0, frame.last, most=6)],
        width,
    )


def limits(lines: Sequence[ChartLine]) -> tuple[float, float]:
    """The range of values of a chart, without the most extreme hundredth of a line on either side."""
    found: list[float] = []
    for line in lines:
        values = sorted(dot[1] for dot in line.dots)
        cut = len(values) // 100
        found += [values[cut], values[-1 - cut]]
        for (_, value), error in zip(line.dots, line.errors, strict=False):
            found += [value - error, value + error]
    low, high = min(found), max(found)
    edge = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return low - edge, high + edge


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers between two values, spaced by 1, 2 or 5 times a power of ten."""
    span = max(high - low, LEAST)
    power = 10.0 ** math.floor(math.log10(span / most))
    apart = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= most)
    return [number * apart for number in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def format_number(value: float) -> str:
    """Format a number with at most four digits."""
    return f"{value:.4g}"


def thinned_places(count: int, most: int) -> list[int]:
    """Indices of ``most`` of ``count`` items, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(number * (count - 1) / (most - 1)) for number in range(most)})
