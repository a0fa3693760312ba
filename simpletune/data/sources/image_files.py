"""Read one picture: size, orientation, colours, damage, and the crop to its bucket. Needs only Pillow and NumPy."""

from __future__ import annotations

import ctypes
import functools
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simpletune.data.sources.augmentation import UNCHANGED, Augmentation, recolour, rotate
from simpletune.data.sources.source import Decoding, SourceImage, UnusableImage
from simpletune.models.shared.buckets import Size, covering_size, crop_corner
from simpletune.system.extras import install_extra

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image, ImageCms

EXIF_ORIENTATION = 0x0112
# Found by a file's first bytes, whatever its suffix; TGA, which has no mark, is tried last. Without formats that start
# other programs (EPS), whose pixels are a preview (PSD, WMF), or that only instruments write (FITS, HDF5).
FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "QOI", "DDS", "ICO", "PCX", "SGI", "TGA",
)  # fmt: skip
HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}  # brands of HEVC pictures (ISO/IEC 23008-12, annex B)
MAX_PIXELS = 178_956_970  # Pillow's limit against decompression bombs
STRIP_PIXELS = 2**22  # composited or scaled to 8 bits at a time
MAX_SPARE = 8  # largest ratio of the scaled picture's area to its bucket's up to which the whole picture is scaled
MOST_SCANS = 50  # of a JPEG, each of which goes over all pixels again in a few bytes; encoders write up to 24
MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd7\xff])")  # of a segment of a JPEG, also after a scan's data
PNG_TEXT = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # chunks that may contain the EXIF orientation
HDR = {16: "PQ", 18: "HLG"}  # transfer characteristics of ITU-T H.273
# what Pillow raises for damaged data, including EXIF
DAMAGE = (OSError, EOFError, IndexError, RuntimeError, SyntaxError, ValueError, struct.error)


@contextmanager
def _open_image(data: bytes) -> Iterator[Image.Image]:
    """Open without decoding. What Pillow raises here and while the picture is used becomes UnusableImage: the file is
    empty, not a picture, damaged, or too large."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise UnusableImage("the file is empty")
    try:
        try:
            image = Image.open(io.BytesIO(data), formats=_heic_format() if _is_heic(data) else FORMATS)
        except UnidentifiedImageError:
            raise UnusableImage("is not a picture that Pillow can read") from None
        if image.format == "TIFF":
            _silence_libtiff()
        if image.format in ("JPEG", "MPO") and _has_many_scans(data):
            raise UnusableImage(f"is a JPEG in more than {MOST_SCANS} scans. Save it again")
        yield image
    except Image.DecompressionBombError:
        raise UnusableImage(f"has more than {MAX_PIXELS:,} pixels. Scale it down") from None
    except DAMAGE as error:
        raise UnusableImage(f"is damaged ({error})") from None


@functools.cache
def _silence_libtiff() -> None:
    """Keep libtiff, which Pillow's wheels bring along, from writing to stderr what Pillow raises anyway."""
    import PIL

    package = Path(PIL.__file__).parent
    for file in (*package.parent.glob("pillow.libs/libtiff-*"), *package.glob(".dylibs/libtiff.*")):
        ctypes.CDLL(str(file)).TIFFSetErrorHandler(None)


def _is_heic(data: bytes) -> bool:
    """Return whether a file's first box names HEVC, and not AVIF, as what its picture is encoded with."""
    end = min(int.from_bytes(data[:4], "big"), 256) if data[4:8] == b"ftyp" else 0
    brands = {data[at : at + 4] for at in range(8, end, 4)}
    return bool(brands & HEIC) and b"avif" not in brands


