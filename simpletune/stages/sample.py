"""Draw pictures with the family's solver and classifier-free guidance, for previews and scripts alike.

Shapes: b pictures, c channels, h and w an eighth of the picture's, t tokens, e and p text widths;
r rows of the transformer's batch: b, or with guidance 2b with the negative prompts first.
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

from simpletune.engine.quant.precision import WeightPrecision
from simpletune.models.families import Model
from simpletune.models.objectives import default_objective
from simpletune.models.objectives.objective import Solver, TrainingObjective
from simpletune.models.shared.buckets import Framing
from simpletune.models.shared.denoiser import Denoiser, model_device
from simpletune.models.shared.fp16_blocks import finite_passes
from simpletune.stages.modulation_plan import ModulationSource
from simpletune.system.options import UserError
from simpletune.system.signals import poll

Embeddings = tuple[Tensor, Tensor]
"""(prompt_embeds [t, e], pooled [p])."""


class SampledModel(Protocol):
    """The part of a model that sampling uses."""

    @property
    def objective(self) -> str:
        """The name of the objective that the model was trained with."""

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """(c, h, w) of the latents of a picture whose size is given in pixels."""

    def solver(self, objective: TrainingObjective, steps: int, skipped: int) -> Solver:
        """A new solver for ``steps`` steps without the ``skipped`` noisiest, for weights trained with an objective."""

    def framed(self, pooled: Tensor, framings: Sequence[Framing]) -> Tensor:
        """Pooled prompts [r, p] with what the model is told of how pictures are cut."""

    def predict(
        self, model: nn.Module, z_t: Tensor, time: Tensor, prompt_embeds: Tensor, pooled: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """What the network predicts [r, c, h, w] at z_t and the timestep that it receives [r]."""


@dataclass(frozen=True)
class PictureRequest:
    """One picture to draw.

    Args:
        prompt: what to draw.
        seed: the seed of the starting noise, drawn on the CPU.
        negative_prompt: what guidance steers away from.
        width: in pixels, a multiple of 16.
        height: in pixels, a multiple of 16.
        steps: sampling steps.
        guidance: classifier-free guidance; 1 disables it and skips the pass for the negative prompt.
        image: a picture to start from instead of pure noise; cropped to the size.
        strength: fraction of the steps to run from that picture, in (0, 1]; 1 ignores the picture.
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
        """How many of the first, noisiest steps a starting picture skips (diffusers' rule and rounding)."""
        return 0 if self.image is None else int(max(self.steps - self.steps * self.strength, 0))


def noises(request: PictureRequest, model: SampledModel) -> tuple[Tensor, Tensor | None]:  # [1, c, h, w] each
    """Draw the sampler's noise of a request, and the autoencoder's for a starting picture, if there is one."""
    # In fp32 on the CPU: it depends on neither device nor batch, and equals diffusers' from such a generator. The
    # autoencoder's is drawn first, as there.
    generator = torch.Generator("cpu").manual_seed(request.seed)
    shape = (1, *model.latent_shape(request.width, request.height))
    encoder = None if request.image is None else torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator), encoder


