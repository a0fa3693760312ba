"""How a picture was cut: the numbers name the pixels that were kept, and stay with the latents in every cache."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from simpletune.data.samples import Crop
from simpletune.data.sources.augmentation import Augmentation
from simpletune.data.sources.image_files import EXIF_ORIENTATION, crop_to_bucket, decode
from simpletune.data.sources.source import Mask, SourceImage
from simpletune.data.storage.cache import crop_key
from simpletune.data.storage.place import CachePlace
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared.buckets import Framing, covering_size, framing_of
from simpletune.models.shared.conditioning import Conditioning
from simpletune.stages.latent_cache import LatentCache

CPU = torch.device("cpu")


class Autoencoder:
    """A model with an autoencoder that other families use too; ``framing`` says whether it reads how pictures are
    cut."""

    downsampling = 8

    def __init__(self, framing: bool):
        self.text, self.encoded = SimpleNamespace(reads_framing=framing), 0

    @property
    def autoencoder(self) -> Autoencoder:
        return self

    @property
    def files(self) -> Autoencoder:
        return self

    def part(self, name: str) -> Autoencoder:
        return self

    def fingerprint(self, sums: Path) -> str:
        return "shared"

    def load(self, *rest: object) -> None:
        return None

    def encode(self, vae: None, pixels: torch.Tensor) -> torch.Tensor:
        self.encoded += 1
        return pixels[:, :, ::8, ::8]


def latents_in(place: CachePlace | Path, framing: bool = True) -> LatentCache:
    return LatentCache(Autoencoder(framing), torch.float32, place)  # type: ignore[arg-type]


def image_of(size: tuple[int, int], orientation: int = 1, **more: Any) -> SourceImage:
    """A picture of noise, whose file is turned by EXIF."""
    pixels, exif, file = (
        np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8),
        Image.Exif(),
        io.BytesIO(),
    )
    exif[EXIF_ORIENTATION] = orientation
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    data = file.getvalue()
    return SourceImage("a.png", "a", size, hashlib.sha256(data).hexdigest(), lambda: data, **more)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("offset", [(0.5, 0.5), (0.1, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize(("size", "bucket"), [((150, 100), (64, 64)), ((90, 160), (64, 64)), ((40, 20), (64, 128))])
def test_the_numbers_name_the_pixels_that_were_kept(
    size: tuple[int, int], bucket: tuple[int, int], offset: tuple[float, float], flip: bool
) -> None:
    """Of the scaled picture, mirrored first if it is to be, as diffusers' script does."""
    image = decode(image_of(size).read())
    framing = framing_of(size, bucket, offset, flip)
    scaled = image.resize(covering_size(size, bucket), Image.Resampling.LANCZOS)
    shown = ImageOps.mirror(scaled) if flip else scaled
    (left, top), (width, height) = framing.crop, framing.target
    kept = np.asarray(shown.crop((left, top, left + width, top + height)), np.float32) / 127.5 - 1
    assert framing.original == size and framing.target == bucket
    assert np.array_equal(kept.transpose(2, 0, 1), crop_to_bucket(image, bucket, offset, flip))


def test_diffusers_numbers_for_a_centred_crop() -> None:
    """``original + crop + target``, height first (train_text_to_image_lora_sdxl.py, compute_time_ids)."""
    framing = framing_of((2000, 1200), (1024, 1024), (0.5, 0.5), False)
    text = Conditioning(torch.zeros(1, 3, 2, dtype=torch.bfloat16))
    numbers = SDXL().text.framed(text, [framing]).extra["time_ids"]
    assert numbers.tolist() == [[1200, 2000, 0, (1707 - 1024) // 2, 1024, 1024]]
    assert numbers.dtype == torch.float32, "bf16 has no 341"


@pytest.mark.parametrize("form", ["files", "shards"])
def test_a_cache_keeps_the_numbers_of_each_crop(form: Any, tmp_path: Path) -> None:
    """Of the file itself, turned by EXIF: a stream's plan knows only about the size."""
    upright, turned = image_of((150, 100)), image_of((150, 100), 6)
    views = [Crop(image, (64, 64), (0.5, 0.2), flip) for image in (upright, turned) for flip in (False, True)]
    views.append(replace(views[0], augmentation=Augmentation(rotation=9)))
    views.append(Crop(replace(turned, size=(64, 64), by_row=True, digest="row 7"), (64, 64), (1.0, 0.0), True))
    views.append(Crop(upright, (128, 64), (0.0, 1.0), False))
    views.append(Crop(image_of((32, 32)), (64, 64), (0.5, 0.5), False))  # scaled up: the size stays small
    cache = latents_in(CachePlace(tmp_path, form))
    assert cache.fill(views, CPU) == (len(views), [])
    assert [latents_in(CachePlace(tmp_path, form)).load(view).framing for view in views] == [
        ((150, 100), (16, 0), (64, 64)),
        ((150, 100), (16, 0), (64, 64)),
        ((100, 150), (0, 6), (64, 64)),
        ((100, 150), (0, 6), (64, 64)),
        ((150, 100), (16, 0), (64, 64)),
        ((100, 150), (0, 0), (64, 64)),
        ((150, 100), (0, 21), (128, 64)),
        ((32, 32), (0, 0), (64, 64)),
    ]


def test_a_mask_added_later_and_a_copy_under_another_name_keep_the_numbers(tmp_path: Path) -> None:
    view = Crop(image_of((150, 100)), (64, 64), (0.25, 0.5), True)
    first, second = latents_in(tmp_path), latents_in(tmp_path)
    first.fill([view, replace(view, image=replace(view.image, name="b.png"))], CPU)
    mask = io.BytesIO()
    Image.new("L", (150, 100), 255).save(mask, "PNG")
    found = Mask("file", hashlib.sha256(mask.getvalue()).hexdigest(), mask.getvalue)
    masked = replace(view, image=replace(view.image, mask=found))
    assert second.fill([masked], CPU) == (1, []) and (first.model.encoded, second.model.encoded) == (1, 0)
    assert second.load(masked).framing == first.load(view).framing == Framing((150, 100), (24, 0), (64, 64))


def test_a_family_that_does_not_read_the_numbers_leaves_no_entry_to_one_that_does(tmp_path: Path) -> None:
    """With one autoencoder, such an entry would say nothing of the crop; whole pictures are no default."""
    view = Crop(image_of((150, 100)), (64, 64), (0.25, 0.5), True)
    plain, told = latents_in(tmp_path, framing=False), latents_in(tmp_path)
    plain.fill([view], CPU)
    assert told.cache.lacking([crop_key(view)]) == [crop_key(view)]
    told.fill([view], CPU)
    assert plain.load(view).framing is None and told.load(view).framing is not None
    assert torch.equal(plain.load(view).z_0, told.load(view).z_0)
