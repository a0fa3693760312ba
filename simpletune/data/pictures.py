"""Reading one picture: size, orientation, colours, and the cut that fits its bucket. Pillow and NumPy only."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from simpletune.data.source import UnusablePicture
from simpletune.data.truncation import has_text_after_pixels, seems_complete
from simpletune.models.buckets import Size, covering_size

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

EXIF_ORIENTATION = 0x0112
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # not those that start other programs, as EPS does
MAX_PIXELS = 178_956_970  # where Pillow refuses to open what may be a decompression bomb
STRIP_PIXELS = 2**22  # that are composed or scaled to 8 bits at once
MAX_SPARE = 8  # a scaled picture's area over its bucket's, up to which it is scaled whole
DAMAGE = (OSError, ValueError, SyntaxError, struct.error)  # what Pillow raises for damaged data, EXIF included


def _open(data: bytes) -> Image.Image:
    """Open without decoding.

    Raises:
        UnusablePicture: empty, no picture, or larger than any picture should be.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise UnusablePicture("the file is empty")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise UnusablePicture("is not a picture that Pillow can read") from None
    except Image.DecompressionBombError:
        raise UnusablePicture(f"has more than {MAX_PIXELS:,} pixels") from None
    except DAMAGE as error:
        raise UnusablePicture(f"is damaged ({error})") from None
    return image


def picture_size(data: bytes) -> Size:
    """(width, height) after EXIF rotation, read from the header; what looks incomplete is decoded, to know.

    Raises:
        UnusablePicture: not a picture, damaged, or too large.
    """
    image = _open(data)
    try:
        turned = _exif(image, data).get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except DAMAGE as error:
        raise UnusablePicture(f"is damaged ({error})") from None
    if not seems_complete(data, image.format):
        decode(data)
    return (image.height, image.width) if turned else (image.width, image.height)


def _exif(image: Image.Image, data: bytes) -> Image.Exif:
    """The EXIF. Pillow decodes a PNG to look behind its pixels; here only if there is something behind them."""
    from PIL import Image

    if image.format == "PNG" and not has_text_after_pixels(data):
        return Image.Image.getexif(image)
    return image.getexif()


def decode(data: bytes, at_least: int | None = None) -> Image.Image:
    """Decode to RGB, EXIF-rotated, transparent parts on white; of an animation the first frame.

    Args:
        data: the file.
        at_least: a JPEG may come smaller, by a power of two, if no side gets shorter than this; None: whole.

    Raises:
        UnusablePicture: the file is damaged or truncated.
    """
    from PIL import Image, ImageOps

    try:
        image = _open(data)
        if at_least is not None:
            image.draft(None, (at_least, at_least))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # else a copy, also of what is not turned
        image = _to_srgb(image)
        if image.mode == "F":
            raise UnusablePicture("holds floating-point levels, which have no fixed white. Save it as PNG")
        if image.mode.startswith("I"):
            return _in_strips(image, _from_16_bit)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            return _in_strips(image, _on_white)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Image.DecompressionBombError:
        raise UnusablePicture(f"has more than {MAX_PIXELS:,} pixels") from None
    except DAMAGE as error:
        raise UnusablePicture(f"is damaged ({error})") from None


def _in_strips(image: Image.Image, to_rgb: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """A picture turned to RGB strip by strip: memory holds it and the result, and nothing else of their size."""
    from PIL import Image

    result = Image.new("RGB", image.size)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        result.paste(to_rgb(strip), (0, top))
    return result


def _on_white(image: Image.Image) -> Image.Image:
    """Transparent parts on white."""
    from PIL import Image

    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _to_srgb(image: Image.Image) -> Image.Image:
    """Colours as sRGB where the picture carries a profile (ICC) of its own; a damaged profile is left aside."""
    profile = image.info.get("icc_profile")
    if not profile or image.mode not in ("RGB", "CMYK", "L"):
        return image
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return image
    return image if converted is None else converted


def _from_16_bit(image: Image.Image) -> Image.Image:
    """16-bit grey to RGB: scaled, where convert() would clip at 255; the level that means transparent is white."""
    import numpy as np
    from PIL import Image

    levels = np.array(image.convert("I")).clip(0, 65535)
    levels[levels == image.info.get("transparency", -1)] = 65535
    return Image.fromarray((levels // 257).astype(np.uint8)).convert("RGB")


def cut(image: Image.Image, bucket: Size, offset: tuple[float, float] = (0.5, 0.5), flip: bool = False) -> np.ndarray:
    """Scale a picture to cover its bucket (Lanczos), crop, mirror.

    Args:
        image: RGB.
        bucket: (width, height) in pixels.
        offset: where the crop stands in the spare width and height, 0 to 1.
        flip: mirror left to right.

    Returns:
        float32 [3, height, width] in -1..1.
    """
    import numpy as np
    from PIL import Image, ImageOps

    width, height = covering_size(image.size, bucket)
    left, top = int((width - bucket[0]) * offset[0]), int((height - bucket[1]) * offset[1])
    kept = (left, top, left + bucket[0], top + bucket[1])
    if width * height <= MAX_SPARE * bucket[0] * bucket[1]:
        scaled = image if (width, height) == image.size else image.resize((width, height), Image.Resampling.LANCZOS)
        image = scaled.crop(kept)
    else:  # scale only what is kept: the whole of a 1x10000 picture would take gigabytes
        x, y = image.width / width, image.height / height
        box = (kept[0] * x, kept[1] * y, min(kept[2] * x, image.width), min(kept[3] * y, image.height))
        image = image.resize(bucket, Image.Resampling.LANCZOS, box)
    if flip:
        image = ImageOps.mirror(image)
    pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
