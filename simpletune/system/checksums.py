"""Compute checksums of whole files, and fingerprints of parts of large files, whose checksums are kept."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from simpletune.system.atomic import write_text
from simpletune.system.console import progress
from simpletune.system.options import Json
from simpletune.system.signals import poll

SAMPLED_CHUNKS, CHUNK = 64, 65536
SMALL = SAMPLED_CHUNKS * CHUNK  # bytes up to which 64 chunks of 64 KiB are all there is
SLOW = 2**30  # bytes whose checksum takes a second or more, so that it shows its progress
SETTLED = 2_000_000_000  # nanoseconds: a file that changed later than this ago may change again at the same time
SUMS = "checksums"  # the folder in a cache that keeps those of large files
MIB = 2**20

Span = tuple[int, int]  # first byte of a file, and the one after the last
_known: dict[tuple[Path, tuple[int, ...], str], str] = {}


def sha256_of(file: Path, size: int = sys.maxsize) -> str:
    """Return the SHA-256 of a file, or of its first ``size`` bytes if it grows meanwhile."""
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while part := handle.read(min(size, MIB)):
            digest.update(part)
            size -= len(part)
    return digest.hexdigest()


SUM = "checksum"  # of the other values of a small JSON file that decides something


def with_sum(values: Json) -> Json:
    """Add a checksum of the other values, which ``without_sum`` compares."""
    return {**values, SUM: hashlib.sha256(json.dumps(values).encode()).hexdigest()}


def without_sum(values: Json) -> Json:
    """Remove the checksum, which files of 0.1.0 lack. Raises ValueError if a value has changed since it was
    computed."""
    known, rest = values.get(SUM), {name: value for name, value in values.items() if name != SUM}
    if known is not None and known != with_sum(rest)[SUM]:
        raise ValueError("its checksum does not match")
    return rest


def fingerprint_of_spans(file: Path, about: str, spans: Sequence[Span], sums: Path | None = None) -> str:
    """Compute a fingerprint of ascending spans of a file, and of text about them, such as names, types and shapes;
    ``sums`` as for ``hash_content``."""
    first, last = spans[0][0], spans[-1][1]
    digest = hashlib.sha256(f"{about}:{last - first}".encode())
    hash_content(digest, file, [(first, last)] if last - first <= SMALL else spans, sums)
    return digest.hexdigest()[:16]


def hash_content(digest: hashlib._Hash, file: Path, spans: Sequence[Span], sums: Path | None = None) -> None:
    """Add every byte of spans of a file to a digest: themselves if they are one small span, else their SHA-256.

    Args:
        digest: is updated.
        file: to read.
        spans: of it.
        sums: the cache whose folder ``checksums`` keeps those of large files, so that only a changed file is read
            again; None: this process alone remembers them.
    """
    if len(spans) > 1 or spans[0][1] - spans[0][0] > SMALL:
        digest.update(_kept_sum(file.resolve(), spans, sums).encode())
        return
    # In this order, some bytes twice: releases up to 0.1.0, which sampled larger files, named their caches by it.
    ((start, end),) = spans
    size = end - start
    with open(file, "rb") as handle:
        for number in range(SAMPLED_CHUNKS):
            handle.seek(start + number * max(size - CHUNK, 0) // (SAMPLED_CHUNKS - 1))
            digest.update(handle.read(min(CHUNK, size)))
            if size <= CHUNK:
                break


def _kept_sum(file: Path, spans: Sequence[Span], sums: Path | None) -> str:
    """Return the SHA-256 of spans of a file, computed unless it is known of the file as it is."""
    from simpletune.system.locks import wait_for_lock  # filelock is 20 modules, which `check` does not need

    which, state = ",".join(f"{start}-{end}" for start, end in spans), _state(file)
    if found := _known.get((file, state, which)):
        return found
    place = None if sums is None else sums / SUMS / f"{hashlib.sha256(str(file).encode()).hexdigest()[:24]}.json"
    held = _read(place, state)
    if which not in held:
        # Processes that start together compute it once.
        waiting = f"checksum of {file.name}: waiting for another process"
        with nullcontext() if place is None else wait_for_lock(place.with_suffix(".lock"), waiting):
            held = _read(place, state)
            if which not in held:
                held[which] = _sha256(file, spans)
                _keep(place, file, state, held)
    if _is_settled(state) and _state(file) == state:
        _known[file, state, which] = held[which]
    return held[which]


def _state(file: Path) -> tuple[int, ...]:
    """Return what changes with a file. The time of the last change of its data can be set back, that of its status
    cannot (on Windows it is the time of creation)."""
    found = file.stat()
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _is_settled(state: tuple[int, ...]) -> bool:
    return time.time_ns() - max(state[2:]) > SETTLED


def _sha256(file: Path, spans: Sequence[Span]) -> str:
    digest, size = hashlib.sha256(), sum(end - start for start, end in spans)
    shown = progress(f"checksum of {file.name}", -(-size // MIB), "MiB") if size >= SLOW else nullcontext(lambda: None)
    with shown as count:
        for part in _parts(file, spans):
            digest.update(part)
            count()
            poll()
    return digest.hexdigest()


def _parts(file: Path, spans: Sequence[Span]) -> Iterator[bytes]:
    with open(file, "rb") as handle:
        for start, end in spans:
            handle.seek(start)
            while start < end and (part := handle.read(min(MIB, end - start))):
                start += len(part)
                yield part


def _read(place: Path | None, state: tuple[int, ...]) -> dict[str, str]:
    """Read the checksums that are kept of a file in this state; a damaged record is none."""
    if place is None:
        return {}
    try:
        found = without_sum(dict(json.loads(place.read_text(encoding="utf-8"))))
        return dict(found["sums"]) if found["state"] == list(state) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _keep(place: Path | None, file: Path, state: tuple[int, ...], held: dict[str, str]) -> None:
    """Keep checksums of a file that has not changed since, nor just before, they were computed."""
    if place is None or not _is_settled(state) or _state(file) != state:
        return
    text = json.dumps(with_sum({"file": str(file), "state": list(state), "sums": held}))
    with suppress(OSError):  # a cache that is read-only: the next start computes it again
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, text, shared=True)
