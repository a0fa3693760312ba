"""Where a shard lies in its parameter, so that random bits and saved state do not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from simpletune.engine.optim.state import State

BLOCK = 256
"""Numbers of bitsandbytes' 8-bit state that share a scale (arXiv:2110.02861)."""
SMALLEST = 4096  # elements; bitsandbytes keeps the state of smaller tensors in fp32
SIGNED = {"state1": True, "state2": False}
"""bitsandbytes' names of 8-bit numbers, and whether their table is signed; table and scales end in the same digit."""


class ParameterRange(NamedTuple):
    """The place of a shard: a contiguous range of its parameter's elements, in the parameter's own order."""

    number: int
    """Index of the parameter among all trained ones."""
    start: int
    """First element."""
    whole: int
    """Number of elements of the whole parameter."""


class PartGenerator(NamedTuple):
    """A generator of a whole parameter's random numbers, of which a shard takes its own."""

    generator: torch.Generator | None
    """The whole parameter's generator; None: the global one."""
    place: ParameterRange

    def draw(self, like: Tensor, low: int, high: int) -> Tensor:
        """Draw integers from ``low`` to ``high - 1``, in the shape and type of the shard's numbers."""
        noise = like.new_empty(self.place.whole).random_(low, high, generator=self.generator)
        return noise[self.place.start : self.place.start + like.numel()].clone().view(like.shape)


class StatePiece(NamedTuple):
    """The saved optimizer state of a parameter's elements ``start`` to before ``stop``."""

    start: int
    stop: int
    values: State


def join_state(pieces: Sequence[StatePiece], start: int, stop: int) -> State:
    """Join and cut saved state for a shard of the elements ``start`` to before ``stop``.

    Tensors have one element for each of the parameter's; other values must be equal in all pieces. 8-bit state
    (bitsandbytes') has a scale for each block, and a shard's blocks begin at its own first element: where the new
    shard's blocks coincide with the old ones', numbers and scales are copied; elsewhere they are quantised again.

    Args:
        pieces: in order, together covering these elements.

    Raises:
        ValueError: they lack some.
    """
    quantised, large = "state1" in pieces[0].values, stop - start >= SMALLEST
    if quantised:
        if [(piece.start, piece.stop) for piece in pieces] == [(start, stop)]:
            return dict(pieces[0].values)
        firsts = [max(start, piece.start) for piece in pieces]
        if large and all(
            "absmax1" in piece.values and (first - piece.start) % BLOCK == 0 == (first - start) % BLOCK
            for piece, first in zip(pieces, firsts, strict=True)
        ):
            return _cut_in_blocks(pieces, start, stop)
        pieces = [piece._replace(values=_to_fp32(piece.values)) for piece in pieces]
    state: State = {}
    for name, value in pieces[0].values.items():
        if not isinstance(value, Tensor) or not value.dim():
            state[name] = value
            continue
        parts = [
            piece.values[name].reshape(-1)[max(start, piece.start) - piece.start : min(stop, piece.stop) - piece.start]
            for piece in pieces
            if max(start, piece.start) < min(stop, piece.stop)
        ]
        if sum(part.numel() for part in parts) != stop - start:
            raise ValueError(f"the shards lack elements of {start} to {stop}")
        state[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    if quantised and large:
        from bitsandbytes.functional import create_dynamic_map

        for name in [name for name in SIGNED if name in state]:
            table = create_dynamic_map(signed=SIGNED[name]).to(torch.float32)
            numbers, scales = quantise_blocks(state[name], table)
            state |= {name: numbers, f"qmap{name[-1]}": table, f"absmax{name[-1]}": scales}
    return state


def _cut_in_blocks(pieces: Sequence[StatePiece], start: int, stop: int) -> State:
    """Join and cut the 8-bit numbers and the scales of shards whose blocks are also the new shard's."""
    state: State = dict(pieces[0].values)
    for name in [name for name in SIGNED if name in state]:
        numbers, scales = [], []
        for piece in pieces:
            first, last = max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
            numbers.append(piece.values[name].reshape(-1)[first:last])
            scales.append(piece.values[f"absmax{name[-1]}"][first // BLOCK : -(-last // BLOCK)])
        state |= {name: torch.cat(numbers), f"absmax{name[-1]}": torch.cat(scales)}
    return state


def _to_fp32(values: State) -> State:
    """Convert 8-bit state to fp32, as bitsandbytes keeps it for small tensors."""
    wide: State = {name: value for name, value in values.items() if not name.startswith(("qmap", "absmax"))}
    for name in SIGNED:
        if f"absmax{name[-1]}" in values:
            wide[name] = dequantise_blocks(values[name], values[f"qmap{name[-1]}"], values[f"absmax{name[-1]}"])
    return wide


def dequantise_blocks(
    numbers: Tensor, table: Tensor, scales: Tensor
) -> Tensor:  # [n] uint8, [256], [n / 256] -> [n] fp32
    """Look up numbers in a table, and multiply them by their block's scale."""
    flat = numbers.reshape(-1)
    return table[flat.int()] * scales.repeat_interleave(BLOCK)[: flat.numel()]


def quantise_blocks(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:  # [n] fp32, [256] -> [n] uint8, [n / 256]
    """Divide each block by its largest absolute value; return indices of the nearest table entries, and these
    values."""
    blocks = nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    relative = blocks / torch.where(scales > 0, scales, 1)[:, None]
    numbers = torch.bucketize(relative, (table[1:] + table[:-1]) / 2)
    return numbers.to(torch.uint8).view(-1)[: x.numel()], scales
