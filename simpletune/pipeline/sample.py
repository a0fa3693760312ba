"""Drawing pictures: Euler steps along the velocity, with classifier-free guidance. One path for previews and scripts.

Shapes as in models/sd3.py: b pictures, c channels, h and w an eighth of the picture's, t tokens, e and p text widths;
r rows of the transformer's batch: b, or with guidance 2b, the negative prompts first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from simpletune.flow import interpolate
from simpletune.models.sd3 import SD3, predict_velocity
from simpletune.models.transformer import Transformer
from simpletune.options import UserError
from simpletune.pipeline.load import device_of
from simpletune.pipeline.modulation_plan import ModulationSource
from simpletune.quant.precision import WeightPrecision
from simpletune.system.signals import poll

Embeddings = tuple[Tensor, Tensor]
"""(prompt_embeds [t, e], pooled [p])."""


class NoiseLevels(Protocol):
    """What sampling needs of diffusers' scheduler."""

    sigmas: Tensor  # [steps + 1]

    def set_timesteps(self, steps: int, /) -> None:
        """Make ``sigmas`` for so many steps."""


class SampledModel(Protocol):
    """What sampling needs of a model."""

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """(c, h, w) of the latents of a picture in pixels."""

    def scheduler(self) -> NoiseLevels:
        """The schedule of noise levels."""


