"""Counter-based random numbers: every draw depends only on its key, never on earlier draws.

So a run is a function of (configuration, step): resuming needs no saved random state, and the noise levels of future
steps are known in advance. tests/reference/README.md lists the keys.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.random import Generator


def random_key(seed: int, *parts: int | str) -> int:
    """Derive a 128-bit key from a seed and the name and numbers of a draw."""
    text = json.dumps([seed, *parts], separators=(",", ":"))
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, *parts: int | str) -> Generator:
    """Create a stream of random numbers for one key (Philox, Salmon et al. 2011): the run's seed, and purpose and index
    of the draw, as in ``stream(seed, "noise", step, micro, index)``."""
    from numpy.random import Generator, Philox

    return Generator(Philox(key=random_key(seed, *parts)))


def reseed_global(seed: int, *parts: int | str) -> None:
    """Seed the global generators for code that still uses them (LoRA dropout, adapter initialisation)."""
    import torch

    number = random_key(seed, *parts) % 2**63
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)  # manual_seed would format the call stack for every absent backend
