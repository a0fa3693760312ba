"""Fingerprints of files: every byte counts, a file that has not changed is read once."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletune.system import checksums
from simpletune.system.checksums import CHUNK, SMALL, hash_content
from simpletune.system.model_folder import fingerprint

LARGE = SMALL + 12_345  # bytes


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read whole; nothing is known of any, and all were last changed long ago."""
    found: list[Path] = []
    real = checksums._sha256
    monkeypatch.setattr(checksums, "_sha256", lambda file, spans: found.append(file) or real(file, spans))
    monkeypatch.setattr(checksums, "SETTLED", -1)
    forget()
    return found


def forget() -> None:
    """As a new process begins."""
    checksums._known.clear()


def print_of(file: Path, sums: Path | None = None, spans: list[tuple[int, int]] | None = None) -> str:
    digest = hashlib.sha256()
    hash_content(digest, file, spans or [(0, file.stat().st_size)], sums)
    return digest.hexdigest()


def written(file: Path, size: int) -> Path:
    file.write_bytes(bytes(n % 251 for n in range(1000)) * (size // 1000) + bytes(size % 1000))
    return file


def change(file: Path, place: int) -> None:
    """Change a bit, and set the time back, as some tools do."""
    before = file.stat()
    with open(file, "r+b") as handle:
        handle.seek(place)
        byte = handle.read(1)[0]
        handle.seek(place)
        handle.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("place", [0, CHUNK + 1, LARGE // 2, LARGE - CHUNK - 1, LARGE - 1])
def test_a_bit_of_a_large_file_counts_wherever_it_is_and_whatever_the_time(place: int, tmp_path: Path) -> None:
    file = written(tmp_path / "weights", LARGE)
    before = print_of(file, tmp_path)
    time.sleep(0.01)  # beyond a tick of the file system's clock
    change(file, place)
    assert print_of(file, tmp_path) != before
    change(file, place)
    assert print_of(file, tmp_path) == before


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, SMALL - 1, SMALL])
def test_small_files_are_known_by_the_names_that_their_caches_have_had(size: int, tmp_path: Path) -> None:
    """And 64 chunks of 64 KiB leave none of their bytes out."""
    data = written(tmp_path / "weights", size).read_bytes()
    starts = [number * max(size - CHUNK, 0) // 63 for number in range(64 if size > CHUNK else 1)]
    assert all(start - before <= CHUNK for before, start in zip(starts, starts[1:], strict=False))
    sampled = hashlib.sha256(b"".join(data[start : start + CHUNK] for start in starts))
    assert print_of(tmp_path / "weights") == sampled.hexdigest()


def test_a_row_of_an_embedding_counts_and_the_place_of_a_model_does_not(tmp_path: Path) -> None:
    """256 bytes of 5 MiB, as where a learned token is written into a text encoder."""
    folder = tmp_path / "text_encoder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = written(folder / "model.safetensors", 5 * 2**20)
    before = fingerprint(folder, tmp_path)
    assert fingerprint(shutil.copytree(folder, tmp_path / "copy"), tmp_path) == before == fingerprint(folder)
    for byte in range(3_000_000, 3_000_256):
        change(file, byte)
    assert fingerprint(folder, tmp_path) != before
    (tmp_path / "copy" / "config.json").write_text("{} ")
    assert fingerprint(tmp_path / "copy", tmp_path) != before


def test_only_spans_count(tmp_path: Path) -> None:
    file, spans = written(tmp_path / "weights", LARGE), [(10, 20), (5 * CHUNK, LARGE)]
    before = print_of(file, None, spans)
    change(file, 25)
    assert print_of(file, None, spans) == before
    change(file, 15)
    assert print_of(file, None, spans) != before


def test_a_file_is_read_again_only_if_it_has_changed(tmp_path: Path, read: list[Path]) -> None:
    file, sums = written(tmp_path / "weights", LARGE), tmp_path / "cache"
    first = print_of(file, sums)
    assert print_of(file, sums) == first and read == [file]
    forget()
    assert print_of(file, sums) == first and len(read) == 1, "another process has not used what the first kept"
    assert print_of(file, sums, [(0, SMALL + 1)]) != first and len(read) == 2
    forget()
    assert print_of(file, sums) == first and len(read) == 2, "one span's checksum replaced another's"
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    assert print_of(copy, sums) == first and len(read) == 3, "a copy has other contents"
    os.utime(file, ns=(0, 0))
    assert print_of(file, sums) == first and len(read) == 4


@pytest.mark.parametrize(
    "damage", [lambda text: "{", lambda text: text.replace("sums", "zums"), lambda text: flipped(text)]
)
def test_a_damaged_record_is_none(damage: Callable[[str], str], tmp_path: Path, read: list[Path]) -> None:
    file, sums = written(tmp_path / "weights", LARGE), tmp_path / "cache"
    first = print_of(file, sums)
    (record,) = (sums / "checksums").glob("*.json")
    record.write_text(damage(record.read_text()))
    forget()
    assert print_of(file, sums) == first and len(read) == 2


def flipped(text: str) -> str:
    """With another digit in the first checksum."""
    at = text.index('"sums"') + len('"sums": {"0-4206649": "')
    return text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]


def test_what_has_just_changed_is_not_remembered(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next change may have the same time."""
    monkeypatch.setattr(checksums, "SETTLED", 60 * 10**9)
    file, sums = written(tmp_path / "weights", LARGE), tmp_path / "cache"
    assert print_of(file, sums) == print_of(file, sums) and len(read) == 2
    assert not list(sums.glob("checksums/*.json"))


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path, read: list[Path]) -> None:
    file = written(tmp_path / "weights", LARGE)
    (tmp_path / "cache").write_text("a file")
    first = print_of(file, tmp_path / "cache")
    forget()
    assert print_of(file, tmp_path / "cache") == first and len(read) == 2