def _heic_format() -> tuple[str]:
    """Let Pillow read HEIC. Raises UnusableImage if the package for it is not installed."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        raise UnusableImage(f"is HEIC, which needs one more package. Run: {install_extra('heic')}") from None
    register_heif_opener(thumbnails=False)
    return ("HEIF",)


def image_size(data: bytes) -> Size:
    """Return (width, height) after EXIF rotation, from the header. Decodes a file that looks truncated, to be sure.
    Raises UnusableImage if the file is not a picture, damaged, or too large."""
    from PIL import Image

    with _open_image(data) as image:
        # Pillow decodes a PNG to look for chunks after its pixels; skip that if there are none.
        plain = image.format == "PNG" and not has_text_after_pixels(data)
        exif = Image.Image.getexif(image) if plain else image.getexif()
        # Pillow has turned a TIFF's size already.
        turned = image.format != "TIFF" and exif.get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    if not seems_complete(data, image.format):
        return decode(data).size  # the header of an icon may be wrong, too
    return (image.height, image.width) if turned else (image.width, image.height)


def header_size(data: bytes) -> Size:
    """Return (width, height) as the header says, before EXIF rotation; decodes nothing. Raises UnusableImage if it
    cannot be read."""
    with _open_image(data) as image:
        return image.size


def seems_complete(data: bytes, kind: str | None) -> bool:
    """Return whether a whole file has its end marker and correct checksums. False only calls for a closer look."""
    if kind == "PNG":
        return _png_is_whole(data)
    if kind in ("JPEG", "MPO"):
        return _jpeg_has_end(data)
    if kind in ("AVIF", "HEIF"):
        return _boxes_fill(data)
    return kind == "WEBP" and len(data) >= 8 + int.from_bytes(data[4:8], "little")


def has_text_after_pixels(data: bytes) -> bool:
    """Return whether a PNG has text or EXIF chunks after its pixels."""
    pixels = False
    for name, _, _ in _png_chunks(data):
        pixels = pixels or name == b"IDAT"
        if pixels and name in PNG_TEXT:
            return True
    return False


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Return (name, offset of its data, length) of each chunk up to IEND (PNG specification, section 5)."""
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


def _has_many_scans(data: bytes) -> bool:
    """Return whether decoding the first picture of a JPEG takes more than MOST_SCANS scans (ITU T.81, B.2.2)."""
    if data.count(b"\xff\xda") <= MOST_SCANS:  # most files end here; metadata and what follows the picture count, too
        return False
    scans, at = 0, 2
    while (found := MARKER.search(data, at)) and found[1] != b"\xd9" and scans <= MOST_SCANS:
        scans += found[1] == b"\xda"
        at = found.end() + max(2, int.from_bytes(data[found.end() : found.end() + 2], "big"))  # the segment, as libjpeg
    return scans > MOST_SCANS


def _boxes_fill(data: bytes) -> bool:
    """Return whether the boxes of a file end where it ends (ISO/IEC 14496-12, section 4.2)."""
    at = 0
    while at + 16 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        length = int.from_bytes(data[at + 8 : at + 16], "big") if length == 1 else length
        if length < 8:  # 0: up to the end of the file, wherever that is
            return False
        at += length
    return at == len(data)


def has_more_frames(data: bytes) -> bool:
    """Return whether a picture is an animation, or has several pages, of which ``decode`` takes the first. Raises
    UnusableImage if it cannot be read."""
    with _open_image(data) as image:  # a camera's MPO has a preview or a depth beside the picture
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def decoding_of(data: bytes, background: str = "white") -> Decoding:
    """Tell from a picture's header how ``decode`` reads it. Raises UnusableImage if it cannot be read."""
    with _open_image(data) as image:
        alpha, applied = _has_alpha(image), _profile_transform(image) is not None
        first = image.mode in ("RGB", "CMYK", "L") and not alpha  # whose profiles were always applied
        deep = "transparency" in image.info if image.mode.startswith("I") else _deep_transparency(image)
        changes = ["profile"] if applied and not first else []
        changes += ["transparency of 16 bits"] if deep else []
        changes += [f"on {background}"] if alpha and background != "white" else []
        return Decoding(", ".join(changes), _hdr_transfer(data, image.format))


