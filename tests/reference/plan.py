"""Which samples a step sees, with which noise, sigma and caption (part of the independent reference).

Everything follows from (seed, step): each draw has a random stream of its own, keyed by what it is for.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

Bucket = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class Settings:
    """One run, as far as its losses depend on it; field names are those of the settings file."""

    seed: int
    resolution: int
    batch_size: int
    accumulation: int
    steps: int
    lr: float
    weight_decay: float
    clip_norm: float
    sigma: str
    """"logit_normal", which needs mean and std, or "uniform"."""
    shift: float
    caption_dropout: float
    t5: bool
    t5_length: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    mean: float | None = None
    std: float | None = None
    max_aspect: float = 4.0
    lora_alpha: float | None = None
    """Needed by the method "lora"; the rank is lora_A's."""

    def __post_init__(self) -> None:
        if self.sigma not in ("logit_normal", "uniform"):
            raise ValueError(f'sigma is "{self.sigma}", which is neither "logit_normal" nor "uniform".')
        if self.sigma == "logit_normal" and None in (self.mean, self.std):
            raise ValueError('sigma "logit_normal" needs mean and std.')


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass: all of one bucket."""

    step: int
    micro: int
    samples: tuple[int, ...]
    """Indices into the sorted list of pictures."""
    first: int
    """Global index of the first sample; the others follow."""


def stream(seed: int, *parts: int | str) -> np.random.Generator:
    """The random stream for one purpose: Philox keyed by a hash of what it is for."""
    text = json.dumps([seed, *parts], separators=(",", ":"))
    key = int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def buckets(resolution: int, max_aspect: float, step: int = 16) -> list[Bucket]:
    """Sizes in multiples of a step whose area is at most resolution^2, both ways round, in sorted order."""
    found: set[Bucket] = set()
    for w in range(step, resolution * resolution // step + 1, step):
        h = resolution * resolution // (w * step) * step
        if h >= step and max(w / h, h / w) <= max_aspect:
            found |= {(w, h), (h, w)}
    return sorted(found)


def nearest(candidates: Sequence[Bucket], width: int, height: int) -> Bucket:
    """The bucket nearest in the logarithm of the aspect ratio; ties go to the larger area, then to the narrower."""
    wanted = math.log(width / height)
    return min(candidates, key=lambda size: (abs(math.log(size[0] / size[1]) - wanted), -size[0] * size[1], size[0]))


def pass_order(seed: int, number: int, members: Sequence[Bucket], batch_size: int) -> list[tuple[int, ...]]:
    """The micro-batches of one pass over the pictures, in the order they are trained.

    Args:
        members: the bucket of each sample, in sample order.
    """
    listed = []
    for size in sorted(set(members)):
        inside = [i for i, member in enumerate(members) if member == size]
        n = len(inside)
        permutation = stream(seed, "bucket-order", number, *size).permutation(n)
        for j in range(math.ceil(n / batch_size)):
            # Of a bucket that is no multiple of the batch size the last micro-batch is short.
            listed.append(tuple(inside[place] for place in permutation[j * batch_size : (j + 1) * batch_size]))
    order = stream(seed, "pass-order", number).permutation(len(listed))
    return [listed[i] for i in order]


def micro_batches(settings: Settings, members: Sequence[Bucket]) -> list[list[MicroBatch]]:
    """The micro-batches of every step; the last step of an epoch has those that are left."""
    size = settings.accumulation
    steps: list[list[MicroBatch]] = []
    epoch = 0
    while len(steps) < settings.steps:
        listed = pass_order(settings.seed, epoch, members, settings.batch_size)
        for start in range(0, len(listed), size):
            step = len(steps)
            rows = enumerate(listed[start : start + size])
            first = step * size
            steps.append([MicroBatch(step, n, row, (first + n) * settings.batch_size) for n, row in rows])
        epoch += 1
    return steps[: settings.steps]


def draw_noise(settings: Settings, step: int, micro: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal noise of a latent's shape, float32."""
    return stream(settings.seed, "noise", step, micro, index).standard_normal(shape, dtype=np.float32)


def draw_sigma(settings: Settings, step: int, micro: int, index: int) -> np.float32:
    """One noise level: its density, then s sigma / (1 + (s - 1) sigma) (arXiv:2403.03206, eq. 19 and 23)."""
    draws = stream(settings.seed, "sigma", step, micro, index)
    if settings.sigma == "logit_normal":
        sigma = 1 / (1 + math.exp(-(settings.mean + settings.std * draws.standard_normal())))
    else:
        sigma = draws.random()
    return np.float32(settings.shift * sigma / (1 + (settings.shift - 1) * sigma))


def draw_dropped(settings: Settings, step: int, micro: int, index: int) -> bool:
    """Whether the empty string stands for this sample's caption."""
    return bool(stream(settings.seed, "dropout", step, micro, index).random() < settings.caption_dropout)
