"""The cache of latents: encode each picture's crop once with the frozen autoencoder, and store its mask beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.data.samples import Crop
from simpletune.data.sources.holes import hole_pixels, latent_hole
from simpletune.data.sources.image_files import crop_to_bucket, decode_image, decoding_of
from simpletune.data.sources.masks import latent_mask
from simpletune.data.sources.source import Decoding, RejectedEntry, UnusableImage
from simpletune.data.storage.cache import crop_key
from simpletune.data.storage.claims import ALONE, KeyRange
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.models.families import Model
from simpletune.models.shared.buckets import Framing, framing_of
from simpletune.system.console import detail, progress
from simpletune.system.options import UserError
from simpletune.system.signals import poll

IMAGES = 16  # claimed together


class CachedImage(NamedTuple):
    """A crop from the cache."""

    z_0: Tensor  # [c, h, w], fp32
    mask: Tensor  # [1, h, w], 0 to 1, fp32; without a mask, 1 everywhere as [1, 1, 1]
    framing: Framing | None  # None: the model does not read it
    inpainting: Tensor | None = None  # [1 + c, h, w], fp32; None: it has no hole


class LatentCache:
    """Latents by picture and crop: ``z_0`` [c, h, w] in fp32; for a picture with a mask ``mask`` [1, h, w] with one
    byte for each place; for a family that reads it ``framing`` [6], int32. So one read brings all.

    What the framing says follows from a crop's key: the digest determines the picture's size. Families that read it
    have entries of their own, even for an autoencoder that they share with a family that does not.

    A crop with a hole has a second entry: ``hole`` [1, h, w], one byte for each place, 1 inside, and ``masked``
    [c, h, w], the latents of the picture whose hole is grey. So several holes share the picture's own latents, also
    those of a cache that was filled for another model; all holes of the size of the picture share one entry.

    Args:
        model: the model, with folders resolved.
        dtype: the type in which the autoencoder runs.
        place: of the cache; a path: a folder of single files.
        tile: ``memory.vae_tile``.
    """

    def __init__(self, model: Model, dtype: torch.dtype, place: CachePlace | Path, tile: int | None = None):
        self.model, self.autoencoder, self.dtype, self.tile = model, model.autoencoder, dtype, tile
        self._framed = model.text.reads_framing
        sums = place if isinstance(place, Path) else place.folder
        name = f"{model.files.part('vae').fingerprint(sums)}-{str(dtype).removeprefix('torch.')}"
        tiled, framed = "" if tile is None else f"-tile{tile}", "-framed" if self._framed else ""
        self.cache = open_cache(place, "latents", f"{name}{tiled}{framed}")

    @classmethod
    def from_config(cls, config: TrainConfig, place: CachePlace | Path) -> LatentCache:
        """Open a run's cache; folders are resolved."""
        dtype = config.model.autoencoder.dtype(config.precision)
        return cls(config.model, dtype, place, config.memory.vae_tile)

    def fill(
        self, views: Sequence[Crop], device: torch.device, share: KeyRange = ALONE
    ) -> tuple[int, list[RejectedEntry]]:
        """Encode the crops that are not cached yet.

        Args:
            views: the crops.
            device: where the autoencoder runs.
            share: what this process encodes first, if others fill the cache too; afterwards the cache holds all crops
                but the rejected ones.

        Returns:
            The number of entries that this process has stored, and the pictures that cannot be decoded, whose masks are
            unusable, or whose latents are not finite.
        """
        by_key: dict[str, list[Crop]] = {}
        for crop in dict.fromkeys(crop for view in views for crop in view.cached):
            by_key.setdefault(crop_key(crop), []).append(crop)
        missing = self.cache.lacking(by_key, share)
        encoded, rejected = 0, list[RejectedEntry]()
        if not missing:
            return encoded, rejected
        vae = cache(lambda: self.autoencoder.load(device, self.dtype, self.tile))  # if there is something to encode
        with progress("latents", share.count(len(missing)), "pictures", detail) as advance, torch.no_grad():
            for keys in self.cache.claim(missing, share, IMAGES):
                for view in (view for key in keys for view in by_key[key]):
                    try:
                        encoded += self._encode_one(view, vae, device)
                    except UnusableImage as reason:
                        rejected.append(RejectedEntry(view.image.name, str(reason), source=view.image.source))
                    advance()
                    poll()
        del vae
        free_memory(device)
        return encoded, rejected

    def _encode_one(self, view: Crop, vae: Callable[[], nn.Module], device: torch.device) -> int:
        """Encode a crop unless it is cached, and return the number of new samples.

        Raises:
            UnusableImage: it cannot be read or decoded, its latents are not finite, or its mask is unusable.
        """
        if view.image.by_row and (found := self._load_before_decodings(view)):
            self.cache.save(crop_key(view), found)
            return 1
        if view.hole is not None:
            return self._encode_hole(view, vae, device)
        key, mask, tensors = crop_key(view), view.image.mask, dict[str, Tensor]()
        if mask is not None:
            tensors["mask"] = torch.from_numpy(latent_mask(view, self.autoencoder.downsampling))
            without = crop_key(replace(view, image=replace(view.image, mask=None)))
            if without in self.cache:  # the data had no masks before
                with suppress(UserError, FileNotFoundError):  # it is damaged, or was set aside
                    tensors |= self.cache.load(without)
        if "z_0" not in tensors:
            image = _decode(view)
            pixels = torch.from_numpy(crop_to_bucket(image, view.bucket, view.offset, view.flip, view.augmentation))
            if key in self.cache:  # an identical file under another name has been encoded
                return 0
            tensors["z_0"] = self._encode(pixels, vae, device)
            if self._framed:  # of the picture itself: a stream's plan may not know its size
                framing = framing_of(image.size, view.bucket, view.offset, view.flip)
                tensors["framing"] = torch.tensor(framing, dtype=torch.int32).flatten()
        self.cache.save(key, tensors)
        return 1

    def _load_before_decodings(self, view: Crop) -> dict[str, Tensor]:
        """Load what version 0.1.0 stored for the crop of a row, if its picture is still decoded so; else nothing."""
        older = crop_key(replace(view, image=replace(view.image, decoding=Decoding())))
        if older == crop_key(view) or older not in self.cache:
            return {}
        if decoding_of(view.image.read_same(), view.image.background).changes:
            return {}
        with suppress(UserError, FileNotFoundError):  # it is damaged, or was set aside
            return dict(self.cache.load(older))
        return {}

    def _encode_hole(self, view: Crop, vae: Callable[[], nn.Module], device: torch.device) -> int:
        """Encode a crop's second entry as ``_encode_one`` does: the hole is grey, 0 in -1..1, before the autoencoder
        sees it (diffusers' ``prepare_mask_and_masked_image``)."""
        key = crop_key(view)
        if key in self.cache:  # an identical file, or another picture that is hole alone
            return 0
        place = self.autoencoder.downsampling
        hole = hole_pixels(view, place)  # [h, w]
        latent = latent_hole(hole, place)
        if not latent.any():
            raise UnusableImage(
                "its mask leaves no hole in a crop: there it is darker than half white, or its white is thinner "
                f"than {place} pixels. Paint it larger, or set data.crop to center"
            )
        pixels = np.zeros((3, *hole.shape), dtype=np.float32)
        if not hole.all():
            pixels = crop_to_bucket(_decode(view), view.bucket, view.offset, view.flip, view.augmentation)
            pixels[:, hole] = 0
        masked = self._encode(torch.from_numpy(pixels), vae, device)
        self.cache.save(key, {"hole": torch.from_numpy(latent[None].astype(np.uint8)), "masked": masked})
        return 1

    def _encode(self, pixels: Tensor, vae: Callable[[], nn.Module], device: torch.device) -> Tensor:  # [c, h, w]
        """Encode a picture to its latents [3, height, width] in pixels. Raises UnusableImage if they are not finite."""
        latents = self.autoencoder.encode(vae(), pixels[None].to(device))[0]
        if not all_finite([latents]):
            raise UnusableImage(f"is encoded to NaN or infinity by the autoencoder in {self.dtype}")
        return latents

    def load(self, view: Crop) -> CachedImage:
        """Load a crop, with its hole if it has one."""
        found = self.cache.load(crop_key(view.without_hole))
        mask = found["mask"].to(torch.float32) / 255 if "mask" in found else torch.ones(1, 1, 1)
        framing = None
        if self._framed:
            width, height, left, top, *target = found["framing"].tolist()
            framing = Framing((width, height), (left, top), (target[0], target[1]))
        inpainting = None
        if view.hole is not None:
            painted = self.cache.load(crop_key(view))
            inpainting = torch.cat([painted["hole"].to(torch.float32), painted["masked"]])
        return CachedImage(found["z_0"], mask, framing, inpainting)


def _decode(view: Crop) -> Image.Image:
    """Decode a crop's whole picture. Raises UnusableImage if it cannot be read or decoded."""
    try:
        return decode_image(view.image)
    except OSError as error:
        raise UnusableImage(f"cannot be read ({error.strerror or error})") from None


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no floating-point tensor contains NaN or infinity."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def free_memory(device: torch.device) -> None:
    """Free the memory of a stage's deleted models."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
