"""The cache of masks at the latents' resolution, apart from the latents: a new mask needs no new encoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from simpletune.data.samples import Crop
from simpletune.data.sources.masks import latent_mask, mask_key, masked
from simpletune.data.sources.source import RejectedEntry, UnusablePicture
from simpletune.data.storage.claims import ALONE, KeyRange
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.system.signals import poll

MASKS = 64  # claimed together


class MaskCache:
    """Masks by crop, with one byte for each position of the latent.

    Args:
        cache: the cache's place; a path: a folder of single files.
    """

    def __init__(self, cache: CachePlace | Path):
        self.cache = open_cache(cache, "masks")

    def fill(self, views: Sequence[Crop], share: KeyRange = ALONE) -> list[RejectedEntry]:
        """Crop the masks that are not cached yet.

        Args:
            views: the crops.
            share: what this process crops first, if others fill the cache too.

        Returns:
            The pictures whose masks are unusable.
        """
        wanted = {mask_key(view): view for view in masked(views)}
        missing = self.cache.lacking(wanted, share)
        rejected: dict[tuple[int, str], RejectedEntry] = {}
        for key in (key for keys in self.cache.claimed(missing, share, MASKS) for key in keys):
            view = wanted[key]
            picture = view.picture
            try:
                self.cache.save(key, {"mask": torch.from_numpy(latent_mask(view))})
            except UnusablePicture as reason:
                rejected[picture.source, picture.name] = RejectedEntry(picture.name, str(reason), source=picture.source)
            poll()
        return list(rejected.values())

    def load(self, view: Crop) -> Tensor:
        """Load the mask [1, h, w] of a crop, 0 to 1 in fp32; 1 everywhere without one, as [1, 1, 1]."""
        if view.picture.mask is None:
            return torch.ones(1, 1, 1)
        return self.cache.load(mask_key(view))["mask"].to(torch.float32) / 255