def _hdr_transfer(data: bytes, kind: str | None) -> str:
    """Return the name of the transfer function of a PNG, AVIF or HEIC for high dynamic range; empty if there is
    none."""
    code = 0
    if kind == "PNG":
        code = next((data[start + 1] for name, start, size in _png_chunks(data) if name == b"cICP" and size == 4), 0)
    elif kind in ("AVIF", "HEIF") and (at := data.find(b"colrnclx")) >= 0:  # ISO/IEC 14496-12, section 12.1.5
        code = int.from_bytes(data[at + 10 : at + 12], "big")
    return HDR.get(code, "")


def decode(data: bytes, at_least: int | None = None, background: str = "white") -> Image.Image:
    """Decode to RGB: apply EXIF rotation and the colour profile, put transparent parts on a background, take an
    animation's first frame.

    Args:
        data: the file's bytes.
        at_least: if set, a JPEG may be decoded at a fraction (a power of two) of its size as long as no side gets
            shorter than this.
        background: ``data.background``.

    Raises:
        UnusableImage: the file is damaged or truncated.
    """
    from PIL import ImageOps

    with _open_image(data) as image:
        if at_least is not None:
            image.draft(None, (at_least, at_least))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # without in_place, copies even an unrotated image
        if image.mode == "F":
            raise UnusableImage("has floating-point pixels, whose range is undefined. Save it as PNG")
        transform = _profile_transform(image)
        if image.mode == "RGB" and transform is None and not _has_alpha(image):
            return image
        return _map_strips(image, "RGB", functools.partial(_convert_to_rgb, transform=transform, background=background))


def decode_image(image: SourceImage, at_least: int | None = None) -> Image.Image:
    """Read and decode a picture again. Raises UnusableImage if it cannot be decoded, or has changed since the scan."""
    return decode(image.read_same(), at_least, image.background)


def _has_alpha(image: Image.Image) -> bool:
    of_palette = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    return image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info or of_palette


def require_alpha(data: bytes) -> None:
    """Check in its header that a picture has an alpha channel or a transparent colour. Raises UnusableImage if it has
    none."""
    with _open_image(data) as image:
        if not _has_alpha(image):
            raise UnusableImage("has no transparency, which data.mask=alpha reads. Add an alpha channel")


def decode_mask(data: bytes, kind: Literal["alpha", "file"]) -> Image.Image:
    """Decode a mask to 8-bit grey, with EXIF rotation. Raises UnusableImage if the file is damaged or truncated."""
    from PIL import Image, ImageOps

    with _open_image(data) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if kind == "alpha":
            if not _has_alpha(image):
                return Image.new("L", image.size, 255)
            return _map_strips(image, "L", _opacity)
        return (_map_strips(image, "RGB", _convert_to_rgb) if image.mode.startswith("I") else image).convert("L")


