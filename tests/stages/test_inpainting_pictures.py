"""Drawing with a picture and a mask against diffusers' inpainting pipelines, and what cannot be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    StableDiffusion3InpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from PIL import Image
from slow_cases import slow_but

from simpletune.engine.quant.precision import FP32
from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15 as StableDiffusion
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.stages.sample import (
    ImageRequest,
    Sampler,
    encode_inputs,
    generate_images,
    mask_pixels,
    paste_original,
    reads_images,
)
from simpletune.stages.text_cache import TextCache
from simpletune.system.options import UserError

CPU = torch.device("cpu")
KINDS: dict[str, tuple[Any, Any]] = {
    "sd15": (StableDiffusion, StableDiffusionInpaintPipeline),
    "sdxl": (SDXL, StableDiffusionXLInpaintPipeline),
}
SIZE = (128, 64)


def image(file: Path, size: tuple[int, int] = SIZE) -> Path:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(values).save(file)
    return file


def mask(file: Path, box: tuple[int, int, int, int] = (19, 10, 91, 50), size: tuple[int, int] = SIZE) -> Path:
    image = Image.new("L", size, 100)  # darker than half: outside
    image.paste(200, box)
    image.save(file)
    return file


@pytest.fixture
def request_(tmp_path: Path) -> ImageRequest:
    return ImageRequest(
        "a red disc", 3, "a blue star", *SIZE, 4, 5.0, image(tmp_path / "picture.png"), 1.0, mask(tmp_path / "m.png")
    )


def text_of(family: Any, folder: Path, *prompts: str) -> TextCache:
    cache = TextCache(family, torch.float32, folder)
    cache.fill(prompts, CPU)
    return cache


@pytest.mark.parametrize(("name", "nine"), slow_but([("sd15", True), ("sdxl", False)], product(KINDS, (True, False))))
def test_pictures_are_those_of_the_inpainting_pipeline(
    name: str, nine: bool, request_: ImageRequest, unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    """From prompt, picture and mask to the decoded picture, with the generator's draws in the pipeline's order; UNets
    of four channels keep the picture outside the mask as the pipeline does."""
    kind, pipeline = KINDS[name]
    folder = unet_pipeline(f"inpainting-{name}" if nine else name)
    family = kind(pretrained=str(folder))
    assert family.inpaints is nine
    text = text_of(family, tmp_path / "cache", request_.prompt, request_.negative_prompt)
    sampler = Sampler(family.load_denoiser(FP32(), CPU), family, FP32(), objective=Ddpm())
    theirs = pipeline.from_pipe(DiffusionPipeline.from_pretrained(folder, local_files_only=True))
    theirs.scheduler = DPMSolverMultistepScheduler.from_config(theirs.scheduler.config)
    theirs.set_progress_bar_config(disable=True)
    for strength in (1.0, 0.7):  # 0.7 of 4 steps: 2, by the pipelines' rounding
        ours = replace(request_, strength=strength)
        expected = theirs(
            prompt=ours.prompt, negative_prompt=ours.negative_prompt, image=Image.open(str(ours.image)),
            mask_image=Image.open(str(ours.mask)), width=SIZE[0], height=SIZE[1], strength=strength,
            num_inference_steps=4, guidance_scale=5.0, generator=torch.Generator().manual_seed(3), output_type="np",
        ).images[0]  # fmt: skip
        (drawn,) = generate_images(sampler, theirs.vae, family, [ours], text.load)
        np.testing.assert_allclose(np.asarray(drawn) / 255, expected, atol=0.51 / 255 + 2e-5)
        assert expected.std() > 0.05


def test_a_plain_transformer_keeps_what_the_pipeline_keeps(
    tiny_pipeline: Path, request_: ImageRequest, tmp_path: Path
) -> None:
    family = SD3(pretrained=str(tiny_pipeline), t5_length=8)
    ours = replace(request_, width=64, height=32)
    text = text_of(family, tmp_path / "cache", ours.prompt, ours.negative_prompt)
    theirs = StableDiffusion3InpaintPipeline.from_pretrained(tiny_pipeline, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    sampler = Sampler(family.load_denoiser(FP32(), CPU, sizes=[(64, 32)]), family, FP32(), objective=Flow())
    for strength in (1.0, 0.6):  # 0.6 of 4 steps: 3, by the pipelines' rounding
        ours = replace(ours, strength=strength)
        expected = theirs(
            prompt=ours.prompt, negative_prompt=ours.negative_prompt, image=Image.open(str(ours.image)),
            mask_image=Image.open(str(ours.mask)), width=64, height=32, strength=strength, num_inference_steps=4,
            guidance_scale=5.0, max_sequence_length=8, generator=torch.Generator().manual_seed(3),
            output_type="latent",
        ).images  # fmt: skip
        drawn = sampler.latents([ours], text.load, encode_inputs(theirs.vae, family, [ours]))[0]
        torch.testing.assert_close(drawn, expected, rtol=1e-4, atol=1e-4)


def test_without_a_picture_an_inpainting_model_paints_the_whole_of_a_grey_one(
    unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    family = StableDiffusion(pretrained=str(unet_pipeline("inpainting-sd15")))
    text, vae = text_of(family, tmp_path / "cache", "a red disc", ""), family.autoencoder.load(CPU, torch.float32, None)
    sampler = Sampler(family.load_denoiser(FP32(), CPU), family, FP32(), objective=Ddpm())
    alone = ImageRequest("a red disc", 3, "", 64, 64, 3, 5.0)
    assert reads_images(family, [alone])
    grey = Image.new("RGB", (64, 64), (255, 0, 0))  # of which the mask leaves nothing
    whole = replace(alone, image=grey, mask=Image.new("L", (64, 64), 255), strength=1.0)
    drawn = [sampler.latents([each], text.load, encode_inputs(vae, family, [each]))[0] for each in (alone, whole)]
    assert torch.equal(*drawn)


def test_requests_of_one_batch_are_drawn_as_alone(
    request_: ImageRequest, unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    family = StableDiffusion(pretrained=str(unet_pipeline("inpainting-sd15")))
    text = text_of(family, tmp_path / "cache", request_.prompt, request_.negative_prompt)
    vae, denoiser = family.autoencoder.load(CPU, torch.float32, None), family.load_denoiser(FP32(), CPU)
    other = mask(tmp_path / "other.png", (0, 0, 40, 64))
    asked = [replace(request_, steps=3), replace(request_, steps=3, strength=0.7), replace(request_, steps=3, seed=4)]
    asked += [replace(asked[1], mask=other), replace(asked[0], image=None, mask=None)]
    encoded = encode_inputs(vae, family, asked)
    one, three = (Sampler(denoiser, family, FP32(), batch_size=size, objective=Ddpm()) for size in (1, 3))
    pairs = zip(one.latents(asked, text.load, encoded), three.latents(asked, text.load, encoded), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_pasting_keeps_every_pixel_outside_the_mask(request_: ImageRequest) -> None:
    green = Image.new("RGB", SIZE, (0, 255, 0))
    assert paste_original(green, request_) is green
    found = np.asarray(paste_original(green, replace(request_, paste=True)))
    inside, before = mask_pixels(request_, 8)[0, 0].bool().numpy(), np.asarray(Image.open(str(request_.image)))
    assert (found[inside] == (0, 255, 0)).all() and (found[~inside] == before[~inside]).all()
    assert 0.2 < inside.mean() < 0.5


def test_a_mask_of_the_pictures_shape_is_scaled_and_cropped_with_it(tmp_path: Path) -> None:
    large = image(tmp_path / "large.png", (512, 128))
    small = mask(tmp_path / "small.png", (64, 0, 96, 32), (128, 32))  # the second half from the middle on
    inside = mask_pixels(ImageRequest("", 0, width=128, height=64, image=large, mask=small), 8)[0, 0]
    assert inside[:, :60].sum() == 0 and inside[:, 68:].all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image": None}, "--mask: there is no picture to paint into. Give the one that it was painted on: --image"),
        ({"mask": "shape"}, "--mask: it is 64x64, another shape than the picture's 128x64. Paint it on the picture"),
        ({"mask": "black"}, "--mask: it is black in the 128x64 that are drawn, or its white is thinner than 8 pixels"),
        ({"mask": "text"}, "--mask: .*text cannot be read .*Give a PNG, JPEG or WebP file"),
        ({"mask": "none"}, "--mask: .*none cannot be read .*No such file"),
    ],
)
def test_a_mask_that_cannot_be_used_is_refused(
    changed: dict[str, Any], message: str, request_: ImageRequest, tmp_path: Path
) -> None:
    Image.new("L", (64, 64), 255).save(tmp_path / "shape", "PNG")
    Image.new("L", SIZE, 0).save(tmp_path / "black", "PNG")
    (tmp_path / "text").write_text("no picture")
    if isinstance(changed.get("mask"), str):
        changed = {"mask": tmp_path / changed["mask"]}
    with pytest.raises(UserError, match=message):
        mask_pixels(replace(request_, **changed), 8)
