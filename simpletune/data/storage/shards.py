"""Shards: the cached samples of many keys in one safetensors file, which any reader of the format opens; and where
they lie, in a folder or in an object store.

A sample's tensors are called ``NAME/tensor``, where NAME is the hash of its key as in the cache of single files. They
lie next to each other, so that one range of bytes holds the sample. The header's metadata maps each NAME to its CRC-32
and key (``CRC32 KEY``), so that an index can always be rebuilt from the shards. A shard's own name is the start of the
SHA-256 of its content, so the same samples always give the same shard. A place has

    shards/NAME.safetensors   the shards
    index.parquet             where each sample is; rebuilt from the shards if missing or damaged
    damaged/SAMPLE.SHARD      an empty file: this shard's sample is damaged and no longer used
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletune.data.storage.cache import Layout
from simpletune.system.atomic import atomic_file, write_text
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header
from simpletune.system.stores.store import ObjectChanged, Store, send_with_retries

SUFFIX = ".safetensors"
SHARDS, INDEX, DAMAGED = "shards", "index.parquet", "damaged"
ALIGNED = 8  # bytes; the largest type of a tensor
PADDING = "-"  # name of the padding after a sample whose size is not a multiple of ALIGNED
HEADER_BYTES = 2**27  # at most


@dataclass(frozen=True)
class SampleLocation:
    """Where a sample is stored."""

    name: str  # the hash of its key, 32 hexadecimal digits
    shard: str  # its name
    start: int  # its first byte in the shard
    size: int  # in bytes, without padding
    crc32: int  # of its tensors (``data.storage.cache.checksum``)
    layout: Layout
    key: str = ""  # the cache's key for it; empty if it was not read


def write_shard(files: Sequence[Path], folder: Path, again: int = 0) -> tuple[str, Path]:
    """Join single cached samples (``FileCache.save``) into a shard.

    Args:
        files: the samples.
        folder: the folder to write the shard to.
        again: how many shards of the same samples are damaged; changes the name.

    Returns:
        The shard's name and its file.

    Raises:
        UserError: a sample's file is damaged.
        DiskFull: the disk is full; no partial file remains.
    """
    entries, about, offset = dict[str, object](), {"format": "pt", **({"again": f"{again}"} if again else {})}, 0
    for file in files:
        header = read_header(file)
        known = header.pop("__metadata__", None) or {}
        if not {"key", "crc32"} <= set(known):
            raise UserError(f"{file} is not a cached sample. Remove it")
        name, end = file.stem, 0
        about[name] = f"{known['crc32']} {known['key']}"
        for tensor, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            entries[f"{name}/{tensor}"] = {**entry, "data_offsets": [offset + begin, offset + end]}
        padding = -end % ALIGNED
        if padding:
            places = [offset + end, offset + end + padding]
            entries[f"{name}/{PADDING}"] = {"dtype": "U8", "shape": [padding], "data_offsets": places}
        offset += end + padding
    text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNED)
    digest, target = hashlib.sha256(), folder / f"shard{SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(target, len(text) + offset, shared=True) as part, open(part, "wb") as out:
        for chunk in (len(text).to_bytes(8, "little"), text, *map(_content, files)):
            out.write(chunk)
            digest.update(chunk)
    return digest.hexdigest()[:32], target


def _content(file: Path) -> bytes:
    """Return a file's content after its header, padded."""
    with open(file, "rb") as handle:
        handle.seek(8 + int.from_bytes(handle.read(8), "little"))
        content = handle.read()
    return content.ljust(len(content) + -len(content) % ALIGNED, b"\0")


