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
from simpletune.data.sources.image_files import crop_to_bucket, decode_mask, image_size, require_alpha
from simpletune.data.sources.sidecars import fold_name
from simpletune.data.sources.source import Mask, UnusableImage
from simpletune.data.sources.walk import OUTSIDE, SUFFIXES, Links, is_outside, read_regular
from simpletune.models.shared.buckets import Size
from simpletune.system.options import Json, plural

if TYPE_CHECKING:
    import numpy as np

    from simpletune.data.samples import Crop

LABEL = "-masklabel"  # OneTrainer's name of the mask beside NAME.jpg: NAME-masklabel.png
CONDITIONING = "-condlabel"  # and of a conditioning picture
OWN_LABELS, PLAIN_LABELS = (LABEL, CONDITIONING), ("_mask", "-mask", ".mask")
ASIDE = (*OWN_LABELS, *PLAIN_LABELS)
MASK_FOLDERS = ("mask", "masks", "masklabel", "masklabels", "conditioning", "conditioning_images", "conditioning_data")
"""Names of folders, in lower case, whose pictures are masks if pictures beside, or in a folder beside, have the same
names."""
NEIGHBOURS = 8  # folders beside a folder of masks; one among more belongs to none of them
VERSION = 1  # increment when the crop of a mask changes
SHAPE_TOLERANCE = 0.02  # largest relative difference of the aspect ratios of mask and picture

Kind = Literal["alpha", "files"]


@dataclass(frozen=True)
class FoundMasks:
    """Pictures and masks of a folder, told apart by their names."""

    images: list[Path]
    masks: dict[Path, Path]  # by picture
    aside: list[Path]  # masks, also those without a picture, and conditioning pictures: never trained on
    folder: Path | None = None  # the only folder of masks, with the paths of the pictures beside it
    beside: bool = False  # whether masks lie beside their pictures

    def list_lost(self, root: Path) -> list[Path]:
        """List the masks that training does not find: ``data.mask_path`` is one folder, with the paths of the
        pictures."""
        targets = {mask: mask_target(root, self.folder, image) for image, mask in self.masks.items()}
        return [mask for mask, target in targets.items() if find_mask(target) != mask]

    @property
    def hint(self) -> str:
        """What is said of masks that are not in use."""
        found = f"{plural(len(self.aside), 'mask is', 'masks are')} left alone, such as {self.aside[0].name}"
        if self.folder is None and not self.beside:
            return f"{found}. Put each beside its picture as NAME{LABEL}.png to use them"
        setting = "data.mask=files" + ("" if self.folder is None else f" data.mask_path={self.folder}")
        return f"{found}. Set {setting} to learn from their white parts only"


def find_masks(files: Sequence[Path]) -> FoundMasks:
    """Tell pictures and masks apart: masks are named like OneTrainer's (NAME-masklabel.png, and NAME-condlabel.png, a
    conditioning picture), NAME_mask.png or NAME-mask.png beside NAME.jpg, or lie in a folder such as ``masks`` with the
    names of the pictures beside or in a folder beside that folder (SimpleTuner, sd-scripts)."""
    folders = _mask_folders(files)
    if not folders and not any(label in file.name.lower() for file in files for label in ASIDE):
        return FoundMasks(list(files), {}, [])
    names = _Images(files)
    masks, aside = dict[Path, Path](), set[Path]()
    for file in files:
        label = _label_of(file)
        image = names.find(file.with_name(file.stem[: -len(label)])) if label else None
        if label in PLAIN_LABELS and image is None:  # a picture that somebody has called so
            continue
        if label is not None:
            aside.add(file)
            if label != CONDITIONING and image is not None:
                masks.setdefault(image, file)
    beside = bool(masks)
    places = []
    for place in folders:
        inside = [file for file in files if file.is_relative_to(place)]
        base, of = _images_of(place, inside, files, names)
        if base is None:
            continue
        places.append((place, base))
        aside.update(inside)
        for file, image in of.items():
            masks.setdefault(image, file)
    masks = {image: mask for image, mask in masks.items() if image not in aside}
    same = all(image.stem == mask.stem for image, mask in masks.items())
    single = len(places) == 1 and not beside and same and places[0][1] == places[0][0].parent
    folder = places[0][0] if single else None
    return FoundMasks([file for file in files if file not in aside], masks, sorted(aside), folder, beside)


def _label_of(file: Path) -> str | None:
    """Return the label at the end of a mask's name, in lower case."""
    low = file.stem.lower()
    return next((label for label in ASIDE if low.endswith(label) and low != label), None)


class _Images:
    """Pictures by path, without or with suffix, composed and in any case of letters; an exact path is preferred."""

    def __init__(self, files: Sequence[Path]):
        self._exact, self._folded = dict[str, Path](), dict[str, Path]()
        for file in files:
            for path in (str(file), str(file.with_suffix(""))):
                self._exact.setdefault(path, file)
                self._folded.setdefault(fold_name(path), file)

    def find(self, path: Path) -> Path | None:
        return self._exact.get(str(path)) or self._folded.get(fold_name(str(path)))


def _images_of(
    place: Path, inside: Sequence[Path], files: Sequence[Path], names: _Images
) -> tuple[Path | None, dict[Path, Path]]:
    """Find the folder whose pictures have their masks in ``place``, and the picture of each mask; None: half of neither
    the masks nor the pictures belong together. It is the folder around ``place``, or one beside it."""
    above = place.parent
    rest = [file for file in files if file.is_relative_to(above) and not file.is_relative_to(place)]
    beside = sorted({above / file.relative_to(above).parts[0] for file in rest if file.parent != above})
    for base in (above, *(beside if len(beside) <= NEIGHBOURS else ())):
        of = {}
        for file in inside:
            label = _label_of(file)
            path = base / file.relative_to(place).with_suffix("")
            image = names.find(path) or (names.find(path.with_name(path.name[: -len(label)])) if label else None)
            if image is not None and not image.is_relative_to(place):
                of[file] = image
        if of and 2 * len(of) >= min(len(inside), sum(file.is_relative_to(base) for file in rest)):
            return base, of
    return None, {}


