"""Generate pictures with the family's solver and classifier-free guidance, for previews and scripts alike.

Shapes: b pictures, c channels, h and w the latents' sides; r rows of the denoiser's batch: b, or with guidance 2b with
the negative prompts first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from simpletune.data.sources.image_files import decode as decode_image
from simpletune.data.sources.masks import SHAPE_TOLERANCE, decode_mask
from simpletune.data.sources.source import UnusableImage
from simpletune.engine.denoiser import Denoiser, model_device
from simpletune.engine.fp16_blocks import finite_passes
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.models.families import Model
from simpletune.models.objectives.objective import Solver, TrainingObjective
from simpletune.models.shared.autoencoder import Autoencoder
from simpletune.models.shared.buckets import Framing, Size
from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.models.text.family_text import FamilyText
from simpletune.stages.modulation_plan import ModulationSource, replay
from simpletune.system.options import UserError
from simpletune.system.signals import poll


class SampledModel(Protocol):
    """The part of a model that sampling uses."""

    @property
    def inpaints(self) -> bool:
        """Whether the model reads a mask and the latents of the masked picture after z_t."""

    @property
    def autoencoder(self) -> Autoencoder:
        """Between pictures and latents."""

    def solver(self, objective: TrainingObjective, size: Size, steps: int, skipped: int) -> Solver:
        """Build a solver for ``steps`` steps without the ``skipped`` noisiest, for weights trained with an objective
        and pictures of a size in pixels."""

    def skipped_steps(self, steps: int, strength: float) -> int:
        """Count the first, noisiest of ``steps`` steps that a starting picture skips."""

    @property
    def text(self) -> FamilyText[Any]:
        """The text side, which tells the model how pictures are cut."""

    def predict(
        self, model: nn.Module, z_t: Tensor, time: Tensor, conditioning: Conditioning, dtype: torch.dtype
    ) -> Tensor:
        """Predict at z_t and the timestep that the network receives [r]: [r, c, h, w]."""

    def rescale(self, guided: Tensor, positive: Tensor) -> Tensor:
        """Correct a prediction with guidance [b, c, h, w] by that for the prompt alone."""


@dataclass(frozen=True)
class ImageRequest:
    """One picture to generate.

    Args:
        prompt: what to generate.
        seed: the seed of the starting noise, drawn on the CPU.
        negative_prompt: what guidance steers away from; None: zeros in place of its embeddings.
        width: in pixels, a multiple of the family's ``multiple``.
        height: likewise.
        steps: sampling steps.
        guidance: classifier-free guidance; 1 disables it and skips the pass for the negative prompt.
        image: a picture to start from instead of pure noise, or with a mask to paint into; cropped to the size.
        strength: fraction of the steps to run from that picture, in (0, 1]; 1 ignores the picture inside the mask, or
            without a mask everywhere.
        mask: white where ``image`` is painted anew, of its shape. None: everywhere.
        paste: put the pixels of ``image`` back outside the mask, which the autoencoder changes.
    """

    prompt: str
    seed: int
    negative_prompt: str | None = ""
    width: int = 1024
    height: int = 1024
    steps: int = 28
    guidance: float = 4.5
    image: Path | Image.Image | None = None
    strength: float = 0.6
    mask: Path | Image.Image | None = None
    paste: bool = False

    @property
    def texts(self) -> list[str]:
        """What has to be encoded."""
        return [self.prompt, *([] if self.negative_prompt is None else [self.negative_prompt])]

    def skipped(self, model: SampledModel) -> int:
        """Count the first, noisiest steps that a starting picture skips: those that diffusers' pipelines of the model
        skip, but never all, which they refuse."""
        if self.image is None:
            return 0
        return min(model.skipped_steps(self.steps, self.strength), self.steps - 1)

    def starts_from_image(self, model: SampledModel) -> bool:
        """Return whether the first z is the noised picture, not pure noise."""
        # diffusers: its inpainting pipelines start from pure noise at a strength of 1, those for whole pictures do not
        inpainted = self.mask is not None or model.inpaints
        return self.image is not None and not (inpainted and self.strength == 1)


class Noises(NamedTuple):
    """A request's noise, [1, c, h, w] each."""

    start: Tensor
    image: Tensor | None  # of the posterior of a starting picture, if it is encoded
    masked: Tensor | None  # of the posterior of the masked picture, for a model that inpaints


