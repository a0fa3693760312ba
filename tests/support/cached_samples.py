"""Samples for tests of caches, and a function that fills a cache with them."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from simpletune.data.storage.cache import Cache
from simpletune.data.storage.claims import ALONE, KeyRange

KEYS = [f"prompt {number}, {'é' * (number % 3)}" for number in range(23)]


def sample(key: str) -> dict[str, torch.Tensor]:
    """Tensors of several types, whose bytes are no multiple of eight."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    count = 1 + len(key) % 3
    return {
        "hidden": torch.randn(count, 7, generator=generator).to(torch.bfloat16),
        "pooled": torch.randn(3, generator=generator),
        "tokens": torch.tensor([len(key)]),
        "mask": torch.randint(0, 256, (1, 3, 5), generator=generator).to(torch.uint8),
        "none": torch.empty(0, dtype=torch.float32),
    }


def fill(cache: Cache, keys: list[str] = KEYS, share: KeyRange = ALONE) -> list[str]:
    """Encode missing samples as the prepare stages do."""
    made = []
    for group in cache.claim(cache.lacking(keys, share), share, 4):
        for key in group:
            cache.save(key, sample(key))
            made.append(key)
    return made


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def require_all(cache: Cache, keys: list[str] = KEYS) -> None:
    for key in keys:
        found, expected = cache.load(key), sample(key)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
