"""Rows of tar files, the format of WebDataset: members with the same folder and name up to the first dot are a row.

A tar has no index, so the heads of all its members are read first, without what lies between them. Nothing is extracted
to a disk: a member is read from where it lies, in a compressed tar after this is decompressed into memory.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import IO

import numpy as np

from simpletune.data.sources.captions import MAX_BYTES as MAX_CAPTION
from simpletune.data.sources.captions import TEXTS
from simpletune.data.sources.image_files import image_size
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import MAX_BYTES, SUFFIXES, format_too_large, replace_surrogates
from simpletune.data.storage.rows import BLOCKS_IN_MEMORY, MAX_BLOCK, Block, Columns, LruCache, Shard, ShardedRows
from simpletune.data.storage.shard_files import TARS, DataFiles
from simpletune.system.console import counting
from simpletune.system.options import UserError, plural
from simpletune.system.printable import describe_exception, printable_name

MOST_HEAD = 2**14  # bytes of a member's head with its long name
NAMED = 5  # members in a note
DAMAGE = (tarfile.TarError, zlib.error, struct.error, OSError, EOFError, ValueError, IndexError, RecursionError)


class TarRows(ShardedRows):
    """The rows of tar files, in the order of the files' names and of their members.

    Args:
        files: where they are.
        columns: the picture's is the ending of its member, ``image`` stands for every kind of picture; the caption's is
            an ending or a field of the row's .json, ``text`` stands for .txt and .caption, too.
        split: text that the files' names must contain.

    Raises:
        UserError: there is no file, one is damaged or decompresses to too much, or none has a picture.
    """

    def __init__(self, files: DataFiles, columns: Columns, split: str | None = None):
        self._files, self._raw = files, LruCache[bytes]()
        self._odd, self._bare, self._endings = list[str](), 0, set[str]()
        self._keys, shards, blocks, places = list[list[str]](), list[Shard](), list[Block](), list[np.ndarray]()
        for number, name in enumerate(files.shards(TARS, split)):
            rows, digest = self._list_rows(name, columns)
            shards.append(Shard(name, len(rows), digest))
            self._keys.append([replace_surrogates(key) for key in rows])
            places.append(np.array(list(rows.values()), dtype=np.int64).reshape(-1, 5))
            # A compressed tar is one block, since it is decompressed whole.
            part = np.cumsum(places[-1][:, 1]) // (BLOCKS_IN_MEMORY if name.endswith(".tar") else MAX_BLOCK)
            for place, value in enumerate(np.unique(part)):
                size = min(int(places[-1][part == value, 1].sum()), MAX_BLOCK)
                blocks.append(Block(number, place, int((part == value).sum()), size))
        self._places = np.concatenate(places)
        """For each row: first byte and size of its picture, the same of its caption, and whether this is JSON."""
        if not len(self._places) and self._endings:
            raise UserError(
                f"data.image_column: the files of {files.place} have no {columns.image!r}, but members that end in "
                f"{', '.join(sorted(self._endings)[:20])}. Use one of these"
            )
        super().__init__(files.place, shards, blocks, columns)

    def notes(self) -> list[str]:
        """Return notes for the user: members that are left out."""
        found = []
        if self._odd:
            named = ", ".join(printable_name(name) for name in self._odd[:NAMED])
            more = f" and {len(self._odd) - NAMED} more" if len(self._odd) > NAMED else ""
            found.append(
                f"{plural(len(self._odd), 'member')} left out, since links, devices, sparse files and outside names "
                f"are not read: {named}{more}"
            )
        if self._bare:
            found.append(f"{plural(self._bare, 'name')} without a picture in {self.place}")
        return found

    def name(self, row: int) -> str:
        shard = int(np.searchsorted(self._shard_starts, row, side="right")) - 1
        return f"{self.shards[shard].name}#{self._keys[shard][row - int(self._shard_starts[shard])]}"

    def _list_rows(self, name: str, columns: Columns) -> tuple[dict[str, list[int]], str]:
        """List a tar's rows by their names, with a digest of its members' heads and of what identifies its content."""
        images = [suffix[1:] for suffix in SUFFIXES] if columns.image == "image" else [columns.image.lower()]
        captions = [suffix[1:] for suffix in TEXTS] if columns.caption == "text" else [(columns.caption or "").lower()]
        rows = dict[str, list[int]]()
        digest = hashlib.sha256(json.dumps([columns.image, self._files.identity(name)]).encode())
        for member in self._members(name):
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")
            if member.isdir() or not stem:  # hidden files are those of a file manager
                continue
            if not member.isreg() or member.sparse is not None or folder[:1] == "/" or ".." in folder.split("/"):
                self._odd.append(f"{name}#{member.name}")
                continue
            at, size, ending = member.offset_data, member.size, ending.lower()
            digest.update(f"{ascii(member.name)} {at} {size} {member.mtime}\n".encode())
            row = rows.setdefault(f"{folder}/{stem}" if folder else stem, [0] * 5)
            if ending in images and not row[0]:
                row[:2] = at, size
            elif columns.caption is not None and (ending in captions or (ending == "json" and not row[2])):
                row[2:] = at, size, ending not in captions
            elif len(self._endings) < 1000:
                self._endings.add(ending)
        found = {key: row for key, row in rows.items() if row[0]}
        self._bare += len(rows) - len(found)
        return found, digest.hexdigest()

    def _members(self, name: str) -> Iterator[tarfile.TarInfo]:
        """Yield a tar's members. Raises UserError if it is damaged."""
        with self._open(name) as file, explain_damage(name), counting(f"reading {name}", "members") as count:
            tar, before = tarfile.TarFile(fileobj=_Heads(file)), -1  # type: ignore[arg-type]
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps them all
                if member.offset <= before or member.size < 0:
                    raise tarfile.ReadError("its members overlap")
                before = member.offset
                count(printable_name(member.name))
                yield member
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes any damage for the end
                raise tarfile.ReadError(f"there is neither a member nor tar's end mark at byte {tar.offset:,}")

    def _open(self, name: str) -> IO[bytes]:
        return self._files.open(name) if name.endswith(".tar") else BytesIO(self._decompress(name))

    def _decompress(self, name: str) -> bytes:
        def read() -> tuple[bytes, int]:
            with self._files.open(name) as file, explain_damage(name), gzip.GzipFile(fileobj=file) as content:
                data = content.read(MAX_BLOCK + 1)
            if len(data) > MAX_BLOCK:
                raise UserError(
                    f"data.path: {name} decompresses to more than {MAX_BLOCK:,} bytes. Write smaller shards, or .tar"
                )
            return data, len(data)

        return self._raw.get(name, read)

    def _read(self, name: str, start: int, size: int) -> bytes:
        if name.endswith(".tar"):
            return bytes(self._files.read(name, start, start + size))
        return self._decompress(name)[start : start + size]

    def _cell(self, block: int, row: int, column: str) -> object:
        name = self.shards[int(self._shard_of[block])].name
        at, size, caption_at, caption_size, in_json = map(int, self._places[int(self.starts[block]) + row])
        if column == self.columns.image:
            if size > MAX_BYTES:
                raise UnusableImage(format_too_large(size, MAX_BYTES))
            return self._read(name, at, size)
        if not caption_at:
            ending = TEXTS[0] if column == "text" else f".{column}"
            raise UnusableImage(f"has no caption: no {ending} and no .json has its name")
        if caption_size > MAX_CAPTION:
            raise UnusableImage(f"its caption {format_too_large(caption_size, MAX_CAPTION)}")
        data = self._read(name, caption_at, caption_size)
        try:
            text = data.decode("utf-8-sig")
            fields = json.loads(text) if in_json else {column: text}
        except UnicodeDecodeError:
            return data
        except (ValueError, RecursionError):
            raise UnusableImage("has no caption: its .json is not JSON") from None
        if not isinstance(fields, dict) or column not in fields:
            known = (
                f" has no field {column!r}, but {', '.join(fields)}" if isinstance(fields, dict) else " has no fields"
            )
            raise UnusableImage(f"has no caption: its .json{known[:200]}. Set data.caption_column")
        return fields[column]

    def _sizes(self, block: int, columns: tuple[str, str]) -> np.ndarray:
        """Read the pictures' own sizes; 1x1 for one that cannot be used, which reading it says with the reason."""
        found = np.ones((int(self.starts[block + 1] - self.starts[block]), 2), dtype=np.int64)
        for row in range(len(found)):
            try:
                found[row] = image_size(self._cell(block, row, self.columns.image))  # type: ignore[arg-type]
            except UnusableImage:
                continue
        return found


class _Heads:
    """A file of which ``tarfile`` reads members' heads; refuses one that announces gigabytes."""

    def __init__(self, file: IO[bytes]):
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_HEAD:
            raise tarfile.ReadError(f"the head of a member has {size:,} bytes; the limit is {MOST_HEAD:,}")
        return self._file.read(size)


@contextmanager
def explain_damage(name: str) -> Iterator[None]:
    """Turn the libraries' errors into one that names the damaged tar. Raises UserError instead of them."""
    try:
        yield
    except DAMAGE as error:
        raise UserError(
            f"data.path: {name} is damaged: it cannot be read to its end ({describe_exception(error)[:200]}). Fetch or "
            "write it again"
        ) from None
