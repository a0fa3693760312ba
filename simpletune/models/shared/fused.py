"""Layers that a file stores as one and diffusers as several: q, k and v, or q, k, v and the mlp of a parallel block.

Their outputs are stacked, so a part is a span of the whole's rows, and of a LoRA's second factor; the first factor is
every part's own. Heights are relative, because names are known before sizes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Rows(NamedTuple):
    """The rows of a fused layer that are one part: from ``first`` to ``last`` of ``of`` equal portions."""

    first: int
    last: int
    of: int

    def within(self, height: int) -> slice:
        """Return the rows of a whole of this height, which ``of`` divides."""
        return slice(height * self.first // self.of, height * self.last // self.of)

    def whole(self, height: int) -> int:
        """Return the height of the whole whose part has this height."""
        return height * self.of // (self.last - self.first)


def stacked(*heights: int) -> tuple[Rows, ...]:
    """Return the rows of parts of these relative heights, from the top."""
    tops = [sum(heights[:number]) for number in range(len(heights) + 1)]
    return tuple(Rows(first, last, tops[-1]) for first, last in zip(tops, tops[1:], strict=False))


THIRDS = stacked(1, 1, 1)


@dataclass(frozen=True)
class Fused:
    """A fused layer of a family."""

    module: str  # its name in files
    parts: Sequence[str]  # diffusers' names of the layers that it stacks, from the top
    heights: Sequence[int] = ()  # relative ones of the parts; empty: all alike

    def rows(self) -> dict[str, tuple[str, Rows]]:
        """Return the module, and the rows of it that each part is."""
        rows = stacked(*(self.heights or (1,) * len(self.parts)))
        return {part: (self.module, own) for part, own in zip(self.parts, rows, strict=True)}