def _map_strips(image: Image.Image, mode: str, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert a picture in strips, so that no temporary is as large as the picture."""
    from PIL import Image

    result = Image.new(mode, image.size)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        result.paste(convert(strip), (0, top))
    return result


def _convert_to_rgb(
    image: Image.Image, transform: ImageCms.ImageCmsTransform | None = None, background: str = "white"
) -> Image.Image:
    """Convert a picture to sRGB by its profile, without its alpha, and put it on the background."""
    import numpy as np
    from PIL import Image, ImageCms

    colours, alpha = _colours_and_alpha(image)
    if transform is None:
        colours = _convert_to_8_bits(colours).convert("RGB")
    elif colours.mode == "I;16":  # each level once: exactly, this takes 0.5 us a pixel
        levels = Image.fromarray(np.arange(2**16, dtype=np.uint16)[None])
        table = np.asarray(ImageCms.applyTransform(levels, transform))[0]
        colours = Image.fromarray(table[np.asarray(colours)])
    else:
        colours = ImageCms.applyTransform(colours, transform) or colours
    if alpha is None:
        return colours
    colours.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", colours.size, background), colours).convert("RGB")


def _colours_and_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return a picture in the colours that its profile is about, and its opacity: 8-bit grey, None if it has none."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        levels = np.array(image.convert("I")).clip(0, 65535)
        clear = image.info.get("transparency")
        alpha = None if clear is None else Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8))
        return Image.fromarray(levels.astype(np.uint16)), alpha
    if not _has_alpha(image):
        return (image if _profile_mode(image) == image.mode else image.convert(_profile_mode(image))), None
    if _deep_transparency(image):  # Pillow keeps the upper byte of each level
        image.info["transparency"] = tuple(level >> 8 for level in image.info["transparency"])
    if _profile_mode(image) == "L":
        grey = image.convert("LA")
        return grey.getchannel("L"), grey.getchannel("A")
    rgba = image.convert("RGBA")
    return rgba.convert("RGB"), rgba.getchannel("A")


def _opacity(image: Image.Image) -> Image.Image:
    alpha = _colours_and_alpha(image)[1]
    assert alpha is not None
    return alpha


def _deep_transparency(image: Image.Image) -> bool:
    """Return whether the transparent colour of a picture, which has 8 bits now, is given in 16."""
    clear = image.info.get("transparency")
    return isinstance(clear, tuple) and any(level > 255 for level in clear)


def _convert_to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits (convert() would clip at 255); others stay as they are."""
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)) if image.mode == "I;16" else image


def _profile_mode(image: Image.Image) -> str:
    """Return the mode, without alpha, in which a picture's colours meet its profile."""
    if image.mode.startswith("I"):
        return "I;16"
    if image.mode in ("L", "LA", "La"):
        return "L"
    return image.mode if image.mode in ("1", "CMYK", "LAB") else "RGB"


def _profile_transform(image: Image.Image) -> ImageCms.ImageCmsTransform | None:
    """Build the transform from the picture's colours, without its alpha, to sRGB by its ICC profile; None: it has no
    profile, or one that is damaged or for other colours, which is ignored."""
    profile, mode = image.info.get("icc_profile"), _profile_mode(image)
    if not profile or mode == "1":
        return None
    return _transform_of(profile, mode)


@functools.lru_cache(maxsize=8)  # a camera's or a screen's pictures share one
def _transform_of(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        # what it would interpolate between for speed is too coarse for the darks of 16-bit grey
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "I;16" else ImageCms.Flags.NONE
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB", flags=flags)
    except (ImageCms.PyCMSError, OSError):
        return None


def crop_to_bucket(
    image: Image.Image,
    bucket: Size,
    offset: tuple[float, float] = (0.5, 0.5),
    flip: bool = False,
    augmentation: Augmentation = UNCHANGED,
) -> np.ndarray:
    """Scale a picture to cover its bucket (Lanczos), crop it, and rotate, mirror and recolour it if asked.

    Args:
        image: RGB.
        bucket: (width, height) in pixels.
        offset: position of the crop within the excess width and height, 0 to 1.
        flip: mirror left to right.
        augmentation: changes of the crop.

    Returns:
        float32 [3, height, width] in -1..1.
    """
    import numpy as np
    from PIL import Image, ImageOps

    width, height = covering_size(image.size, bucket)
    left, top = crop_corner(image.size, bucket, offset)
    kept = (left, top, left + bucket[0], top + bucket[1])
    x, y = image.width / width, image.height / height
    box = (kept[0] * x, kept[1] * y, min(kept[2] * x, image.width), min(kept[3] * y, image.height))
    if augmentation.rotation:
        image = rotate(image, box, bucket, augmentation.rotation)
    elif width * height <= MAX_SPARE * bucket[0] * bucket[1]:
        scaled = image if (width, height) == image.size else image.resize((width, height), Image.Resampling.LANCZOS)
        image = scaled.crop(kept)
    else:  # scale only the cropped part: scaling a whole 1x10000 picture would take gigabytes
        image = image.resize(bucket, Image.Resampling.LANCZOS, box)
    if flip:
        image = ImageOps.mirror(image)
    pixels = np.asarray(recolour(image, augmentation), dtype=np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
