"""The cache of latents: encode each picture's crop once with the frozen autoencoder."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from simpletune.data.samples import Crop
from simpletune.data.sources.pictures import crop_to_bucket, decode
from simpletune.data.sources.source import RejectedEntry, UnusablePicture
from simpletune.data.storage.cache import crop_key
from simpletune.data.storage.claims import ALONE, KeyRange
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.models.families import Model
from simpletune.system.console import progress
from simpletune.system.signals import poll

PICTURES = 16  # claimed together


class LatentCache:
    """Latents by picture and crop.

    Args:
        model: the model, with folders resolved.
        dtype: the type in which the autoencoder runs.
        cache: the cache's place; a path: a folder of single files.
        tile: ``memory.vae_tile``.
    """

    def __init__(self, model: Model, dtype: torch.dtype, cache: CachePlace | Path, tile: int | None = None):
        self.model, self.dtype, self.tile = model, dtype, tile
        name = f"{model.part('vae').fingerprint()}-{str(dtype).removeprefix('torch.')}"
        self.cache = open_cache(cache, "latents", name if tile is None else f"{name}-tile{tile}")

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
            The number of crops that this process has encoded, and the pictures that could not be decoded.
        """
        by_key: dict[str, list[Crop]] = {}
        for view in views:
            by_key.setdefault(crop_key(view), []).append(view)
        missing = self.cache.lacking(by_key, share)
        return self._encode({key: by_key[key] for key in missing}, device, share) if missing else (0, [])

    def _encode(
        self, missing: Mapping[str, list[Crop]], device: torch.device, share: KeyRange
    ) -> tuple[int, list[RejectedEntry]]:
        """Encode crops by key. Rejects pictures that cannot be decoded or whose latents are not finite."""
        encoded, rejected = 0, list[RejectedEntry]()
        vae: nn.Module | None = None  # loaded only by a process that has something to encode
        with progress("latents", share.count(len(missing)), "pictures") as advance, torch.no_grad():
            for keys in self.cache.claimed(missing, share, PICTURES):
                vae = self.model.load_vae(device, self.dtype, self.tile) if vae is None else vae
                for view in (view for key in keys for view in missing[key]):
                    try:
                        encoded += self._encode_one(view, vae, device)
                    except UnusablePicture as reason:
                        rejected.append(RejectedEntry(view.picture.name, str(reason), source=view.picture.source))
                    advance()
                    poll()
        del vae
        free_memory(device)
        return encoded, rejected

    def _encode_one(self, view: Crop, vae: nn.Module, device: torch.device) -> int:
        """Encode a crop unless it is cached, and return the number of new files.

        Raises:
            UnusablePicture: it cannot be decoded, or its latents are not finite.
        """
        pixels = _pixels(view)
        if crop_key(view) in self.cache:  # an identical file under another name has been encoded
            return 0
        z_0 = self.model.encode_pictures(vae, pixels[None].to(device))[0]
        if not all_finite([z_0]):
            raise UnusablePicture(f"is encoded to NaN or infinity by the autoencoder in {self.dtype}")
        self.cache.save(crop_key(view), {"z_0": z_0})
        return 1

    def load(self, view: Crop) -> Tensor:
        """Load z_0 [c, h, w] in fp32."""
        return self.cache.load(crop_key(view))["z_0"]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no floating-point tensor contains NaN or infinity."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def _pixels(view: Crop) -> Tensor:
    """Read and crop a picture to [3, h, w] in -1..1.

    Raises:
        UnusablePicture: it cannot be read or decoded.
    """
    try:
        data = view.picture.read_same()
    except OSError as error:
        raise UnusablePicture(f"cannot be read ({error.strerror or error})") from None
    return torch.from_numpy(crop_to_bucket(decode(data), view.bucket, view.offset, view.flip))


def free_memory(device: torch.device) -> None:
    """Free the memory of a stage's deleted models."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
