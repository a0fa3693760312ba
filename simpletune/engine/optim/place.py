"""Where a shard lies in its parameter, so that random bits and saved state do not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ParameterRange(NamedTuple):
    """The place of a shard: a contiguous range of its parameter's elements, in the parameter's own order.

    Args:
        number: index of the parameter among all trained ones.
        start: first element.
        whole: number of elements of the whole parameter.
    """

    number: int
    start: int
    whole: int


class PartGenerator(NamedTuple):
    """Draws the random numbers of a whole parameter, of which a shard takes its own.

    Args:
        generator: the whole parameter's generator; None: the global one.
        place: the shard's place.
    """

    generator: torch.Generator | None
    place: ParameterRange

    def draw(self, like: Tensor, low: int, high: int) -> Tensor:
        """Draw integers from ``low`` to ``high - 1``.

        Args:
            like: the shard's numbers, in the type of the result.
        """
        noise = like.new_empty(self.place.whole).random_(low, high, generator=self.generator)
        return noise[self.place.start : self.place.start + like.numel()].clone().view(like.shape)


class StatePiece(NamedTuple):
    """The saved optimizer state of a shard.

    Args:
        start: first element of the shard in its parameter.
        stop: element after its last one.
        values: state by name.
    """

    start: int
    stop: int
    values: Mapping[str, Tensor | int | float]


def cut_out(pieces: Sequence[tuple[int, int, Callable[[], Tensor]]], start: int, stop: int) -> Tensor:
    """Join the elements ``start`` to ``stop`` of a tensor that lies in pieces, as one dimension.

    Args:
        pieces: in order: first element, element after the last one, and what loads the piece.
        start: first element.
        stop: element after the last one.

    Raises:
        ValueError: the pieces lack some of them.
    """
    import torch

    found = [
        load().reshape(-1)[max(start, begin) - begin : min(stop, end) - begin]
        for begin, end, load in pieces
        if max(start, begin) < min(stop, end)
    ]
    if sum(part.numel() for part in found) != stop - start:
        raise ValueError(f"the shards lack elements of {start} to {stop}")
    return found[0] if len(found) == 1 else torch.cat(found)


def joined_state(pieces: Sequence[StatePiece], start: int, stop: int) -> dict[str, Tensor | int | float]:
    """Join saved state whose tensors have one element for each of the parameter's; other values must be equal in all
    pieces.

    Args:
        pieces: in order, together covering the elements ``start`` to ``stop``.
        start: first element of the shard that gets the state.
        stop: element after its last one.
    """
    import torch

    state: dict[str, Tensor | int | float] = {}
    for name, value in pieces[0].values.items():
        if isinstance(value, torch.Tensor) and value.dim():
            parts = [(piece.start, piece.stop, _loader(piece.values[name])) for piece in pieces]
            state[name] = cut_out(parts, start, stop)
        else:
            state[name] = value
    return state


def _loader(value: Tensor | int | float) -> Callable[[], Tensor]:
    return lambda: value  # type: ignore[return-value]
