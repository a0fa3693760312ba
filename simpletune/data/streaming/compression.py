"""Decompress files whose decompressed size is known from the index, with the codecs of pyarrow and Python."""

from __future__ import annotations

import bz2
import zlib

from simpletune.system.options import UserError

CODECS = {"zstd": "zstd", "snappy": "snappy", "br": "brotli"}  # pyarrow's names
OTHERS = ("gz", "bz2")


def decompress(data: bytes, compression: str, size: int, name: str) -> bytes:
    """Decompress a file; never writes more than its announced size.

    Args:
        data: the compressed file.
        compression: the algorithm, with or without a level: ``zstd:3``.
        size: the result's size in bytes.
        name: the file's name, for messages.

    Raises:
        UserError: the algorithm is unknown, or the file is damaged.
    """
    import pyarrow as pa

    algorithm = compression.partition(":")[0]
    try:
        if algorithm in CODECS:
            found = bytes(pa.Codec(CODECS[algorithm]).decompress(data, decompressed_size=size))
        elif algorithm == "gz":
            found = zlib.decompressobj(wbits=31).decompress(data, size + 1)
        elif algorithm == "bz2":
            found = bz2.BZ2Decompressor().decompress(data, size + 1)
        else:
            known = ", ".join([*CODECS, *OTHERS])
            raise UserError(f"data.path: {name} is compressed with {compression!r}, which is unsupported. Use {known}")
    except (pa.ArrowException, OSError, ValueError, zlib.error) as error:
        raise UserError(f"data.path: {name} is damaged: it cannot be decompressed ({error}). Fetch it again") from None
    if len(found) != size:
        raise UserError(
            f"data.path: {name} is damaged: it decompresses to {len(found):,} bytes instead of {size:,}. Fetch it again"
        )
    return found