def _mask_folders(files: Sequence[Path]) -> list[Path]:
    """List the folders with the name of a folder of masks that hold one of the files, at any depth."""
    return sorted(
        {
            parent
            for folder in {file.parent for file in files}
            for parent in (folder, *folder.parents)
            if parent.name.lower() in MASK_FOLDERS
        }
    )


def without_masks(files: Sequence[Path], kind: Kind | None, folder: str | Path | None) -> tuple[list[Path], list[str]]:
    """Return the files of a data folder to train on, never masks, and a hint at masks among them if they are not in
    use. ``kind`` and ``folder`` are ``data.mask`` and ``data.mask_path``."""
    if kind == "files" and folder is not None:
        files = [file for file in files if is_outside(file, folder)]
    found = find_masks(files)
    return found.images, [found.hint] if found.aside and kind != "files" else []


def alpha_mask(data: bytes, digest: str, read: partial[bytes]) -> Mask:
    """Return the mask given by a picture's opacity. Raises UnusableImage if it has no transparency."""
    require_alpha(data)
    return Mask("alpha", digest, read)


def mask_target(root: str | Path, folder: str | Path | None, file: Path) -> Path:
    """Return where the mask of a picture of the data folder ``root`` lies if it is a PNG; ``folder`` is
    ``data.mask_path``."""
    if folder is None:
        return file.with_name(f"{file.stem}{LABEL}.png")
    return (Path(folder) / file.relative_to(root)).with_suffix(".png")


def find_mask(target: Path) -> Path | None:
    """Find the file that holds a mask: ``target``, or one that differs in its suffix or label; None: there is none."""
    endings = [ending for suffix in (".png", *SUFFIXES) for ending in (suffix, suffix.upper())]  # PNG first
    stems = [target.stem]
    if target.stem.endswith(LABEL):  # beside the picture
        labels = (*PLAIN_LABELS, *(label.upper() for label in (LABEL, *PLAIN_LABELS)))
        stems += [target.stem.removesuffix(LABEL) + label for label in labels]
    places = (target.with_name(f"{stem}{ending}") for stem in stems for ending in endings)
    return next((place for place in places if os.path.lexists(place)), None)


def mask_file(root: Path, folder: str | Path | None, links: Links, file: Path, size: Size) -> Mask:
    """Find and check the mask of a picture of the data folder ``root`` in a separate file; ``folder`` is
    ``data.mask_path``. Raises UnusableImage if there is no mask, it cannot be read, or its aspect ratio differs from
    the picture's."""
    target = mask_target(root, folder, file)
    place = find_mask(target)
    if place is None:
        where = "" if folder is None else f" in {Path(folder)}"
        raise UnusableImage(f"has no mask: {target.name} is missing{where}")
    what = f"its mask {place.name}"
    if links == "inside" and place.is_symlink() and is_outside(place, folder or root):
        raise UnusableImage(f"{what} {OUTSIDE}")
    read = partial(read_regular, place)
    try:
        data = read()
        width, height = image_size(data)
    except UnusableImage as reason:
        raise UnusableImage(f"{what} {reason}") from None
    if abs(width * size[1] / (height * size[0]) - 1) > SHAPE_TOLERANCE:
        raise UnusableImage(
            f"{what} is {width}x{height}, another shape than the picture's {size[0]}x{size[1]}. Draw it on the picture"
        )
    return Mask("file", hashlib.sha256(data).hexdigest(), read)


def mask_pixels(view: Crop) -> np.ndarray:
    """Read the mask of a crop (of a picture that has one), cropped, rotated and mirrored like the picture: fp32 [h, w],
    its brightness or opacity, 0 to 255. Raises UnusableImage if it cannot be read, has changed since the scan, or is
    black everywhere."""
    from PIL import Image

    mask = view.image.mask
    assert mask is not None
    try:
        image = decode_mask(mask.read_same(), mask.kind)
    except OSError as error:
        raise UnusableImage(f"its mask cannot be read ({error.strerror or error})") from None
    if not image.getextrema()[1]:
        raise UnusableImage("its mask is black everywhere, so nothing would be learned. Paint white what to learn")
    if mask.kind == "file" and image.size != view.image.size:
        image = image.resize(view.image.size, Image.Resampling.BILINEAR)
    turned = Augmentation(rotation=view.augmentation.rotation)  # without the change of colours
    pixels: np.ndarray = crop_to_bucket(image.convert("RGB"), view.bucket, view.offset, view.flip, turned)[0]
    return (pixels + 1) * 127.5


def latent_mask(view: Crop, place: int) -> np.ndarray:
    """Reduce the mask of a crop to the latents' resolution: uint8 [1, h / place, w / place], the mean of each square of
    ``place`` pixels a side. Raises UnusableImage as ``mask_pixels`` does."""
    import numpy as np

    pixels = mask_pixels(view)
    height, width = pixels.shape
    places = pixels.reshape(height // place, place, width // place, place).mean((1, 3))
    return np.asarray(places.round()[None], dtype=np.uint8)


def mask_identity(view: Crop) -> Json:
    """Return all that a crop's mask depends on beside the crop itself."""
    mask = view.image.mask
    assert mask is not None
    return {"digest": mask.digest, "kind": mask.kind, "size": view.image.size, "version": VERSION}
