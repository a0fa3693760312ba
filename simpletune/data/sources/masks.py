"""Masks of the parts of pictures to learn from, as files or by the picture's opacity, and their crops in latents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
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
CONDITIONING = "-condlabel"  # and of a conditioning picture
OWN_LABELS, PLAIN_LABELS = (LABEL, CONDITIONING), ("_mask", "-mask", ".mask")
ASIDE = (*OWN_LABELS, *PLAIN_LABELS)
MASK_FOLDERS = ("mask", "masks", "masklabel", "masklabels", "conditioning", "conditioning_images", "conditioning_data")
"""Names of folders, in lower case, whose pictures are masks if the pictures beside the folder have the same names."""
VERSION = 1  # increment when the crop of a mask changes
SHAPE_TOLERANCE = 0.02  # largest relative difference of the aspect ratios of mask and picture

Kind = Literal["alpha", "files"]


@dataclass(frozen=True)
class FoundMasks:
    """Pictures and masks of a folder, told apart by their names."""

    pictures: list[Path]
    masks: dict[Path, Path]  # by picture
    aside: list[Path]  # masks, also those without a picture, and conditioning pictures: never trained on
    folder: Path | None = None  # a folder below the data folder that holds the masks; None: they lie beside

    @property
    def hint(self) -> str:
        """What is said of masks that are not in use."""
        found = f"{plural(len(self.aside), 'mask is', 'masks are')} left alone, such as {self.aside[0].name}"
        setting = "data.mask=files" + ("" if self.folder is None else f" data.mask_path={self.folder}")
        return f"{found}. Set {setting} to learn from their white parts only"


def find_masks(files: Sequence[Path]) -> FoundMasks:
    """Tell pictures and masks apart: masks are named like OneTrainer's (NAME-masklabel.png, and NAME-condlabel.png, a
    conditioning picture), NAME_mask.png or NAME-mask.png beside NAME.jpg, or lie in a folder such as ``masks`` with the
    names of the pictures beside that folder (SimpleTuner, sd-scripts)."""
    folders = _mask_folders(files)
    if not folders and not any(label in file.name.lower() for file in files for label in ASIDE):
        return FoundMasks(list(files), {}, [])
    stems = {file.with_suffix(""): file for file in files}
    masks, aside = dict[Path, Path](), set[Path]()
    for file in files:
        low = file.stem.lower()
        label = next((label for label in ASIDE if low.endswith(label) and low != label), None)
        picture = stems.get(file.with_name(file.stem[: -len(label)])) if label else None
        if label in PLAIN_LABELS and picture is None:  # a picture that somebody has called so
            continue
        if label is not None and (picture is not None or label in OWN_LABELS):
            aside.add(file)
        if label is not None and label != CONDITIONING and picture is not None and file.stem.endswith(label):
            masks.setdefault(picture, file)
    folder = None
    for place in folders:
        inside = [file for file in files if file.is_relative_to(place)]
        of = {file: stems.get((place.parent / file.relative_to(place)).with_suffix("")) for file in inside}
        if 2 * sum(picture is not None for picture in of.values()) >= len(inside):
            folder = folder or (place if not masks else None)
            aside.update(inside)
            for file, picture in of.items():
                if picture is not None:
                    masks.setdefault(picture, file)
    masks = {picture: mask for picture, mask in masks.items() if picture not in aside}
    return FoundMasks([file for file in files if file not in aside], masks, sorted(aside), folder)


def _mask_folders(files: Sequence[Path]) -> list[Path]:
    """The folders with the name of a folder of masks that hold one of the files, at any depth."""
    return sorted({
        parent for folder in {file.parent for file in files}
        for parent in (folder, *folder.parents) if parent.name.lower() in MASK_FOLDERS
    })  # fmt: skip


def without_masks(files: Sequence[Path], kind: Kind | None, folder: str | Path | None) -> tuple[list[Path], list[str]]:
    """The files of a data folder to train on, never masks, and a hint at masks among them if they are not in use.
    ``kind`` and ``folder`` are ``data.mask`` and ``data.mask_path``."""
    if kind == "files" and folder is not None:
        files = [file for file in files if is_outside(file, folder)]
    found = find_masks(files)
    return found.pictures, [found.hint] if found.aside and kind != "files" else []


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
    """The file that holds a mask: ``target``, or one that differs in its suffix or label; None: there is none."""
    endings = [ending for suffix in (".png", *SUFFIXES) for ending in (suffix, suffix.upper())]  # PNG first
    stems = [target.stem]
    if target.stem.endswith(LABEL):  # beside the picture
        stems += [target.stem.removesuffix(LABEL) + label for label in PLAIN_LABELS]
    places = (target.with_name(f"{stem}{ending}") for stem in stems for ending in endings)
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