def noises(request: ImageRequest, model: SampledModel) -> Noises:
    """Draw a request's noise for the sampler and the autoencoder."""
    # In fp32 on the CPU: it depends on neither device nor batch, and equals diffusers' from such a generator: first the
    # picture's, then the sampler's, then the masked picture's.
    seed = request.seed if request.seed < 2**64 else request.seed - 2**64  # one after the largest
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (1, *model.autoencoder.shape(request.width, request.height))
    encoded = request.starts_from_image(model) or (request.mask is not None and not model.inpaints)
    image = torch.randn(shape, generator=generator) if encoded else None
    start = torch.randn(shape, generator=generator)
    return Noises(start, image, torch.randn(shape, generator=generator) if model.inpaints else None)


class EncodedImage(NamedTuple):
    """What the sampler reads of a request's picture and mask, fp32, on the CPU."""

    z_0: Tensor | None = None  # [1, c, h, w], if the picture is started from or blended in
    mask: Tensor | None = None  # [1, 1, h, w], 1 where it is painted
    masked: Tensor | None = None  # [1, c, h, w], of the masked picture, for a model that inpaints


@dataclass(frozen=True)
class Sampler:
    """A denoiser with everything that generating needs.

    Args:
        denoiser: the model, with or without an adapter.
        model: its family.
        precision: its precision.
        modulation: the denoiser's modulation if detached.
        batch_size: how many pictures to generate together. The noise of a picture does not depend on the batch, but the
            last bits of products depend on the number of rows.
        reuse_guidance: recompute the difference of the predictions for prompt and negative prompt only every this many
            steps. Values above 1 save passes and change the pictures.
        attention: returns a context for the denoiser's passes, which may restrict PyTorch's choice of attention
            kernel; the autoencoder runs outside of it.
        objective: what the weights were trained with, which decides the solver.
        drawn: called after each picture's denoising.
    """

    denoiser: Denoiser
    model: SampledModel
    precision: WeightPrecision
    modulation: ModulationSource | None = None
    batch_size: int = 1
    reuse_guidance: int = 1
    attention: Callable[[], AbstractContextManager[object]] = nullcontext
    objective: TrainingObjective = field(kw_only=True)
    drawn: Callable[[], object] = field(kw_only=True, default=object)

    @torch.no_grad()
    def denoise(
        self,
        requests: Sequence[ImageRequest],
        positive: Sequence[Conditioning],
        negative: Sequence[Conditioning],
        start: Tensor | None = None,  # [b, c, h, w]
        inpainting: Tensor | None = None,  # [b, 1 + c, h, w]
        outside: tuple[Tensor, Tensor] | None = None,  # [b, c, h, w], [b, 1, h, w]
    ) -> Tensor:  # [b, c, h, w], fp32
        """Take the family's solver from noise to latents, with z in fp32 and guidance g by p_negative + g (p_positive -
        p_negative) (arXiv:2207.12598).

        Args:
            requests: requests that can be generated together (``batches``).
            positive: the conditioning of each prompt.
            negative: that of each negative prompt.
            start: z_0 of the starting pictures, if any.
            inpainting: for a model that ``inpaints``: the masks, 1 inside, and the latents of the masked pictures.
            outside: for another model: z_0 of the pictures, which are kept outside the masks, 1 inside.
        """
        return finite_passes(  # in fp16, repeats with fp32 in the blocks that overflowed
            self.denoiser, lambda: self._denoise(requests, positive, negative, start, inpainting, outside)
        )

    def _denoise(
        self,
        requests: Sequence[ImageRequest],
        positive: Sequence[Conditioning],
        negative: Sequence[Conditioning],
        start: Tensor | None,
        inpainting: Tensor | None,
        outside: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        device, first = model_device(self.denoiser), requests[0]
        size = first.width, first.height
        solver = self.model.solver(self.objective, size, first.steps, first.skipped(self.model))
        rows = [*negative, *positive] if first.guidance > 1 else list(positive)
        whole = Framing.whole(size)
        text = self.model.text.framed(stack(rows), [whole] * len(rows)).map(lambda tensor: tensor.to(device))
        noise = torch.cat([noises(request, self.model).start for request in requests])
        z = solver.start(noise, start).to(device)
        return self.integrate(solver, z, text, first.guidance, inpainting=inpainting, outside=outside, noise=noise)

    def integrate(
        self,
        solver: Solver,
        z: Tensor,  # [b, c, h, w], the solver's first
        text: Conditioning,  # of r rows
        guidance: float,
        steps: int | None = None,
        inpainting: Tensor | None = None,
        outside: tuple[Tensor, Tensor] | None = None,
        noise: Tensor | None = None,  # [b, c, h, w]
    ) -> Tensor:  # [b, c, h, w], fp32
        """Take the solver's first ``steps`` steps from z, or all of them; see ``denoise``. ``noise``: z's, if a picture
        is kept ``outside``."""
        device, count = z.device, len(z)
        times, guided = solver.times[:steps], guidance > 1
        conditions = conditions_of(text, times, self.modulation) if len(times) else iter(())
        away: Tensor | float = 0.0
        with self.precision.autocast_on(device), self.attention():
            # With guidance, the prompts' and the negative prompts' halves are one batch.
            for step, (time, condition) in enumerate(zip(times, conditions, strict=True)):
                if steps is None:
                    poll()  # a drawing within a training step ends with the step
                both = guided and step % self.reuse_guidance == 0
                skip = count if guided and not both else 0
                rows = time.expand(2 * count if both else count).to(device)
                z_read = z if inpainting is None else torch.cat([z, inpainting.to(z)], 1)
                z_rows = torch.cat([z_read, z_read]) if both else z_read
                read = condition.map(itemgetter(slice(skip, None))) if skip else condition
                prediction = self.predict(z_rows, rows, read)
                if both:
                    away = prediction[count:] - prediction[:count]
                    steered = prediction[:count] + guidance * away
                    prediction = self.model.rescale(steered, prediction[count:])
                elif guided:
                    prediction = self.model.rescale(prediction + (guidance - 1) * away, prediction)
                z = solver.step(prediction, step, z)
                if outside is not None:
                    assert noise is not None
                    z_0, mask = outside
                    known = solver.noised(z_0, noise, step + 1) if step + 1 < len(solver.times) else z_0
                    z = torch.lerp(known.to(z), z, mask.to(z))
        return z

    def predict(self, z: Tensor, time: Tensor, text: Conditioning) -> Tensor:  # [r, c, h, w] -> [r, c, h, w], fp32
        """Predict at z and the timesteps [r], within the contexts of precision and attention."""
        if text.modulation is not None:
            replay(self.denoiser, text.modulation)
        return self.model.predict(self.denoiser, z, time, text, self.precision.compute_dtype()).float()

    def latents(
        self,
        requests: Sequence[ImageRequest],
        prompts: Callable[[str], Conditioning],
        encoded: Sequence[EncodedImage] | None = None,
    ) -> list[Tensor]:  # [1, c, h, w] each, fp32, on the CPU
        """Generate latents for requests, in their order; ``prompts`` returns the conditioning of a prompt, ``encoded``
        is from ``encode_inputs``, and needed if ``reads_images``."""
        latents: dict[int, Tensor] = {}
        load = cache(prompts)  # reads a prompt with many seeds once
        for batch in batches(requests, self.batch_size):
            some = [requests[number] for number in batch]
            positive = [load(request.prompt) for request in some]
            negative = [
                own.zeros() if request.negative_prompt is None else load(request.negative_prompt)
                for request, own in zip(some, positive, strict=True)
            ]
            image = EncodedImage()
            if encoded is not None:  # the requests of a batch have the same of them
                parts = zip(*(encoded[number] for number in batch), strict=True)
                image = EncodedImage(*(None if part[0] is None else torch.cat(part) for part in parts))
            start = image.z_0 if some[0].starts_from_image(self.model) else None
            inpainting = outside = None
            if image.mask is not None and image.masked is not None:
                inpainting = torch.cat([image.mask, image.masked], 1)
            elif image.mask is not None and image.z_0 is not None:
                outside = image.z_0, image.mask
            z = self.denoise(some, positive, negative, start, inpainting, outside)
            for number, own_z in zip(batch, z.cpu().split(1), strict=True):
                latents[number] = own_z
                self.drawn()
        return [latents[number] for number in range(len(requests))]


def conditions_of(
    text: Conditioning,  # of r rows
    times: Tensor,  # [s]
    modulation: ModulationSource | None,
) -> Iterator[Conditioning]:
    """Yield the conditioning at each of the model's timesteps: the same, or, under a modulation plan, with its
    modulations, computed one window at a time."""
    if modulation is None:
        yield from (text for _ in times)
        return
    count = len(text.embeds)
    for some in times.split(modulation.window):
        pooled = None
        if modulation.fact.reads_pooled:
            assert text.pooled is not None
            pooled = text.pooled.repeat(len(some), 1)
        rows = modulation(some.repeat_interleave(count), pooled).view(len(some), count, -1)
        yield from map(text.modulated, rows)


def generate_images(
    sampler: Sampler,
    vae: nn.Module,
    model: Model,
    requests: Sequence[ImageRequest],
    prompts: Callable[[str], Conditioning],
) -> list[Image.Image]:
    """Generate pictures for requests, in their order; ``prompts`` returns the conditioning of a prompt."""
    encoded = encode_inputs(vae, model, requests)
    images = decode(vae, model, sampler.latents(requests, prompts, encoded))
    return [paste_original(image, request) for image, request in zip(images, requests, strict=True)]


def reads_images(model: SampledModel, requests: Sequence[ImageRequest]) -> bool:
    """Return whether there is a picture to encode: a request's, or the grey one for a model that inpaints."""
    return model.inpaints or any(request.image is not None for request in requests)


@torch.no_grad()
def encode_inputs(vae: nn.Module, model: Model, requests: Sequence[ImageRequest]) -> list[EncodedImage]:
    """Encode each request's picture and mask.

    Raises:
        UserError: one of them cannot be used.
    """
    device = next(vae.parameters()).device
    found: list[EncodedImage] = []
    for request in requests:
        noise, z_0, mask, masked = noises(request, model), None, None, None
        pixels = None if request.image is None else starting_pixels(request)
        if pixels is not None and noise.image is not None:
            z_0 = model.autoencoder.encode(vae, pixels.to(device), noise.image.to(device)).cpu()
        if request.mask is not None or noise.masked is not None:
            inside = mask_pixels(request, model.autoencoder.downsampling)
            mask = nn.functional.interpolate(inside, noise.start.shape[2:])  # nearest
            if noise.masked is not None:
                seen = torch.zeros(1, 3, *inside.shape[2:]) if pixels is None else pixels * (1 - inside)
                masked = model.autoencoder.encode(vae, seen.to(device), noise.masked.to(device)).cpu()
        found.append(EncodedImage(z_0, mask, masked))
    return found


def starting_pixels(request: ImageRequest) -> Tensor:  # [1, 3, h, w] in -1..1
    """Read a request's starting picture, scaled and cropped to the size. Raises UserError if it cannot be read."""
    return torch.from_numpy(np.array(_fitted_image(request))).permute(2, 0, 1)[None].float() / 127.5 - 1


def _fitted_image(request: ImageRequest) -> Image.Image:
    assert request.image is not None
    image = _open_image(request.image, "--image").convert("RGB")
    return ImageOps.fit(image, (request.width, request.height), Image.Resampling.LANCZOS)


def mask_pixels(request: ImageRequest, place: int) -> Tensor:  # [1, 1, h, w], 0 or 1
    """Read a request's mask, scale and crop it as its picture, and make grey black or white; without one, all is white.

    Raises:
        UserError: it cannot be read, has another shape than the picture, or leaves nothing to paint in latents whose
            places are squares of ``place`` pixels a side.
    """
    inside = _fitted_mask(request)
    if not inside[..., ::place, ::place].any():  # the pixels that a latent's place reads
        raise UserError(
            f"--mask: it is black in the {request.width}x{request.height} that are drawn, or its white is thinner than "
            f"{place} pixels. Paint white what to draw anew"
        )
    return inside


def _fitted_mask(request: ImageRequest) -> Tensor:
    if request.mask is None:
        return torch.ones(1, 1, request.height, request.width)
    if request.image is None:
        raise UserError("--mask: there is no picture to paint into. Give the one that it was painted on: --image FILE")
    mask, image = _open_image(request.mask, "--mask").convert("L"), _open_image(request.image, "--image")
    if abs(mask.width * image.height / (mask.height * image.width) - 1) > SHAPE_TOLERANCE:
        raise UserError(
            f"--mask: it is {mask.width}x{mask.height}, another shape than the picture's "
            f"{image.width}x{image.height}. Paint it on the picture"
        )
    scaled = ImageOps.fit(mask, (request.width, request.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(scaled))[None, None].float().div(255).ge(0.5).float()


def _open_image(image: Path | Image.Image, option: str) -> Image.Image:
    """Open a picture as training does."""
    if isinstance(image, Image.Image):
        return image
    try:
        data = image.read_bytes()
        return decode_mask(data, "file") if option == "--mask" else decode_image(data)
    except OSError as error:
        reason = error.strerror or str(error)
    except UnusableImage as error:
        reason = str(error)
    raise UserError(f"{option}: {image} cannot be read ({reason}). Give a PNG, JPEG or WebP file")


def paste_original(image: Image.Image, request: ImageRequest) -> Image.Image:
    """Return a generated picture; if the request asks for it, with the original's pixels outside the mask."""
    if not request.paste or request.image is None or request.mask is None:
        return image
    before, inside = shown_inputs(request).values()
    return Image.composite(image, before, inside)


def shown_inputs(request: ImageRequest) -> dict[str, Image.Image]:
    """Return the picture and the mask that a request paints into, as the model reads them, by what they are called;
    empty for a request without a mask."""
    if request.mask is None:
        return {}
    return {"picture": _fitted_image(request), "mask": _to_image(_fitted_mask(request))}


def _to_image(inside: Tensor) -> Image.Image:
    return Image.fromarray((inside[0, 0] * 255).to(torch.uint8).numpy())


def fit_inputs(request: ImageRequest, place: int) -> ImageRequest:
    """Scale a request's picture and mask to its size, which takes less memory; ``place`` as for ``mask_pixels``. Raises
    UserError if one of them cannot be used."""
    if request.image is None:
        return request
    mask = None if request.mask is None else _to_image(mask_pixels(request, place))
    return replace(request, image=_fitted_image(request), mask=mask)


def batches(requests: Sequence[ImageRequest], batch_size: int) -> list[list[int]]:
    """Group the indices of requests that can be generated together, at most ``batch_size`` each."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, each in enumerate(requests):
        inputs = each.image is None, each.mask is None, None if each.image is None else each.strength
        key = each.width, each.height, each.steps, each.guidance, *inputs
        alike.setdefault(key, []).append(number)
    return [group[i : i + batch_size] for group in alike.values() for i in range(0, len(group), batch_size)]


@torch.no_grad()
def decode(vae: nn.Module, model: Model, latents: Sequence[Tensor]) -> list[Image.Image]:
    """Decode latents [1, c, h, w] one at a time, to save memory and to keep each independent of the others."""
    device, images = next(vae.parameters()).device, []
    for z in latents:  # decoded pictures are [1, 3, h, w] in 0..1
        array = (model.autoencoder.decode(vae, z.to(device))[0] * 255).round().to(torch.uint8).permute(1, 2, 0).cpu()
        images.append(Image.fromarray(array.numpy()))
    return images
