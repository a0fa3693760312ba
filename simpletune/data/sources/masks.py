"""Masks of the parts of pictures to learn from, as files or by the picture's opacity, and their crops in latents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simpletune.data.sources.augmentation import Augmentation
from simpletune.data.sources.pictures import crop_to_bucket, decode_mask, picture_size, require_alpha
from simpletune.data.sources.source import Mask, UnusablePicture
from simpletune.data.sources.walk import OUTSIDE, SUFFIXES, Links, is_outside, read_regular
from simpletune.models.shared.buckets import DOWNSAMPLING, Size
from simpletune.system.options import Json, plural

if TYPE_CHECKING:
    import numpy as np

    from simpletune.data.samples import Crop

LABEL = "-masklabel"  # OneTrainer's name of the mask beside NAME.jpg: NAME-masklabel.png
VERSION = 1  # increment when the crop of a mask changes
SHAPE_TOLERANCE = 0.02  # largest relative difference of the aspect ratios of mask and picture

Kind = Literal["alpha", "files"]


def without_masks(files: Sequence[Path], kind: Kind | None, folder: str | Path | None) -> tuple[list[Path], list[str]]:
    """The files of a data folder to train on, and a hint at masks among them if masks are not in use. ``kind`` and
    ``folder`` are ``data.mask`` and ``data.mask_path``."""
    stems = {file.with_suffix("") for file in files}
    beside = [
        file for file in files if file.stem.endswith(LABEL) and file.with_name(file.stem.removesuffix(LABEL)) in stems
    ]
    if kind != "files":
        found = f"{plural(len(beside), 'file is', 'files are')} named like a mask (NAME{LABEL}.png) and trained on"
        return list(files), [f"{found} as pictures. Set data.mask=files to use them as masks"] if beside else []
    if folder is None:
        masks = set(beside)
        return [file for file in files if file not in masks], []
    return [file for file in files if is_outside(file, folder)], []


def alpha_mask(data: bytes, digest: str, read: partial[bytes]) -> Mask:
    """The mask given by a picture's opacity. UnusablePicture: it has no transparency."""
    require_alpha(data)
    return Mask("alpha", digest, read)


def mask_target(root: str | Path, folder: str | Path | None, file: Path) -> Path:
    """Where the mask of a picture of the data folder ``root`` lies if it is a PNG; ``folder`` is ``data.mask_path``."""
    if folder is None:
        return file.with_name(f"{file.stem}{LABEL}.png")
    return (Path(folder) / file.relative_to(root)).with_suffix(".png")


def find_mask(target: Path) -> Path | None:
    """The file that holds a mask: ``target``, or one that differs in its suffix; None: there is none."""
    endings = [ending for suffix in (".png", *SUFFIXES) for ending in (suffix, suffix.upper())]  # PNG first
    places = (target.with_suffix(ending) for ending in endings)
    return next((place for place in places if os.path.lexists(place)), None)


def mask_file(root: Path, folder: str | Path | None, links: Links, file: Path, size: Size) -> Mask:
    """Find and check the mask of a picture of the data folder ``root`` in a separate file; ``folder`` is
    ``data.mask_path``. UnusablePicture: there is no mask, it cannot be read, or its aspect ratio differs from the
    picture's."""
    target = mask_target(root, folder, file)
    place = find_mask(target)
    if place is None:
        where = "" if folder is None else f" in {Path(folder)}"
        raise UnusablePicture(f"has no mask: {target.name} is missing{where}")
    what = f"its mask {place.name}"
    if links == "inside" and place.is_symlink() and is_outside(place, folder or root):
        raise UnusablePicture(f"{what} {OUTSIDE}")
    read = partial(read_regular, place)
    try:
        data = read()
        width, height = picture_size(data)
    except UnusablePicture as reason:
        raise UnusablePicture(f"{what} {reason}") from None
    if abs(width * size[1] / (height * size[0]) - 1) > SHAPE_TOLERANCE:
        raise UnusablePicture(
            f"{what} is {width}x{height}, another shape than the picture's {size[0]}x{size[1]}. Draw it on the picture"
        )
    return Mask("file", hashlib.sha256(data).hexdigest(), read)


def mask_pixels(view: Crop) -> np.ndarray:
    """The mask of a crop (of a picture that has one), cropped, rotated and mirrored like the picture: fp32 [h, w], its
    brightness or opacity, 0 to 255. UnusablePicture: it cannot be read, has changed since the scan, or is black
    everywhere."""
    from PIL import Image

    mask = view.picture.mask
    assert mask is not None
    try:
        image = decode_mask(mask.read_same(), mask.kind)
    except OSError as error:
        raise UnusablePicture(f"its mask cannot be read ({error.strerror or error})") from None
    if not image.getextrema()[1]:
        raise UnusablePicture("its mask is black everywhere, so nothing would be learned. Paint white what to learn")
    if mask.kind == "file" and image.size != view.picture.size:
        image = image.resize(view.picture.size, Image.Resampling.BILINEAR)
    turned = Augmentation(rotation=view.augmentation.rotation)  # without the change of colours
    pixels: np.ndarray = crop_to_bucket(image.convert("RGB"), view.bucket, view.offset, view.flip, turned)[0]
    return (pixels + 1) * 127.5


def latent_mask(view: Crop) -> np.ndarray:
    """The mask of a crop at the latents' resolution: uint8 [1, h/8, w/8], the mean of each place. UnusablePicture: as
    ``mask_pixels``."""
    import numpy as np

    pixels = mask_pixels(view)
    height, width = pixels.shape
    places = pixels.reshape(height // DOWNSAMPLING, DOWNSAMPLING, width // DOWNSAMPLING, DOWNSAMPLING).mean((1, 3))
    return np.asarray(places.round()[None], dtype=np.uint8)


def mask_identity(view: Crop) -> Json:
    """Everything that a crop's mask depends on beside the crop itself."""
    mask = view.picture.mask
    assert mask is not None
    return {"digest": mask.digest, "kind": mask.kind, "size": view.picture.size, "version": VERSION}