@dataclass(frozen=True)
class Request:
    """One picture to draw.

    Args:
        prompt: what to draw.
        seed: of the starting noise, drawn on the CPU.
        negative_prompt: what guidance leads away from.
        width: in pixels, a multiple of 16.
        height: in pixels, a multiple of 16.
        steps: sampling steps.
        guidance: classifier-free guidance; 1: none, and no pass for the negative prompt.
        image: a picture to start from instead of noise alone; it is cut to the size.
        strength: share of the steps that are taken from there, in (0, 1]; 1 forgets the picture.
    """

    prompt: str
    seed: int
    negative_prompt: str = ""
    width: int = 1024
    height: int = 1024
    steps: int = 28
    guidance: float = 4.5
    image: Path | None = None
    strength: float = 0.6

    @property
    def skipped(self) -> int:
        """Steps that a starting picture saves: the first, noisiest ones (diffusers' rule, rounded as there)."""
        return 0 if self.image is None else int(max(self.steps - self.steps * self.strength, 0))

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Requests of which this is equal can be drawn in one batch."""
        return self.width, self.height, self.steps, self.guidance, self.skipped, self.image is None


def noises(request: Request, model: SampledModel) -> tuple[Tensor, Tensor | None]:  # [1, c, h, w] each
    """The noise of a request: on the CPU in fp32, so the same on every device and in every batch, and the same as
    diffusers' with a CPU generator of that seed.

    Returns:
        The sampler's noise; and with a starting picture the autoencoder's, which is drawn first.
    """
    generator = torch.Generator("cpu").manual_seed(request.seed)
    shape = (1, *model.latent_shape(request.width, request.height))
    encoder = None if request.image is None else torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator), encoder


def autocast_of(precision: WeightPrecision, device: torch.device) -> AbstractContextManager[object]:
    """bf16 products over fp32 weights where the precision asks for it."""
    return torch.autocast(device.type, torch.bfloat16) if precision.autocast else nullcontext()


@dataclass(frozen=True)
class Sampler:
    """A transformer, and what drawing with it takes.

    Args:
        transformer: with or without an adapter.
        model: its family.
        precision: how its weights are held.
        modulation: of the transformer, where it was detached.
        batch_size: how many pictures go through the transformer together. A picture's noise is its own, whatever the
            batch; but products of other numbers of rows differ in the last bits.
        reuse_guidance: the difference v_positive - v_negative is computed anew every so many steps, and kept between;
            above 1 that saves passes and changes the pictures.
    """

    transformer: Transformer
    model: SampledModel
    precision: WeightPrecision
    modulation: ModulationSource | None = None
    batch_size: int = 1
    reuse_guidance: int = 1

    @torch.no_grad()
    def denoise(
        self,
        requests: Sequence[Request],
        positive: Sequence[Embeddings],
        negative: Sequence[Embeddings],
        start: Tensor | None = None,  # [b, c, h, w]
    ) -> Tensor:  # [b, c, h, w], fp32
        """Integrate dz/dsigma = velocity from noise to pictures' latents: Euler's method (arXiv:2206.00364, alg. 1).

        Noise levels are those of diffusers' scheduler; z stays in fp32. With guidance g the velocity is
        v_negative + g (v_positive - v_negative) (arXiv:2207.12598), both halves in one batch.

        Args:
            requests: alike in size, steps, guidance and strength (``Request.batch_key``).
            positive: embeddings of each prompt.
            negative: embeddings of each negative prompt.
            start: z_0 of the starting pictures, where there are any.
        """
        device, dtype = device_of(self.transformer), self.precision.compute_dtype()
        first = requests[0]
        sigmas = self.sigmas(first)
        guided, count = first.guidance > 1, len(requests)
        rows = [*negative, *positive] if guided else list(positive)
        prompt_embeds = torch.stack([embeds for embeds, _ in rows]).to(device)
        pooled = torch.stack([vector for _, vector in rows]).to(device)
        z = torch.cat([noises(request, self.model)[0] for request in requests])
        z = (z if start is None else interpolate(start, z, sigmas[:1])).to(device)
        conditions = conditions_of(pooled, sigmas[:-1], self.modulation)
        away: Tensor | float = 0.0
        with autocast_of(self.precision, device):
            levels = zip(sigmas[:-1], sigmas[1:], conditions, strict=True)
            for step, (sigma, sigma_next, condition) in enumerate(levels):
                poll()
                both = guided and step % self.reuse_guidance == 0
                skip = count if guided and not both else 0
                level = sigma.expand(2 * count if both else count).to(device)
                z_rows = torch.cat([z, z]) if both else z
                velocity = predict_velocity(
                    self.transformer, z_rows, level, prompt_embeds[skip:], condition[skip:], dtype
                ).float()
                if both:
                    away = velocity[count:] - velocity[:count]
                    velocity = velocity[:count] + first.guidance * away
                elif guided:
                    velocity = velocity + (first.guidance - 1) * away
                z = z + (sigma_next - sigma).to(device) * velocity
        return z

    def sigmas(self, request: Request) -> Tensor:  # [s + 1], fp32, on the CPU
        """The noise levels of a request's steps, and the 0 that they end at."""
        scheduler = self.model.scheduler()
        scheduler.set_timesteps(request.steps)
        return scheduler.sigmas.to(torch.float32)[request.skipped :]

    def latents(
        self,
        requests: Sequence[Request],
        embeddings: Callable[[str], Embeddings],
        starts: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:  # [1, c, h, w] each, fp32, on the CPU
        """Latents for requests, in their order.

        Args:
            requests: what to draw.
            embeddings: of a prompt.
            starts: what ``encode_starts`` gave.
        """
        latents: dict[int, Tensor] = {}
        load = cache(embeddings)  # a prompt with many seeds is read once
        for batch in batches(requests, self.batch_size):
            some = [requests[number] for number in batch]
            z_0 = [start for number in batch if starts is not None and (start := starts[number]) is not None]
            positive = [load(request.prompt) for request in some]
            negative = [load(request.negative_prompt) for request in some]
            z = self.denoise(some, positive, negative, torch.cat(z_0) if z_0 else None)
            latents |= dict(zip(batch, z.cpu().split(1), strict=True))
        return [latents[number] for number in range(len(requests))]


def conditions_of(
    pooled: Tensor,  # [r, p]
    sigmas: Tensor,  # [s], fp32
    modulation: ModulationSource | None,
) -> Iterator[Tensor]:  # s times [r, p] or [r, m]
    """What the transformer takes beside the tokens at each noise level: the pooled prompts, or where its modulation was
    taken out its modulations, as many levels at once as a window has steps."""
    if modulation is None:
        yield from (pooled for _ in sigmas)
        return
    for levels in sigmas.split(modulation.window):
        rows = modulation(levels.repeat_interleave(len(pooled)), pooled.repeat(len(levels), 1))
        yield from rows.view(len(levels), len(pooled), -1)


def draw(
    sampler: Sampler, vae: nn.Module, model: SD3, requests: Sequence[Request], embeddings: Callable[[str], Embeddings]
) -> list[Image.Image]:
    """Pictures for requests, in their order.

    Args:
        sampler: draws the latents.
        vae: encodes starting pictures and decodes the latents.
        model: knows the scales between them.
        requests: what to draw.
        embeddings: of a prompt.
    """
    starts = encode_starts(vae, model, requests)
    return decode(vae, model, sampler.latents(requests, embeddings, starts))


@torch.no_grad()
def encode_starts(vae: nn.Module, model: SD3, requests: Sequence[Request]) -> list[Tensor | None]:  # [1, c, h, w]
    """z_0 of each request's starting picture, on the CPU; None where there is none."""
    starts: list[Tensor | None] = []
    for request in requests:
        noise = noises(request, model)[1]
        if request.image is None or noise is None:
            starts.append(None)
            continue
        device = next(vae.parameters()).device
        z_0 = model.encode_pictures(vae, starting_pixels(request).to(device), noise.to(device))
        starts.append(z_0.cpu())
    return starts


def starting_pixels(request: Request) -> Tensor:  # [1, 3, h, w] in -1..1
    """A request's starting picture, scaled until it covers the size, its middle cut out.

    Raises:
        UserError: it cannot be read.
    """
    assert request.image is not None
    try:
        image = ImageOps.exif_transpose(Image.open(request.image)).convert("RGB")
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(f"--image: {request.image} cannot be read ({error}). Give a PNG, JPEG or WebP file") from None
    image = ImageOps.fit(image, (request.width, request.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1


def batches(requests: Sequence[Request], batch_size: int) -> list[list[int]]:
    """Numbers of requests that are drawn together: alike, and at most so many."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, request in enumerate(requests):
        alike.setdefault(request.batch_key, []).append(number)
    return [group[i : i + batch_size] for group in alike.values() for i in range(0, len(group), batch_size)]


@torch.no_grad()
def decode(vae: nn.Module, model: SD3, latents: Sequence[Tensor]) -> list[Image.Image]:
    """Pictures of latents [1, c, h, w], one at a time: with the memory of one, and independent of the others."""
    device = next(vae.parameters()).device
    return [to_image(model.decode_latents(vae, z.to(device))[0]) for z in latents]


def to_image(pixels: Tensor) -> Image.Image:
    """A picture [3, h, w] in 0..1 as an RGB image."""
    array = (pixels * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array)