@dataclass(frozen=True)
class Sampler:
    """A transformer with everything that drawing needs.

    Args:
        denoiser: the transformer, with or without an adapter.
        model: its family.
        precision: its precision.
        modulation: the transformer's modulation if detached.
        batch_size: how many pictures to draw together. The noise of a picture does not depend on the batch, but the
            last bits of products depend on the number of rows.
        reuse_guidance: recompute the difference of the predictions for prompt and negative prompt only every this many
            steps. Values above 1 save passes and change the pictures.
        attention: returns a context for the transformer's passes, which may restrict PyTorch's choice of attention
            kernel; the autoencoder runs outside of it.
        objective: what the weights were trained with, which may change the solver's schedule; None: the model's own.
    """

    denoiser: Denoiser
    model: SampledModel
    precision: WeightPrecision
    modulation: ModulationSource | None = None
    batch_size: int = 1
    reuse_guidance: int = 1
    attention: Callable[[], AbstractContextManager[object]] = nullcontext
    objective: TrainingObjective | None = None

    @torch.no_grad()
    def denoise(
        self,
        requests: Sequence[PictureRequest],
        positive: Sequence[Embeddings],
        negative: Sequence[Embeddings],
        start: Tensor | None = None,  # [b, c, h, w]
        inpainting: Tensor | None = None,  # [b, 1 + c, h, w]
    ) -> Tensor:  # [b, c, h, w], fp32
        """Take the family's solver from noise to latents, with z in fp32.

        With guidance g the prediction is p_negative + g (p_positive - p_negative) (arXiv:2207.12598), with both halves
        in one batch. In fp16, repeats the drawing with fp32 in the blocks that overflowed.

        Args:
            requests: requests that can be drawn together (``batches``).
            positive: embeddings of each prompt.
            negative: embeddings of each negative prompt.
            start: z_0 of the starting pictures, if any.
            inpainting: for a model that ``inpaints``: the holes, 1 inside, and the latents of the masked pictures.
        """
        return finite_passes(self.denoiser, lambda: self._denoised(requests, positive, negative, start, inpainting))

    def _denoised(
        self,
        requests: Sequence[PictureRequest],
        positive: Sequence[Embeddings],
        negative: Sequence[Embeddings],
        start: Tensor | None,
        inpainting: Tensor | None,
    ) -> Tensor:
        device, dtype = model_device(self.denoiser), self.precision.compute_dtype()
        first = requests[0]
        objective = self.objective or default_objective(self.model.objective)
        solver = self.model.solver(objective, first.steps, first.skipped)
        guided, count = first.guidance > 1, len(requests)
        rows = [*negative, *positive] if guided else list(positive)
        prompt_embeds = torch.stack([embeds for embeds, _ in rows]).to(device)
        whole = Framing.whole((first.width, first.height))
        pooled = self.model.framed(torch.stack([vector for _, vector in rows]), [whole] * len(rows)).to(device)
        z = solver.start(torch.cat([noises(request, self.model)[0] for request in requests]), start).to(device)
        conditions = conditions_of(pooled, solver.levels, self.modulation)
        away: Tensor | float = 0.0
        with self.precision.autocast_on(device), self.attention():
            for step, (time, condition) in enumerate(zip(solver.times, conditions, strict=True)):
                poll()
                both = guided and step % self.reuse_guidance == 0
                skip = count if guided and not both else 0
                times = time.expand(2 * count if both else count).to(device)
                z_read = z if inpainting is None else torch.cat([z, inpainting.to(z)], 1)
                z_rows = torch.cat([z_read, z_read]) if both else z_read
                prediction = self.model.predict(
                    self.denoiser, z_rows, times, prompt_embeds[skip:], condition[skip:], dtype
                ).float()
                if both:
                    away = prediction[count:] - prediction[:count]
                    prediction = prediction[:count] + first.guidance * away
                elif guided:
                    prediction = prediction + (first.guidance - 1) * away
                z = solver.step(prediction, step, z)
        return z

    def latents(
        self,
        requests: Sequence[PictureRequest],
        embeddings: Callable[[str], Embeddings],
        starts: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:  # [1, c, h, w] each, fp32, on the CPU
        """Draw latents for requests, in their order; ``embeddings`` returns those of a prompt, ``starts`` are from
        ``encode_starts``."""
        latents: dict[int, Tensor] = {}
        load = cache(embeddings)  # reads a prompt with many seeds once
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
    """The transformer's pooled input at each noise level: the pooled prompts, or, if its modulation is detached, its
    modulations, computed one window of levels at a time."""
    if modulation is None:
        yield from (pooled for _ in sigmas)
        return
    for levels in sigmas.split(modulation.window):
        rows = modulation(levels.repeat_interleave(len(pooled)), pooled.repeat(len(levels), 1))
        yield from rows.view(len(levels), len(pooled), -1)


def generate_pictures(
    sampler: Sampler,
    vae: nn.Module,
    model: Model,
    requests: Sequence[PictureRequest],
    embeddings: Callable[[str], Embeddings],
) -> list[Image.Image]:
    """Draw pictures for requests, in their order; ``embeddings`` returns those of a prompt."""
    starts = encode_starts(vae, model, requests)
    return decode(vae, model, sampler.latents(requests, embeddings, starts))


@torch.no_grad()
def encode_starts(
    vae: nn.Module, model: Model, requests: Sequence[PictureRequest]
) -> list[Tensor | None]:  # [1, c, h, w]
    """Encode each request's starting picture to z_0 on the CPU; None for requests without one."""
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


def starting_pixels(request: PictureRequest) -> Tensor:  # [1, 3, h, w] in -1..1
    """Read a request's starting picture, scale it to cover the size, and crop its centre.

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


def batches(requests: Sequence[PictureRequest], batch_size: int) -> list[list[int]]:
    """Group the indices of requests that can be drawn together, at most ``batch_size`` each."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, each in enumerate(requests):
        key = each.width, each.height, each.steps, each.guidance, each.skipped, each.image is None
        alike.setdefault(key, []).append(number)
    return [group[i : i + batch_size] for group in alike.values() for i in range(0, len(group), batch_size)]


@torch.no_grad()
def decode(vae: nn.Module, model: Model, latents: Sequence[Tensor]) -> list[Image.Image]:
    """Decode latents [1, c, h, w] one at a time, to save memory and to keep each independent of the others."""
    device, images = next(vae.parameters()).device, []
    for z in latents:  # decoded pictures are [1, 3, h, w] in 0..1
        array = (model.decode_latents(vae, z.to(device))[0] * 255).round().to(torch.uint8).permute(1, 2, 0).cpu()
        images.append(Image.fromarray(array.numpy()))
    return images
