"""Drawing pictures: Euler steps along the velocity, with classifier-free guidance. One path for previews and scripts.

Shapes as in models/sd3.py: b pictures, c channels, h and w an eighth of the picture's, t tokens, e and p text widths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor, nn

from simpletune.loading import device_of
from simpletune.memory.modulation import Modulation
from simpletune.models.sd3 import SD3, predict_velocity
from simpletune.quant.precision import WeightPrecision

Embeddings = tuple[Tensor, Tensor]
"""(prompt_embeds [t, e], pooled [p])."""


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
    """

    prompt: str
    seed: int
    negative_prompt: str = ""
    width: int = 1024
    height: int = 1024
    steps: int = 28
    guidance: float = 4.5


def starting_noise(request: Request, model: SD3) -> Tensor:  # [1, c, h, w]
    """The noise of a request: on the CPU in fp32, so the same on every device, and the same as diffusers' with a
    CPU generator of that seed."""
    generator = torch.Generator("cpu").manual_seed(request.seed)
    return torch.randn(1, *model.latent_shape(request.width, request.height), generator=generator)


def autocast_of(precision: WeightPrecision, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 products over fp32 weights where the precision asks for it."""
    return torch.autocast(device.type, torch.bfloat16) if precision.autocast else nullcontext()


@torch.no_grad()
def sample_latents(
    transformer: nn.Module,
    model: SD3,
    precision: WeightPrecision,
    request: Request,
    positive: Embeddings,
    negative: Embeddings,
    modulation: Modulation | None = None,
) -> Tensor:  # [1, c, h, w], fp32
    """Integrate dz/dsigma = velocity from noise to a picture's latents: Euler's method (arXiv:2206.00364, alg. 1).

    Noise levels are those of diffusers' scheduler; z stays in fp32. With guidance g the velocity is
    v_negative + g (v_positive - v_negative) (arXiv:2207.12598), both halves in one batch.

    Args:
        modulation: of the transformer, where it was taken out.
    """
    device = device_of(transformer)
    dtype = precision.compute_dtype()
    scheduler = model.scheduler()
    scheduler.set_timesteps(request.steps)
    sigmas = scheduler.sigmas.to(torch.float32)
    guided = request.guidance > 1
    rows = [negative, positive] if guided else [positive]
    prompt_embeds = torch.stack([embeds for embeds, _ in rows]).to(device)
    pooled = torch.stack([vector for _, vector in rows]).to(device)
    z = starting_noise(request, model).to(device)
    conditions = conditions_of(pooled, sigmas[:-1], modulation)
    with autocast_of(precision, device):
        for sigma, sigma_next, condition in zip(sigmas[:-1], sigmas[1:], conditions, strict=True):
            levels = sigma.expand(len(rows)).to(device)
            velocity = predict_velocity(
                transformer, z.expand(len(rows), -1, -1, -1), levels, prompt_embeds, condition, dtype
            )
            velocity = velocity.float()
            if guided:
                velocity = velocity[:1] + request.guidance * (velocity[1:] - velocity[:1])
            z = z + (sigma_next - sigma).to(device) * velocity
    return z


def conditions_of(
    pooled: Tensor,  # [r, p]
    sigmas: Tensor,  # [s], fp32
    modulation: Modulation | None,
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
    transformer: nn.Module,
    vae: nn.Module,
    model: SD3,
    precision: WeightPrecision,
    requests: list[Request],
    embeddings: Callable[[str], Embeddings],
    modulation: Modulation | None = None,
) -> list[Image.Image]:
    """Pictures for requests, one at a time: a picture does not depend on its neighbours."""
    pictures = []
    for request in requests:
        positive, negative = embeddings(request.prompt), embeddings(request.negative_prompt)
        z = sample_latents(transformer, model, precision, request, positive, negative, modulation)
        with torch.no_grad():
            pictures.append(to_image(model.decode_latents(vae, z)[0]))
    return pictures


def to_image(pixels: Tensor) -> Image.Image:
    """A picture [3, h, w] in 0..1 as an RGB image."""
    array = (pixels * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array)


def save_png(image: Image.Image, file: Path, request: Request, **more: str) -> None:
    """Write a PNG whose text chunks say how it was made (``prompt``, ``seed``, ``parameters`` and more)."""
    info = PngInfo()
    info.add_itxt("prompt", request.prompt)
    info.add_text("seed", str(request.seed))
    info.add_itxt("parameters", json.dumps({**request.__dict__, **more}, ensure_ascii=False))
    for key, value in more.items():
        info.add_itxt(key, value)
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, pnginfo=info)


def grid(rows: list[tuple[str, list[Image.Image]]], columns: list[str]) -> Image.Image:
    """Pictures in a labelled grid: column titles above, each row's prompt below it."""
    from PIL import ImageDraw, ImageFont

    cell = max(160, *(image.width for _, images in rows for image in images))
    scale = {id(image): max(1, cell // image.width) for _, images in rows for image in images}
    heights = [max(image.height * scale[id(image)] for image in images) for _, images in rows]
    font, line, gap = ImageFont.load_default(size=13), 20, 8
    width = gap + (cell + gap) * len(columns)
    sheet = Image.new("RGB", (width, gap + line + sum(height + line + gap for height in heights)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, title in enumerate(columns):
        pen.text((gap + number * (cell + gap), gap // 2), title, "black", font)
    top = gap + line
    for (caption, images), height in zip(rows, heights, strict=True):
        for number, image in enumerate(images):
            factor = scale[id(image)]
            shown = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
            sheet.paste(shown, (gap + number * (cell + gap), top))
        text = caption
        while pen.textlength(text, font) > width - 2 * gap and len(text) > 4:
            text = f"{text[:-4]}..."
        pen.text((gap, top + height + 2), text, "dimgray", font)
        top += height + line + gap
    return sheet
