"""Open and read files that a person names, which may be pipes or devices: those never end, or block."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from simpletune.system.portable import NONBLOCK


class NotRegular(OSError):
    """The error of a pipe, a device or a folder in place of a file."""

    def __init__(self, file: str | Path):
        super().__init__(errno.EINVAL, "is not a regular file", str(file))


class TooLarge(OSError):
    """The error of a file of more bytes than are read; ``size`` is None if it said less than it has."""

    def __init__(self, file: str | Path, size: int | None, most: int):
        super().__init__(errno.EFBIG, "is too large", str(file))
        self.size, self.most = size, most


def open_regular(file: str | Path) -> BinaryIO:
    """Open a file to read; never wait for a pipe's writer. Raises NotRegular for a pipe or a device, OSError, or
    ValueError if no file can have this name."""
    stream = open(file, "rb", opener=lambda path, flags: os.open(path, flags | NONBLOCK))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise NotRegular(file)
    return stream


def read_regular(file: str | Path, most: int) -> bytes:
    """Read a file of at most ``most`` bytes. Raises what ``open_regular`` raises, and TooLarge."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise TooLarge(file, size, most)
        content = stream.read(most + 1)  # those of /proc say that they are empty
        if len(content) > most:
            raise TooLarge(file, None, most)
        return content
