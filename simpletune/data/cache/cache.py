"""The cache of latents and prompt embeddings: small, content-addressed safetensors files.

A file's name is a hash of everything that its content depends on, so a changed caption or picture gets a new file, and
a picture is never paired with another picture's caption. Files are written atomically: a killed run leaves no partial
file. Each stores the CRC-32 of its content to detect later damage; a damaged file is renamed and encoded again.

Processes that share a folder divide the work, whether they belong to one run or several, on one machine or several: the
process that locks a range of keys encodes them, and its lock ends with it.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.data.samples import Crop
from simpletune.system.atomic import quarantine, remove
from simpletune.system.console import say
from simpletune.system.locks import Ranges, lock_of
from simpletune.system.options import UserError, plural
from simpletune.system.safetensors_file import read_header, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

LATENTS_VERSION = 2  # increment when the crop of a picture or its encoding changes
READ_WHOLE = 4 * 2**30  # bytes; if a run's files exceed this, only their headers are checked when it starts
REMEMBERED = 2**16  # keys whose checksum a process verifies once; it verifies others each time
PLACES = 2**60  # number of places for keys: 15 hexadecimal digits of the hash that names a key's file
_DAMAGE = (ValueError, KeyError, UserError)


@dataclass(frozen=True)
class KeyRange:
    """Share of the keys that a process encodes first: those whose hash lies in its part of the hash range.

    Args:
        number: index of the process, from 0.
        of: number of processes.
    """

    number: int = 0
    of: int = 1

    def owner(self, key: str) -> int:
        """Return the index of the process whose share contains a key."""
        return place_of(key) * self.of // PLACES

    def count(self, keys: int) -> int:
        """Return about how many of ``keys`` keys each process encodes; at least 1."""
        return -(-keys // self.of) or 1


ALONE = KeyRange()


class KeyedFolder:
    """Folder with a file for each key, filled by several processes.

    Args:
        folder: the folder.
        lock: file by which processes lock ranges of keys; None: the folder's own.
    """

    def __init__(self, folder: Path, lock: Path | None = None):
        self.folder, self._lock = folder, lock or lock_of(folder)

    def file(self, key: str) -> Path:
        """Return the file of a key."""
        raise NotImplementedError

    def __contains__(self, key: str) -> bool:
        return self.file(key).exists()

    def claimed(self, keys: Iterable[str], share: KeyRange = ALONE, together: int = 1) -> Iterator[list[str]]:
        """Claim keys to encode, in groups. A group stays locked against other processes until the next one is
        requested.

        Claims the keys of the share first, then keys that other processes have not begun, from the end of their shares,
        and last, after waiting, keys that others locked but did not write. Deletes the partial files of killed
        processes.

        Args:
            keys: the keys to encode.
            share: the share of this process.
            together: largest number of keys in a group.

        Yields:
            Groups of keys that are not in the cache. Each key is yielded at most once.
        """
        keys = list(dict.fromkeys(keys))
        by_owner: dict[int, list[str]] = {}
        for key in sorted(keys, key=place_of):
            by_owner.setdefault(share.owner(key), []).append(key)
        tried = _split(by_owner.get(share.number, []), together)
        for later in range(1, share.of):
            tried += _split(by_owner.get((share.number + later) % share.of, []), together)[::-1]
        order = {key: number for number, key in enumerate(keys)}
        with self._ranges() as ranges:
            self._remove_unfinished(ranges)
            for group in self._claim_each(tried[::-1], ranges):
                lacking = sorted((key for key in group if key not in self), key=order.__getitem__)
                if lacking:
                    yield lacking
            self._remove_unfinished(ranges)  # left by processes killed in the meantime

    def _claim_each(self, tried: list[list[str]], ranges: Ranges) -> Iterator[list[str]]:
        """Yield each group, the last one first, while its range is locked. Splits groups that others hold, and yields
        them last."""
        held: list[list[str]] = []
        while tried:
            group = [key for key in tried.pop() if key not in self]
            with ranges.held(*_range(group)) if group else nullcontext(False) as claimed:
                if claimed:
                    yield group
                elif len(group) > 1:  # another process holds part of it
                    tried += _split(group, len(group) // 2)[::-1]
                else:
                    held.append(group)
        waiting = [group for group in held if group and group[0] not in self]
        if waiting:
            say(f"cache   waiting for {plural(len(waiting), 'file')} of {self.folder} that other processes encode")
        for group in waiting:
            with ranges.held(*_range(group), wait=True):
                yield group

    def _remove_unfinished(self, ranges: Ranges) -> None:
        """Delete the partial files that no process is writing."""
        raise NotImplementedError

    def _ranges(self) -> Ranges:
        return Ranges(self._lock)


class Cache(KeyedFolder):
    """A folder of content-addressed tensors.

    Args:
        folder: the folder; its name identifies the encoder.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._sound: set[str] = set()  # keys whose checksum this process has verified

    def file(self, key: str) -> Path:
        """Return the file that stores a key's tensors."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / f"{name}.safetensors"

    def lacking(self, keys: Iterable[str], share: KeyRange = ALONE) -> list[str]:
        """Return the keys that still have to be encoded. Renames and reports damaged files.

        Verifies the checksums if the files take at most ``READ_WHOLE`` bytes in total. Otherwise checks only headers
        and lengths; the content is then verified at first use.

        Args:
            keys: the keys.
            share: verify the files of this share only; other processes verify theirs.
        """
        wanted = list(dict.fromkeys(keys))
        there = [key for key in wanted if share.owner(key) == share.number and key in self and key not in self._sound]
        whole = sum(self.file(key).stat().st_size for key in there) <= READ_WHOLE
        for key in there:
            if self._damage(key, whole):
                self._set_aside(key, whole)
        return [key for key in wanted if key not in self]

    def _damage(self, key: str, whole: bool) -> str:
        """Describe what is wrong with a key's file; empty if nothing is, or if there is no file."""
        try:
            self._read(key) if whole else read_header(self.file(key))
        except FileNotFoundError:  # another process has set it aside
            return ""
        except _DAMAGE as error:
            return str(error).partition(". ")[0]
        return ""

    def _set_aside(self, key: str, whole: bool) -> None:
        """Rename a damaged file unless another process has replaced it meanwhile."""
        place = place_of(key)
        with self._ranges() as ranges, ranges.held(place, place, wait=True):
            if reason := self._damage(key, whole):
                say(f"cache   {reason}: renamed to {Path(self.quarantine(key)).name}; encoding it again")

    def _remove_unfinished(self, ranges: Ranges) -> None:
        """Delete the partial files that no process is writing."""
        for part in self.folder.glob(".*.part"):
            digits = re.match("[0-9a-f]{0,15}", part.name[1:])  # digits of the key's hash
            place = int((digits and digits[0]) or "0", 16)
            with ranges.held(place, place) as claimed:
                if claimed and ranges.sure:  # otherwise its writer may be running
                    remove(part)

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a key. The file's header records the key.

        Raises:
            UserError: the disk is full; no partial file remains.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        write_safetensors(host, self.file(key), {"key": key, "crc32": checksum(host)})

    def load(self, key: str) -> dict[str, Tensor]:
        """Load a key's tensors; the first load verifies their checksum.

        Raises:
            FileNotFoundError: the file was never written, or has been deleted.
            ValueError: the file was written for another key.
            UserError: the file is damaged; it has been renamed.
        """
        try:
            return self._read(key)
        except UserError as error:
            place = Path(self.quarantine(key))
            raise UserError(
                f"{error}: renamed to {place.name}. Restart, or continue with --resume latest, to encode it again"
            ) from None

    def is_sound(self, key: str) -> bool:
        """Whether this process has verified the checksum of a key's tensors."""
        return key in self._sound

    def quarantine(self, key: str) -> str:
        """Rename a key's file, so that it can be inspected and is encoded again; return its new path."""
        self._sound.discard(key)
        return str(quarantine(self.file(key)))

    def _read(self, key: str) -> dict[str, Tensor]:
        """Load a key's tensors and verify their checksum, once per process.

        Raises:
            UserError: the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        file = self.file(key)
        try:
            with safe_open(file, framework="pt") as handle:
                about = handle.metadata() or {}
                if about.get("key") != key:
                    raise ValueError(f"{file} was written for another key. Delete it and restart")
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}
        except (SafetensorError, OSError, RuntimeError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            if isinstance(error, RuntimeError):  # torch's, which opens the file a second time
                if file.exists():
                    raise
                raise FileNotFoundError(f"{file} was removed while it was opened") from None
            raise UserError(f"{file} is damaged ({' '.join(str(error).split())[:120]})") from None
        if key not in self._sound and about.get("crc32") != checksum(tensors):
            raise UserError(f"{file} is damaged (its checksum does not match)")
        if len(self._sound) < REMEMBERED:
            self._sound.add(key)
        return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of CPU tensors, including their names, types and shapes."""
    import torch

    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def place_of(key: str) -> int:
    """Map a key uniformly to an integer from 0 to ``PLACES``."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:15], 16)


def _split(keys: list[str], together: int) -> list[list[str]]:
    return [keys[start : start + together] for start in range(0, len(keys), together)]


def _range(group: list[str]) -> tuple[int, int]:
    return place_of(group[0]), place_of(group[-1])


def view_key(view: Crop) -> str:
    """Return everything that a picture's latents depend on, apart from the autoencoder."""
    cut = {"bucket": view.bucket, "offset": view.offset, "flip": view.flip, "version": LATENTS_VERSION}
    return json.dumps({"sha256": view.picture.digest, **cut}, sort_keys=True)
