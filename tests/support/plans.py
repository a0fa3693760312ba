"""Plans over pictures that exist by name only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import make_samples
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.source import SourceImage
from simpletune.models.objectives.flow import Flow

SIZES = [(100, 100)] * 5 + [(48, 80)] * 3 + [(80, 48)]
"""At 64 px: five in the square bucket, three upright, one lying."""


def some_images(sizes: list[tuple[int, int]] = SIZES) -> list[SourceImage]:
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(len(sizes))]
    return [
        SourceImage(f"{number:03d}.png", f"caption {number}", size, digests[number], bytes)
        for number, size in enumerate(sizes)
    ]


def make_plan(
    images: list[SourceImage] | None = None,
    *,
    seed: int = 7,
    batch_size: int = 2,
    accumulation: int = 1,
    objective: Flow | None = None,
    lengths: Callable[[Sequence[str]], Sequence[int]] | None = None,
    **source: object,
) -> Plan:
    folder = Folder(**{"path": "x", "resolution": 64, **source})
    samples = make_samples(some_images() if images is None else images, folder.members)
    return Plan(samples, folder, objective or Flow(), seed, GlobalBatch(batch_size, accumulation), lengths=lengths)
