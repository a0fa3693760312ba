"""The order of an epoch over rows in shards, row by row (part of the independent reference)."""

from collections import defaultdict
from collections.abc import Sequence

from plan import stream


def micro_batches(
    seed: int, epoch: int, rows: Sequence[tuple[int, int]], window: int, batch_size: int
) -> list[list[int]]:
    """The micro-batches of an epoch, as numbers of rows.

    Args:
        seed: of the run.
        epoch: its number, from 0.
        rows: (block, bucket) of each row.
        window: how many rows are shuffled with each other.
        batch_size: rows of a micro-batch; a bucket's last one may have fewer.
    """
    blocks = sorted({block for block, _ in rows})
    shuffled = [blocks[place] for place in stream(seed, "block-order", epoch).permutation(len(blocks))]
    sequence = [number for block in shuffled for number, row in enumerate(rows) if row[0] == block]
    window_of = {number: place // window for place, number in enumerate(sequence)}
    chance = stream(seed, "row-order", epoch).random(len(rows))
    members: dict[int, list[int]] = defaultdict(list)
    for number, (_, bucket) in enumerate(rows):
        members[bucket].append(number)
    batches = []
    for bucket in sorted(members):
        found = sorted(members[bucket], key=lambda number: (window_of[number], chance[number]))
        batches += [found[start : start + batch_size] for start in range(0, len(found), batch_size)]
    chances = stream(seed, "pass-order", epoch).random(len(batches))
    places = sorted(range(len(batches)), key=lambda place: (max(map(window_of.get, batches[place])), chances[place]))
    return [batches[place] for place in places]
