"""Compute checksums of whole files, and fingerprints of large files from samples of their bytes."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

SAMPLED_CHUNKS, CHUNK = 64, 65536


def sha256_of(file: Path, size: int = sys.maxsize) -> str:
    """The SHA-256 of a file, or of its first ``size`` bytes if it grows meanwhile."""
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while part := handle.read(min(size, 2**20)):
            digest.update(part)
            size -= len(part)
    return digest.hexdigest()


def fingerprint_of_range(file: Path, about: str, start: int, end: int) -> str:
    """Compute a fingerprint of the bytes from ``start`` to ``end`` of a file from samples, and of text about them, such
    as names, types and shapes."""
    digest = hashlib.sha256(f"{about}:{end - start}".encode())
    hash_samples(digest, file, start, end)
    return digest.hexdigest()[:16]


def hash_samples(digest: hashlib._Hash, file: Path, start: int, end: int) -> None:
    """Add 64 evenly spaced chunks of 64 KiB from a range of a file to a digest: 10 GB take no longer than 10 MB."""
    size = end - start
    with open(file, "rb") as handle:
        for number in range(SAMPLED_CHUNKS):
            handle.seek(start + number * max(size - CHUNK, 0) // (SAMPLED_CHUNKS - 1))
            digest.update(handle.read(min(CHUNK, size)))
            if size <= CHUNK:
                break
