"""Detect truncated and damaged picture files while scanning, without decoding them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

TEXT = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # PNG chunks that may contain the EXIF orientation


def seems_complete(data: bytes, kind: str | None) -> bool:
    """Whether a file has its end marker and correct checksums. False only calls for a closer look.

    Args:
        data: the whole file.
        kind: Pillow's name of the format.
    """
    if kind == "PNG":
        return _png_is_whole(data)
    if kind in ("JPEG", "MPO"):
        return _jpeg_has_end(data)
    return kind == "WEBP" and len(data) >= 8 + int.from_bytes(data[4:8], "little")


def has_text_after_pixels(data: bytes) -> bool:
    """Whether a PNG has text or EXIF chunks after its pixels."""
    pixels = False
    for name, _, _ in _png_chunks(data):
        pixels = pixels or name == b"IDAT"
        if pixels and name in TEXT:
            return True
    return False


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, offset of its data, length) of each chunk up to IEND (PNG specification, section 5)."""
    at = 8
    while at + 12 <= len(data):
        length, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        yield name, at + 8, length
        if name == b"IEND":
            return
        at += 12 + length


def _png_is_whole(data: bytes) -> bool:
    view, last = memoryview(data), b""
    for name, start, length in _png_chunks(data):
        check = data[start + length : start + length + 4]
        if zlib.crc32(view[start - 4 : start + length]) != int.from_bytes(check, "big"):
            return False
        last = name
    return last == b"IEND"


def _jpeg_has_end(data: bytes) -> bool:
    """Look for an end marker after the start of the scan; within a scan, 0xFF is always stuffed (ITU T.81, B.1.1.5)."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        if data[at + 1] == 0xFF:  # fill bytes
            at += 1
            continue
        if data[at + 1] == 0xDA:
            return data.find(b"\xff\xd9", at) >= 0
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False
