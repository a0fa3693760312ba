"""The order in which an epoch visits rows in shards: random, and yet near-sequential.

Blocks are shuffled as wholes. Their rows, one block after another, form windows, and rows are shuffled within a window.
So a stretch of the epoch touches few blocks, and any part of it can be computed from the seed and the epoch's number.
tests/reference/stream_order.py does the same row by row.
"""

from __future__ import annotations

import numpy as np

from simpletune.system.rng import stream


def epoch_order(
    key: tuple[int, int],
    block: np.ndarray,  # [n]
    bucket: np.ndarray,  # [n]
    window: int,
    batch_size: int,
) -> np.ndarray:  # int64 [micro-batches, batch_size]
    """Shuffle one epoch into micro-batches: sample numbers, each once; -1 pads a bucket's last micro-batch.

    Args:
        key: the run's seed and the epoch's number.
        block: the block of each sample.
        bucket: the bucket of each sample; a micro-batch has one bucket.
        window: how many rows are shuffled with each other.
        batch_size: samples in a micro-batch.
    """
    seed, epoch = key
    present = np.unique(block)
    rank = np.empty(int(present[-1]) + 1, dtype=np.int64)
    rank[present[stream(seed, "block-order", epoch).permutation(len(present))]] = np.arange(len(present))
    window_of = np.empty(len(block), dtype=np.int64)
    window_of[np.argsort(rank[block], kind="stable")] = np.arange(len(block)) // window
    order = np.lexsort((stream(seed, "row-order", epoch).random(len(block)), window_of, bucket))
    ends = np.flatnonzero(np.diff(bucket[order])) + 1  # where the next bucket begins
    batches = np.concatenate([deal_batches(members, batch_size) for members in np.split(order, ends)])
    last = np.where(batches < 0, -1, window_of[batches]).max(axis=1)  # a micro-batch is in its last row's window
    return batches[np.lexsort((stream(seed, "pass-order", epoch).random(len(batches)), last))]


def deal_batches(members: np.ndarray, batch_size: int) -> np.ndarray:  # [n] -> int64 [micro-batches, batch_size]
    """Deal a bucket's samples into micro-batches, the last one padded with -1."""
    filled = np.full(-(-len(members) // batch_size) * batch_size, -1, dtype=np.int64)
    filled[: len(members)] = members
    return filled.reshape(-1, batch_size)


def substitute_unusable(
    batches: np.ndarray,  # [micro-batches, batch_size]
    bucket: np.ndarray,  # [n]
    unusable: np.ndarray,
) -> np.ndarray:
    """Replace each unusable sample of an epoch's order by the next usable one of its bucket.

    Args:
        batches: the epoch's order.
        bucket: the bucket of each sample.
        unusable: sample numbers; each bucket must have a usable sample.
    """
    flat = batches.reshape(-1).copy()
    bad = np.isin(flat, unusable)
    for number in np.unique(bucket[flat[bad]]):
        places = np.flatnonzero((flat >= 0) & (bucket[flat] == number))
        good, gone = places[~bad[places]], places[bad[places]]
        flat[gone] = flat[good[np.searchsorted(good, gone) % len(good)]]
    return flat.reshape(batches.shape)
