"""Encoded samples by key: the interface of a cache, and its simplest form.

A sample is what one read brings: a picture's latents with their mask, or a prompt's embeddings by all encoders. In a
``FileCache`` each is a safetensors file, whose name is a hash of everything that its content depends on: a changed
caption, picture or mask gets a new file, and a picture is never paired with another picture's caption. Files are
written atomically, so a killed run leaves no partial file. Each stores the CRC-32 of its content to detect later
damage; a damaged file is renamed and encoded again. ``shard_cache.py`` has the form for many samples.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.data.samples import Crop
from simpletune.data.sources.masks import mask_identity
from simpletune.data.storage.claims import ALONE, KeyedFolder, KeyRange
from simpletune.system.atomic import quarantine, remove
from simpletune.system.console import say
from simpletune.system.locks import Ranges
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import TYPES, read_header, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

LATENTS_VERSION = 2  # increment when the crop of a picture or its encoding changes
READ_WHOLE = 4 * 2**30  # bytes; if a run's samples exceed this, only headers are checked when it starts
REMEMBERED = 2**16  # keys whose checksum a process verifies once; it verifies others each time

TensorPlace = tuple[str, str, tuple[int, ...], int]
"""A tensor of a sample: its name, safetensors type, shape, and offset in bytes from the sample's start."""
Layout = tuple[TensorPlace, ...]


class DamagedSample(Exception):
    """Report that a sample's bytes differ from what was stored."""