def sample_locations(shard: str, header: Mapping[str, object], start: int) -> list[SampleLocation]:
    """Locate the samples of a shard from its header and the first byte after it. Raises UserError if it is not a
    shard's."""
    about = header.get("__metadata__")
    places: dict[str, list[tuple[int, int, str, str, tuple[int, ...]]]] = {}
    try:
        assert isinstance(about, dict)
        for full, entry in header.items():
            name, _, tensor = full.partition("/")
            if full != "__metadata__" and tensor != PADDING:
                assert isinstance(entry, dict)
                begin, end = map(int, entry["data_offsets"])
                places.setdefault(name, []).append((begin, end, tensor, entry["dtype"], tuple(entry["shape"])))
        rows = []
        for name, found in places.items():
            crc32, _, key = about[name].partition(" ")
            found.sort()
            first, last = found[0][0], found[-1][1]
            layout = tuple((tensor, kind, shape, begin - first) for begin, _, tensor, kind, shape in found)
            rows.append(SampleLocation(name, shard, start + first, last - first, int(crc32, 16), layout, key))
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"the shard {shard} is damaged: its header is not a shard's. Remove it") from None
    return rows


def parse_header(read: Callable[[int], bytes], shard: str, first: int) -> tuple[dict[str, object], int]:
    """Read a shard's header, and return it with the first byte after it.

    Args:
        read: returns so many of the shard's first bytes, or fewer if it has no more.
        shard: its name.
        first: how many bytes to read first; a longer header takes a second read.

    Raises:
        UserError: this is not a safetensors file.
    """
    content = read(first)
    end = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 10 <= end <= 8 + HEADER_BYTES:
        raise UserError(f"the shard {shard} is damaged: it does not start with a header. Remove it")
    if len(content) < end and len(content := read(end)) < end:
        raise UserError(f"the shard {shard} is damaged: it ends within its header. Remove it")
    try:
        return json.loads(content[8:end]), end
    except ValueError:
        raise UserError(f"the shard {shard} is damaged: its header is not JSON. Remove it") from None


class ShardStore:
    """The shards of a cache.

    Args:
        store: where they lie.
        journal: a local path whose time of change tells when a process of this machine last stored a shard.
    """

    def __init__(self, store: Store, journal: Path):
        self.store, self._journal = store, journal

    def __str__(self) -> str:
        return self.store.url

    def names(self) -> dict[str, int] | None:
        """Return the sizes of all shards by name; None if they cannot be listed, on a web server."""
        if self.store.read_only:
            return None
        found = send_with_retries(lambda: self.store.keys(f"{SHARDS}/"))
        return {Path(key).name[: -len(SUFFIX)]: size for key, size in found.items() if key.endswith(SUFFIX)}

    def list_damaged(self) -> set[tuple[str, str]]:
        """Return the samples that are no longer used, as pairs of a sample's name and its shard."""
        if self.store.read_only:
            return set()
        pairs = [Path(key).name.partition(".") for key in send_with_retries(lambda: self.store.keys(f"{DAMAGED}/"))]
        return {(sample, shard) for sample, _, shard in pairs}

    def read(self, shard: str, start: int, end: int) -> bytearray:
        return self.store.read_range(f"{SHARDS}/{shard}{SUFFIX}", start, end)

    def put(self, shard: str, file: Path) -> None:
        """Store a shard atomically; moves or removes the file."""
        send_with_retries(lambda: self.store.upload(file, f"{SHARDS}/{shard}{SUFFIX}"))
        if self.store.remote:
            file.unlink(missing_ok=True)
            self._journal.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._journal, f"{shard}\n", shared=True)

    def set_aside(self, name: str, shard: str) -> str:
        """Mark a sample as damaged, and return where this is recorded. Raises UserError on a web server."""
        if self.store.read_only:
            raise UserError(
                f"output.cache: the sample {name} of shard {shard} in {self} is damaged, and this can only be read. "
                "Encode it again where the cache is filled, or set output.cache to a folder"
            )
        key = f"{DAMAGED}/{name}.{shard}"
        try:
            send_with_retries(lambda: self.store.replace(key, b"", None))
        except ObjectChanged:
            pass  # another process has found it too
        return f"{self}/{key}"

    def stamp(self) -> int:
        """Return a number that changes when another process of this machine has stored a shard."""
        try:
            return self._journal.stat().st_mtime_ns
        except FileNotFoundError:
            return 0
