"""Counter-based random numbers: every draw is a function of its key, never of what was drawn before.

So a run is a function of (configuration, step): resuming needs no saved random state, and the noise levels of coming
steps are known ahead. The keys in use are listed in docs/reproducibility.md.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.random import Generator


def key_of(seed: int, *parts: int | str) -> int:
    """A 128-bit key from a seed and the name and numbers of a draw."""
    text = json.dumps([seed, *parts], separators=(",", ":"))
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, *parts: int | str) -> Generator:
    """A fresh stream of random numbers (Philox, Salmon et al. 2011) for one key.

    Args:
        seed: the run's seed (``train.seed``).
        parts: what the draw is for and which one it is, as in ``stream(seed, "noise", step, micro, index)``.
    """
    from numpy.random import Generator, Philox

    return Generator(Philox(key=key_of(seed, *parts)))


def reseed_global(seed: int, *parts: int | str) -> None:
    """Seed the global generators for what still draws from them (LoRA dropout, adapter initialisation)."""
    import torch

    torch.manual_seed(key_of(seed, *parts) % 2**63)