class Cache(ABC):
    """Tensors by key, of which a process encodes those that are lacking."""

    folder: Path
    """This machine's folder; its name identifies the encoder."""
    remote = False
    """Whether samples come from an object store."""
    local_limit = 0
    """The most bytes of remote samples that are kept on this machine."""
    waited = 0.0
    """Seconds that ``load`` has waited for an object store."""

    @abstractmethod
    def __contains__(self, key: str) -> bool: ...

    @abstractmethod
    def lacking(self, keys: Iterable[str], share: KeyRange = ALONE) -> list[str]:
        """Return the keys that still have to be encoded. Sets damaged samples aside and says so.

        Verifies the checksums if the samples take at most ``READ_WHOLE`` bytes in total and are on this machine.
        Otherwise checks only headers and lengths; the content is then verified at first use.

        Args:
            keys: the keys.
            share: verify the samples of this share only; other processes verify theirs.

        Raises:
            UserError: an object store does not answer.
        """

    @abstractmethod
    def claim(self, keys: Iterable[str], share: KeyRange = ALONE, together: int = 1) -> Iterator[list[str]]:
        """Claim keys to encode, as ``KeyedFolder.claim`` does.

        Raises:
            UserError: an object store does not answer. What was encoded is kept, and the next start stores it.
        """

    @abstractmethod
    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a key.

        Raises:
            UserError: the disk is full; no partial file remains.
        """

    def load(self, key: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Load a key's tensors; their checksum is verified once per process, and whenever they come from a store.

        Args:
            key: the key.
            only: the names of the tensors to return; reads no others once the checksum is verified. None: all.

        Raises:
            FileNotFoundError: they were never stored, or have been deleted.
            ValueError: the file was written for another key.
            UserError: the sample is damaged and has been set aside, or an object store does not answer.
        """
        try:
            return self._load(key, only)
        except DamagedSample as reason:
            raise UserError(
                f"{reason}: {self._set_aside(key)}. Restart, or continue with --resume latest, to encode it again"
            ) from None

    @abstractmethod
    def _load(self, key: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Load a key's tensors as ``load`` does; raise ``DamagedSample`` if they are damaged."""

    @abstractmethod
    def quarantine(self, key: str) -> str:
        """Set a sample aside, so that it is encoded again; return the path or URL that shows it."""

    @abstractmethod
    def _set_aside(self, key: str) -> str:
        """Set a sample aside; return words for what was done."""

    def size_of(self, key: str) -> int:
        """Return the size in bytes of a sample that is worth fetching ahead; 0: none, or it is on this machine."""
        return 0

    def fetch(self, key: str) -> None:
        """Fetch a sample from an object store, unless it is here. Raises UserError if the store fails or it is
        damaged."""
        assert not self.remote, "a cache in an object store has its own"


class FileCache(KeyedFolder, Cache):
    """A folder with a file for each sample. ``encoder`` identifies what writes them, since the files of two encoders
    have the same names; empty, as in files before November 2026: unknown."""

    def __init__(self, folder: Path, lock: Path | None = None, encoder: str = ""):
        super().__init__(folder, lock)
        self.encoder = encoder
        self.sound: set[str] = set()
        """Keys whose checksum this process has verified."""

    def file(self, key: str) -> Path:
        return self.folder / f"{name_of(key)}.safetensors"

    def lacking(self, keys: Iterable[str], share: KeyRange = ALONE) -> list[str]:
        wanted = list(dict.fromkeys(keys))
        there = [key for key in wanted if share.owner(key) == share.number and key in self and key not in self.sound]
        whole = _bytes(map(self.file, there)) <= READ_WHOLE
        for key in there:
            self._set_aside_if(partial(self._damage, key, whole), self.file(key), "; encoding it again")
        return [key for key in wanted if key not in self]

    def set_damaged_aside(self, chosen: Callable[[Path], bool]) -> None:
        """Verify the chosen files as ``lacking`` does, whatever their keys are; set damaged ones aside and say so."""
        named = (file for file in sorted(self.folder.glob("*.safetensors")) if re.fullmatch("[0-9a-f]{32}", file.stem))
        files = list(filter(chosen, named))
        whole = _bytes(files) <= READ_WHOLE
        for file in files:
            self._set_aside_if(partial(self._damage_of, file, whole), file)

    def _set_aside_if(self, damage: Callable[[], str], file: Path, then: str = "") -> None:
        """Set a file aside if it is damaged, and say so and what comes then."""
        if not damage():
            return
        place = int(file.stem[:15], 16)  # of its key
        with Ranges(self._lock) as ranges, ranges.hold(place, place, wait=True):
            if reason := damage():  # unless another process has replaced it meanwhile
                self.sound = {key for key in self.sound if self.file(key) != file}
                with suppress(FileNotFoundError):  # ``load`` of another process has set it aside
                    say(f"cache   {reason}: renamed to {quarantine(file).name}{then}")

    def _damage(self, key: str, whole: bool) -> str:
        """Describe what is wrong with a key's file; empty if nothing is, or if there is no file."""
        try:
            self._load(key) if whole else read_header(self.file(key))
        except FileNotFoundError:  # another process has set it aside or joined it into a shard
            return ""
        except (DamagedSample, ValueError, KeyError, UserError) as error:
            return str(error).partition(". ")[0]
        return ""

    def _damage_of(self, file: Path, whole: bool) -> str:
        """Describe what is wrong with a file whose key is not known; empty if nothing is, or if there is no file."""
        try:
            key = str((read_header(file).get("__metadata__") or {}).get("key"))
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, AttributeError, UserError) as error:
            return str(error).partition(". ")[0]
        if self.file(key) != file:
            return f"{file} was written for another key"
        return "" if key in self.sound else self._damage(key, whole)

    def remove_unfinished(self, ranges: Ranges) -> None:
        """Delete the partial files that no process is writing."""
        for part in self.folder.glob(".*.part"):
            digits = re.match("[0-9a-f]{0,15}", part.name[1:])  # digits of the key's hash
            place = int((digits and digits[0]) or "0", 16)
            with ranges.hold(place, place) as claimed:
                if claimed and ranges.sure:  # otherwise its writer may be running
                    remove(part)

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        about = {"key": key, "crc32": checksum(host)} | ({"encoder": self.encoder} if self.encoder else {})
        write_safetensors(host, self.file(key), about)

    def quarantine(self, key: str) -> str:
        self.sound.discard(key)
        try:
            return str(quarantine(self.file(key)))
        except FileNotFoundError:  # another process has set it aside
            return f"{self.file(key)}.damaged"

    def _set_aside(self, key: str) -> str:
        return f"renamed to {Path(self.quarantine(key)).name}"

    def _load(self, key: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
        file, whole = self.file(key), only is None or key not in self.sound
        try:
            with open(file, "rb", buffering=0) as handle:
                size = os.fstat(handle.fileno()).st_size
                content = _read(handle, 0, size if whole else 8)
                if not whole:
                    content = _read(handle, 0, min(size, 8 + int.from_bytes(content, "little")))
                about, start, layout = _parse_header(content, size)
                if not whole:
                    layout = tuple(place for place in layout if place[0] in (only or ()))
                    first, end = span(layout)
                    content, start = _read(handle, start + first, start + end), -first
                tensors = sample_tensors(content, layout, start)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DamagedSample(f"{file} is damaged ({' '.join(str(error).split())[:120]})") from None
        if self.encoder and about.get("encoder", self.encoder) != self.encoder:
            raise DamagedSample(f"{file} was written by another encoder")
        if about.get("key") != key:
            raise ValueError(f"{file} was written for another key. Delete it and restart")
        if key not in self.sound:
            if about.get("crc32") != checksum(tensors):
                raise DamagedSample(f"{file} is damaged (its checksum does not match)")
            self.note_sound(key)
        return tensors if only is None else {name: tensors[name] for name in only if name in tensors}

    def note_sound(self, key: str) -> None:
        """Remember that a key's checksum was verified."""
        if len(self.sound) < REMEMBERED:
            self.sound.add(key)


def _bytes(files: Iterable[Path]) -> int:
    """Sum the sizes of files in bytes, without those that another process has just removed."""
    size = 0
    for file in files:
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def name_of(key: str) -> str:
    """Name a key's sample: 32 hexadecimal digits of its hash, the first of which are its place."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Compute the CRC-32 of CPU tensors, including their names, types and shapes."""
    import torch

    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def _read(handle: FileIO, start: int, end: int) -> bytearray:
    """Read a file's bytes from ``start`` up to ``end``, exclusively. Raises ValueError if there are fewer."""
    content = bytearray(end - start)
    handle.seek(start)
    done = 0
    while done < len(content):  # one call reads 2 GiB at most
        got = handle.readinto(memoryview(content)[done:])
        if not got:
            raise ValueError("it is truncated")
        done += got
    return content


def _parse_header(content: bytearray, size: int) -> tuple[dict[str, str], int, Layout]:
    """Parse a safetensors header from a file's first bytes and its size: its strings, the first byte after it, and its
    tensors. Raises ValueError, KeyError, TypeError or AttributeError if it is damaged or the file truncated."""
    start = 8 + int.from_bytes(content[:8], "little")
    if start > len(content):
        raise ValueError("its header is truncated")
    header = json.loads(content[8:start])
    about = header.pop("__metadata__", None) or {}
    layout = tuple((name, e["dtype"], tuple(e["shape"]), e["data_offsets"][0]) for name, e in header.items())
    if start + span(layout)[1] != size:
        raise ValueError("its size is not its header's")
    return about, start, layout


def span(layout: Layout) -> tuple[int, int]:
    """Return the first byte of some tensors, and the one after the last. Raises KeyError if a type is unknown."""
    starts = [offset for *_, offset in layout]
    ends = [offset + TYPES[kind].bytes * math.prod(shape) for _, kind, shape, offset in layout]
    return min(starts, default=0), max(ends, default=0)


def sample_tensors(content: bytearray, layout: Layout, start: int = 0) -> dict[str, Tensor]:
    """Return a sample's tensors, which share the memory of ``content``, where their offsets begin at ``start``. Raises
    ValueError if there are too few bytes, or a type is unknown."""
    import torch

    found = {}
    for name, kind, shape, offset in layout:
        if kind not in TYPES:
            raise ValueError(f"unknown type {kind}")
        dtype, count = getattr(torch, TYPES[kind].torch), math.prod(shape)
        if count:
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=start + offset)
        else:
            flat = torch.empty(0, dtype=dtype)
        found[name] = flat.view(shape)
    return found


def crop_key(crop: Crop) -> str:
    """Return the key of a picture's latents and their mask, or of those of a picture with a hole: all that they depend
    on apart from the autoencoder."""
    if crop.hole is not None and crop.hole.kind == "whole":  # nothing of the picture is left
        return json.dumps({"bucket": crop.bucket, "hole": crop.hole.identity(), "version": LATENTS_VERSION})
    cut = {"bucket": crop.bucket, "offset": crop.offset, "flip": crop.flip, "version": LATENTS_VERSION}
    masked = crop.image.mask is not None and (crop.hole is None or crop.hole.kind == "own")
    mask = {"mask": mask_identity(crop)} if masked else {}
    hole = {} if crop.hole is None else {"hole": crop.hole.identity()}
    changes = crop.augmentation.changes()
    augmented = {"augmentation": changes} if changes else {}  # older caches have no such key
    decoded = {"decoding": crop.image.decoding.changes} if crop.image.decoding.changes else {}  # nor this one
    return json.dumps({"sha256": crop.image.digest, **cut, **augmented, **decoded, **mask, **hole}, sort_keys=True)
