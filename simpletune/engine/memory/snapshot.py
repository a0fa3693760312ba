"""Kinds of memory, and snapshots of the live bytes. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

KINDS = ("weights", "adapter", "gradients", "optimizer", "activations", "plan", "workspace")
"""Kinds of device memory. Unregistered tensors count as activations if allocated in the forward or backward pass, and
as workspace otherwise."""
HOST = "host"
"""The kind of pinned or paged host memory, which is excluded from totals."""
FILE = "file"
"""The kind of the pages of a file, which take memory only while the system has room: excluded from totals, too."""
NOT_ON_DEVICE = (HOST, FILE)
BLOCK = 512  # bytes: the caching allocator's smallest block


@dataclass(frozen=True)
class MemorySnapshot:
    """The live bytes at one moment."""

    bytes: int = 0
    """Live bytes of all kinds except host memory."""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    """Live bytes by kind."""
    phase: str = ""
    """forward, backward, recompute (a checkpoint's second forward pass), clip or optimizer; empty outside a step."""
    module: str = ""
    """The named module in its forward or backward pass; empty if none."""
    in_products: int | None = None
    """The most live bytes during a product of cuBLAS, without its workspace, in the time of which this is the largest
    snapshot; None: not recorded."""


def largest_of(snapshots: Iterable[MemorySnapshot]) -> MemorySnapshot | None:
    """Return the largest snapshot, as that of the time of all; None without any."""
    found = list(snapshots)
    largest = max(found, key=lambda each: each.bytes, default=None)
    if largest is None or any(each.in_products is None for each in found):
        return largest
    return replace(largest, in_products=max(each.in_products or 0 for each in found))


class OutOfMemory(Exception):
    """The counted bytes exceed the limit."""

    def __init__(self, bytes: int):
        super().__init__(f"{bytes:,} bytes are live, more than the limit")
        self.bytes = bytes


def round_to_block(size: int) -> int:
    """Round bytes up to a multiple of 512, as the caching allocator does."""
    return -(-size // BLOCK) * BLOCK


def require_known(kind: str) -> None:
    """Refuse an unknown kind. Raises ValueError, with the known ones."""
    if kind not in KINDS and kind not in NOT_ON_DEVICE:
        raise ValueError(f"{kind!r} is not a kind of memory. Use one of {', '.join((*KINDS, *NOT_ON_DEVICE))}")
