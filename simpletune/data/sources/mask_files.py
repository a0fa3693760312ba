"""Read and write the mask of a picture; refuse to overwrite one that has changed in the meantime."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from simpletune.data.sources.caption_files import sha256
from simpletune.data.sources.image_files import decode_mask, image_size
from simpletune.data.sources.masks import find_mask, mask_target
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import OUTSIDE, is_outside, read_regular
from simpletune.models.shared.buckets import Size
from simpletune.system.atomic import atomic_file
from simpletune.system.options import UserError

LONGEST_SIDE = 2048  # pixels of a mask while it is painted: phones limit a canvas, and training averages 8 x 8 pixels
PNG = b"\x89PNG\r\n\x1a\n"


class ChangedMask(UserError):
    """A mask has changed since it was read."""


@dataclass(frozen=True)
class MaskFile:
    """Mask of a picture."""

    target: Path  # the PNG that training reads first, which need not exist
    found: Path | None  # the file that training reads now, which may have another suffix
    digest: str = ""  # SHA-256 of that file's bytes; empty if there is none


def read_mask(root: Path, folder: Path | None, whole: Path) -> MaskFile:
    """Find the mask of a picture of the data folder ``root``; ``folder`` is ``data.mask_path``. Raises UnusableImage if
    it cannot be read, or links out of its folder."""
    target = mask_target(root, folder, whole)
    found, within = find_mask(target), folder or root
    if any(is_outside(file, within) for file in (target.parent, *([found] if found else []))):
        raise UnusableImage(f"its mask {(found or target).name} {OUTSIDE}")
    return MaskFile(target, found, sha256(read_regular(found)) if found else "")


def painting_size(whole: Size) -> Size:
    """Return the size in pixels at which a mask of a picture is painted."""
    scale = min(1.0, LONGEST_SIDE / max(whole))
    return max(1, round(whole[0] * scale)), max(1, round(whole[1] * scale))


def painted_mask(data: bytes, whole: Size) -> bytes:
    """Turn a painted mask into the file that training reads: grey, of the picture's size. Raises UserError if it is no
    PNG of the size at which it is painted, is damaged, or is black everywhere."""
    size = painting_size(whole)
    try:
        if not data.startswith(PNG) or image_size(data) != size:
            raise UserError(f"The mask is not a PNG of {size[0]}x{size[1]}. Reload the page, and paint it again")
        image = decode_mask(data, "file")
    except UnusableImage as reason:
        raise UserError(f"The mask {reason}. Nothing was written") from None
    if not image.getextrema()[1]:  # training refuses it
        raise UserError("The mask is empty, so nothing would be learned, and nothing was written. Paint what to learn")
    return mask_content(image if image.size == whole else image.resize(whole, Image.Resampling.BILINEAR))


def mask_content(image: Image.Image) -> bytes:
    """Encode a grey image as a mask's file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_mask(before: MaskFile, content: bytes) -> None:
    """Write a mask atomically. ChangedMask: it was changed, created or deleted since it was read, and is left as it
    is."""
    found = find_mask(before.target)
    try:
        now = sha256(read_regular(found)) if found else ""
    except UnusableImage:
        now = "unreadable"
    if now != before.digest:
        name = (found or before.target).name
        raise ChangedMask(f"{name} was changed by something else since this page showed it, and is left. Reload")
    before.target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(before.target, len(content), shared=True) as part:
        part.write_bytes(content)
