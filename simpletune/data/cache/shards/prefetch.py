"""Prefetch what coming steps will read from a remote cache, in the plan's order, while the current step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from simpletune.data.cache.cache import Cache
from simpletune.data.cache.shards.cache import ShardedCache

THREADS = 16  # requests at once
AHEAD = 2**30  # bytes of coming steps, at most; and a quarter of the local part
STEPS = 256  # coming steps, at most


class ShardPrefetcher:
    """Fetches samples of coming steps into the local part.

    Does not report a failed fetch: the step that needs the sample tries again, and reports its own failure.

    Args:
        needs: the samples that a step reads, as pairs of a cache and a key.
        steps: the run's number of steps.
        limit: the local part's limit in bytes.
    """

    def __init__(self, needs: Callable[[int], Iterable[tuple[Cache, str]]], steps: int, limit: int):
        self._needs, self._steps, self._most = needs, steps, min(AHEAD, limit // 4)
        self._threads = ThreadPoolExecutor(THREADS, "read-ahead")
        self._next = 0
        self._bytes: dict[int, int] = {}  # sizes for the current step and later ones

    def at(self, step: int) -> None:
        """Start fetching for a step and later ones, as far as the limits allow."""
        self._next = max(self._next, step)
        self._bytes = {known: size for known, size in self._bytes.items() if known >= step}
        while self._next < min(self._steps, step + STEPS) and (
            sum(self._bytes.values()) < self._most or self._next == step
        ):
            self._bytes[self._next] = sum(self._begin(cache, key) for cache, key in self._needs(self._next))
            self._next += 1

    def _begin(self, cache: Cache, key: str) -> int:
        """Start fetching a sample, and return its size."""
        if not isinstance(cache, ShardedCache):
            return 0
        size = cache.size_of(key)
        if size:
            self._threads.submit(cache.bring, key)
        return size

    def close(self) -> None:
        """Stop fetching."""
        self._threads.shutdown(wait=False, cancel_futures=True)
