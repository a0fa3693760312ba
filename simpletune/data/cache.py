"""The prepared cache: latents and prompt embeddings in small safetensors files named after what they were made of.

A file's name is the hash of everything its content depends on, so a changed caption or picture makes a new file, and
nothing can pair a picture with another's caption. Files are written aside and renamed: a killed run leaves whole files.
Each holds its content's CRC-32, against damage that comes later; a damaged file is set aside and made again. Of several
runs that share a folder one fills it at a time, and the others then find what they need.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.data.plan import View
from simpletune.options import UserError
from simpletune.system.atomic import quarantine
from simpletune.system.console import say
from simpletune.system.locks import lock_of, wait_for_lock
from simpletune.system.safetensors_file import read_header, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

LATENTS_VERSION = 2  # raise when the cut of a picture or its encoding changes
READ_WHOLE = 4 * 2**30  # bytes of a folder's wanted files that are read when a run starts; of more only the headers
_DAMAGE = (ValueError, KeyError, UserError)


class Cache:
    """One folder of tensors by content.

    Args:
        folder: where files lie; its name tells the encoder that made them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._sound: set[str] = set()  # keys whose content this process has compared with its checksum

    def file(self, key: str) -> Path:
        """Where the tensors of a key lie."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / f"{name}.safetensors"

    def __contains__(self, key: str) -> bool:
        return self.file(key).exists()

    def lacking(self, keys: Iterable[str]) -> list[str]:
        """The keys that have to be made; what is there but damaged is set aside, and said.

        Up to ``READ_WHOLE`` bytes the contents are read and compared with their checksums. Beyond that a file is looked
        at when it is first used, and here its header and its length.
        """
        wanted = list(dict.fromkeys(keys))
        there = [key for key in wanted if key in self and key not in self._sound]
        whole = sum(self.file(key).stat().st_size for key in there) <= READ_WHOLE
        for key in there:
            try:
                self._read(key) if whole else read_header(self.file(key))
            except _DAMAGE as error:
                reason = str(error).partition(". ")[0]
                say(f"cache   {reason}: set aside as {self.quarantine(key).name}, and made again")
        return [key for key in wanted if key not in self]

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Within this context no other process fills the folder; one that does is waited for. What processes that were
        killed left half written is removed."""
        with wait_for_lock(lock_of(self.folder), f"cache   waiting for another run that fills {self.folder}"):
            for part in self.folder.glob(".*.part"):
                part.unlink(missing_ok=True)
            yield

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors under a key; the key itself stands in the file's header.

        Raises:
            UserError: the disk is full; nothing of the file is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        write_safetensors(host, self.file(key), {"key": key, "crc32": checksum(host)})

    def load(self, key: str) -> dict[str, Tensor]:
        """The tensors of a key; the first time they are compared with their checksum.

        Raises:
            FileNotFoundError: never made, or removed.
            ValueError: the file was made for another key.
            UserError: it is damaged, and has been set aside.
        """
        try:
            return self._read(key)
        except UserError as error:
            place = self.quarantine(key)
            raise UserError(
                f"{error}: set aside as {place.name}. Start again, or --resume latest: it is made again"
            ) from None

    def quarantine(self, key: str) -> Path:
        """Rename a file, so that it can be looked at and is made again.

        Returns:
            Its new name.
        """
        self._sound.discard(key)
        return quarantine(self.file(key))

    def _read(self, key: str) -> dict[str, Tensor]:
        """The tensors of a key.

        Raises:
            UserError: the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        file = self.file(key)
        try:
            with safe_open(file, framework="pt") as handle:
                about = handle.metadata() or {}
                if about.get("key") != key:
                    raise ValueError(f"{file} was made for another key: remove it and start again")
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}
        except (SafetensorError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise UserError(f"{file} is damaged ({' '.join(str(error).split())[:120]})") from None
        if key not in self._sound and about.get("crc32") != checksum(tensors):
            raise UserError(f"{file} is damaged (its content does not have its checksum)")
        self._sound.add(key)
        return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """The CRC-32 of tensors on the host, with their names, types and shapes."""
    import torch

    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def view_key(view: View) -> str:
    """What a picture's latents depend on, beside the autoencoder."""
    cut = {"bucket": view.bucket, "offset": view.offset, "flip": view.flip, "version": LATENTS_VERSION}
    return json.dumps({"sha256": view.picture.digest, **cut}, sort_keys=True)
