"""Which micro-batches of a step each process computes, and in which order their gradients are summed.

The n micro-batches of a step are ranked by the pixels of their pictures, the largest first. Process q of P computes the
ranks q, q + P, q + 2P and so on, so that all processes get about as many of each size. With ``train.reduce`` ``exact``
a step's gradient is S(0, 1) of the tree

    S(r, m) = S(r, 2m) + S(r + m, 2m),  or the gradient of rank r if r + m >= n

which has the ranks in bit-reversed order as its leaves. Each S(q, P) needs the micro-batches of process q alone, where
P is a power of two, and what is above them joins process q with q + P/2, then with q + P/4. So no sum depends on P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankMicroBatches:
    """One process's share of a step.

    Args:
        process: its rank.
        processes: how many there are.
        exact: whether it sums by the tree.
        even: whether all processes compute equally many passes, because each pass gathers weights from all of them.
    """

    process: int = 0
    processes: int = 1
    exact: bool = False
    even: bool = False

    def select(self, areas: Sequence[int]) -> list[int]:
        """List the micro-batches that this process computes, by their places in the step, in order of computation; the
        number of micro-batches stands for one made of fillers. ``areas``: the pixels of a picture of each."""
        ranked = sorted(range(len(areas)), key=lambda place: -areas[place])
        own = ranked[self.process :: self.processes]
        lacking = -(-len(areas) // self.processes) - len(own) if self.even else 0
        if lacking:
            return [*sorted(own), *[len(areas)] * lacking]
        return [own[leaf] for leaf in leaves(len(own))] if self.exact else sorted(own)


def leaves(count: int, first: int = 0, stride: int = 1) -> list[int]:
    """List the leaves of the tree over ``count`` gradients, from left to right."""
    if first + stride >= count:
        return [first] if first < count else []
    return leaves(count, first, 2 * stride) + leaves(count, first + stride, 2 * stride)
