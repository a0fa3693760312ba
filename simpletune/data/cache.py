"""The cache of latents and prompt embeddings: small, content-addressed safetensors files.

A file's name is a hash of everything that its content depends on, so a changed caption or picture gets a new file, and
a picture is never paired with another picture's caption. Files are written atomically: a killed run leaves no partial
file. Each stores the CRC-32 of its content to detect later damage; a damaged file is renamed and encoded again. When
several runs share a folder, one fills it while the others wait and then reuse its files.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.data.samples import View
from simpletune.options import UserError
from simpletune.system.atomic import quarantine
from simpletune.system.console import say
from simpletune.system.locks import lock_of, wait_for_lock
from simpletune.system.safetensors_file import read_header, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

LATENTS_VERSION = 2  # increment when the crop of a picture or its encoding changes
READ_WHOLE = 4 * 2**30  # bytes; if a run's files exceed this, only their headers are checked when it starts
_DAMAGE = (ValueError, KeyError, UserError)


class Cache:
    """A folder of content-addressed tensors.

    Args:
        folder: the folder; its name identifies the encoder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._sound: set[str] = set()  # keys whose checksum this process has verified

    def file(self, key: str) -> Path:
        """The file that stores a key's tensors."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / f"{name}.safetensors"

    def __contains__(self, key: str) -> bool:
        return self.file(key).exists()

    def lacking(self, keys: Iterable[str]) -> list[str]:
        """The keys that still have to be encoded. Renames and reports damaged files.

        Verifies the checksums if the files take at most ``READ_WHOLE`` bytes in total. Otherwise checks only headers
        and lengths; the content is then verified at first use.
        """
        wanted = list(dict.fromkeys(keys))
        there = [key for key in wanted if key in self and key not in self._sound]
        whole = sum(self.file(key).stat().st_size for key in there) <= READ_WHOLE
        for key in there:
            try:
                self._read(key) if whole else read_header(self.file(key))
            except _DAMAGE as error:
                reason = str(error).partition(". ")[0]
                say(f"cache   {reason}: renamed to {self.quarantine(key).name}; encoding it again")
        return [key for key in wanted if key not in self]

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Hold the folder's lock, waiting for any other process that fills it, and delete the partial files of killed
        processes."""
        with wait_for_lock(lock_of(self.folder), f"cache   waiting for another run to fill {self.folder}"):
            for part in self.folder.glob(".*.part"):
                part.unlink(missing_ok=True)
            yield

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
            place = self.quarantine(key)
            raise UserError(
                f"{error}: renamed to {place.name}. Restart, or continue with --resume latest, to encode it again"
            ) from None

    def quarantine(self, key: str) -> Path:
        """Rename a key's file, so that it can be inspected and is encoded again.

        Returns:
            The new path.
        """
        self._sound.discard(key)
        return quarantine(self.file(key))

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
        except (SafetensorError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise UserError(f"{file} is damaged ({' '.join(str(error).split())[:120]})") from None
        if key not in self._sound and about.get("crc32") != checksum(tensors):
            raise UserError(f"{file} is damaged (its checksum does not match)")
        self._sound.add(key)
        return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """The CRC-32 of CPU tensors, including their names, types and shapes."""
    import torch

    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def view_key(view: View) -> str:
    """Everything that a picture's latents depend on, apart from the autoencoder."""
    cut = {"bucket": view.bucket, "offset": view.offset, "flip": view.flip, "version": LATENTS_VERSION}
    return json.dumps({"sha256": view.picture.digest, **cut}, sort_keys=True)
