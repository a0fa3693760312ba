"""Kinds of memory, and what lived at one moment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = ("weights", "adapter", "gradients", "optimizer", "activations", "plan", "workspace")
"""Kinds that count. What lives in phases forward and backward and is none of the others is activations; what lives
outside of them is workspace."""
HOST = "host"
"""The kind of what stays in host memory, pinned or paged: known, but never part of a total."""
BLOCK = 512  # bytes: the caching allocator's smallest block


@dataclass(frozen=True)
class MemorySnapshot:
    """What lived at one moment."""

    bytes: int = 0
    """Of all kinds but the host's."""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    """The same by kind."""
    phase: str = ""
    """forward, backward, recompute (a checkpoint's second forward pass), clip, optimizer; empty: outside of a step."""
    module: str = ""
    """The named module whose forward or backward pass was running; empty: none."""


def rounded(size: int) -> int:
    """Bytes as the caching allocator counts them: a multiple of 512."""
    return -(-size // BLOCK) * BLOCK


def require_known(kind: str) -> None:
    """Refuse what is no kind.

    Raises:
        ValueError: with the kinds there are.
    """
    if kind not in KINDS and kind != HOST:
        raise ValueError(f"{kind!r} is no kind of memory. Use one of {', '.join((*KINDS, HOST))}")
