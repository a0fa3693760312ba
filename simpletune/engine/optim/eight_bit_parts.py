"""Join and cut 8-bit optimizer state, which has a scale for each block of 256 numbers (arXiv:2110.02861).

A shard's blocks begin at its own first element. Where the new shard's blocks coincide with the old ones', numbers and
scales are copied; elsewhere they are quantised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from simpletune.engine.optim.place import StatePiece, joined_state
from simpletune.engine.optim.state import State

BLOCK = 256
SMALLEST = 4096  # elements; bitsandbytes keeps the state of smaller tensors in fp32
SIGNED = {"state1": True, "state2": False}
"""The tensors of 8-bit numbers, and whether their table is signed; table and scales end in the same digit."""


def join_states(pieces: Sequence[StatePiece], start: int, stop: int) -> State:
    """Return the state of a parameter's elements ``start`` to ``stop`` from the state of saved shards.

    Args:
        pieces: in order, together covering these elements.
        start: first element of the shard that gets the state.
        stop: element after its last one.
    """
    if [(piece.start, piece.stop) for piece in pieces] == [(start, stop)]:
        return dict(pieces[0].values)
    if stop - start >= SMALLEST and all(has_same_blocks(piece, start) for piece in pieces):
        return cut_in_blocks(pieces, start, stop)
    state: State = dict(
        joined_state([StatePiece(p.start, p.stop, to_fp32_state(p.values)) for p in pieces], start, stop)
    )
    return to_8bit_state(state) if stop - start >= SMALLEST else state


def has_same_blocks(piece: StatePiece, start: int) -> bool:
    """Whether the blocks of a saved shard are among those of one that begins at ``start``."""
    first = max(start, piece.start)
    return "absmax1" in piece.values and (first - piece.start) % BLOCK == 0 == (first - start) % BLOCK


def cut_in_blocks(pieces: Sequence[StatePiece], start: int, stop: int) -> State:
    """Join and cut the numbers and scales of shards with the same blocks."""
    state: State = dict(pieces[0].values)
    for name in SIGNED:
        if name not in state:
            continue
        numbers, scales = [], []
        for piece in pieces:
            first, last = max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
            numbers.append(_tensor(piece, name).reshape(-1)[first:last])
            scales.append(_tensor(piece, f"absmax{name[-1]}")[first // BLOCK : -(-last // BLOCK)])
        state |= {name: torch.cat(numbers), f"absmax{name[-1]}": torch.cat(scales)}
    return state


def _tensor(piece: StatePiece, name: str) -> Tensor:
    value = piece.values[name]
    assert isinstance(value, Tensor)
    return value


def to_fp32_state(values: Mapping[str, Tensor | int | float]) -> State:
    """A shard's state in fp32, as bitsandbytes stores it for small tensors."""
    wide: State = {name: value for name, value in values.items() if not name.startswith(("qmap", "absmax"))}
    for name in SIGNED:
        if f"absmax{name[-1]}" in values:
            numbers, table, scales = (values[f"{part}{name[-1]}"] for part in ("state", "qmap", "absmax"))
            assert isinstance(numbers, Tensor) and isinstance(table, Tensor) and isinstance(scales, Tensor)
            wide[name] = dequantise_blocks(numbers, table, scales)
    return wide


def to_8bit_state(state: State) -> State:
    """A shard's fp32 state in 8 bits."""
    from bitsandbytes.functional import create_dynamic_map

    narrow = dict(state)
    for name, signed in SIGNED.items():
        if name in state:
            table = create_dynamic_map(signed=signed).to(torch.float32)
            numbers, scales = quantise_blocks(state[name], table)
            narrow |= {name: numbers, f"qmap{name[-1]}": table, f"absmax{name[-1]}": scales}
    return narrow


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
