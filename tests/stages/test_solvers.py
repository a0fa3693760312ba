"""Drawing with the solvers: latents equal those of diffusers' Stable Diffusion pipelines with the same noise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from slow_cases import slow_but
from tiny_sd15 import SD15, SD21
from torch import Tensor, nn

from simpletune.commands.generate.session import GenerationSession, GenerationSpeed
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.engine.quant.precision import FP32
from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.objectives.flow import Euler
from simpletune.models.objectives.objective import Solver
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15 as StableDiffusion
from simpletune.models.sd15.sd15_text import SD15Text
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, Autoencoder
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.text.family_text import FamilyText
from simpletune.runs.weights import BASE
from simpletune.stages.sample import ImageRequest, Sampler, encode_inputs, noises
from simpletune.stages.text_cache import TextCache
from simpletune.system.stage_timer import StageTimer
from simpletune.training.train import train

ZERO = SD21 | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SCHEDULES = {"epsilon": SD15, "v": SD21, "zero SNR": ZERO}


@dataclass(frozen=True)
class Family:
    """The part of a family that sampling uses, around a small UNet."""

    config: dict[str, Any]
    inpaints: ClassVar[bool] = False

    @property
    def autoencoder(self) -> Autoencoder:
        nothing: Any = None
        return Autoencoder(STABLE_DIFFUSION, nothing, nothing, lambda: 4, {})

    def solver(self, objective: Ddpm, size: object, steps: int, skipped: int) -> Solver:
        return objective.solver(self.config, steps, skipped)

    def skipped_steps(self, steps: int, strength: float) -> int:
        return StableDiffusion.skipped_steps(self, steps, strength)

    @property
    def text(self) -> FamilyText[Any]:
        return SD15Text(StableDiffusion())

    def predict(
        self, model: nn.Module, z_t: Tensor, time: Tensor, conditioning: Conditioning, dtype: torch.dtype
    ) -> Tensor:
        return model(z_t.to(dtype), time, conditioning.embeds.to(dtype), return_dict=False)[0]

    def rescale(self, guided: Tensor, positive: Tensor) -> Tensor:
        return guided


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=12,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    unet.requires_grad_(False).conv_out.weight.mul_(4)
    unet.units = ()
    return unet


def prompts() -> tuple[Tensor, Tensor]:
    """Embeddings [7, 12] of a prompt and a negative prompt."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 12, generator=generator), torch.randn(7, 12, generator=generator)


def drawn(
    unet: nn.Module, family: Family, request: ImageRequest, start: Tensor | None = None, **options: Any
) -> Tensor:
    positive, negative = [[Conditioning(embeds)] for embeds in prompts()]
    return Sampler(unet, family, FP32(), **{"objective": Ddpm()} | options).denoise(
        [request], positive, negative, start
    )


def pipeline(kind: type, unet: nn.Module, config: dict[str, Any]) -> Any:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    scheduler = DPMSolverMultistepScheduler.from_config(config)
    made = kind(unet=unet, scheduler=scheduler, requires_safety_checker=False, **parts)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize(
    ("schedule", "steps", "guidance"),
    [("epsilon", 5, 5.0), ("v", 5, 5.0), ("zero SNR", 5, 5.0), ("zero SNR", 15, 5.0), ("v", 1, 1.0)],
)
def test_pictures_are_those_of_diffusers(schedule: str, steps: int, guidance: float, unet) -> None:
    config, request = SCHEDULES[schedule], ImageRequest("", 3, width=64, height=48, steps=steps, guidance=guidance)
    family = Family(config)
    positive, negative = prompts()
    theirs = pipeline(StableDiffusionPipeline, unet, config)(
        prompt_embeds=positive[None], negative_prompt_embeds=negative[None], num_inference_steps=steps,
        guidance_scale=guidance, latents=noises(request, family)[0], output_type="latent",
    ).images  # fmt: skip
    ours = drawn(unet, family, request)
    assert ours.dtype == torch.float32 and theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "strength"),
    [("epsilon", 1.0), ("v", 0.6), ("zero SNR", 0.25), ("zero SNR", 1.0)],
)
def test_a_starting_picture_gives_what_diffusers_gives(schedule: str, strength: float, unet) -> None:
    config = SCHEDULES[schedule]
    request = ImageRequest("", 3, width=64, height=48, steps=8, guidance=5.0, image=Path("z"), strength=strength)
    start = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(9))
    positive, negative = prompts()
    generator = torch.Generator().manual_seed(3)
    torch.randn(1, 4, 6, 8, generator=generator)  # the autoencoder's noise, which they would draw first
    theirs = pipeline(StableDiffusionImg2ImgPipeline, unet, config)(
        image=start, strength=strength, prompt_embeds=positive[None], negative_prompt_embeds=negative[None],
        num_inference_steps=8, guidance_scale=5.0, generator=generator, output_type="latent",
    ).images  # fmt: skip
    torch.testing.assert_close(drawn(unet, Family(config), request, start), theirs, rtol=1e-5, atol=1e-5)


PIPELINES_FROM_IMAGES: dict[type[Any], tuple[type[Any], ...]] = {
    StableDiffusion: (StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline),
    SDXL: (StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline),
    SD3: (StableDiffusion3Img2ImgPipeline, StableDiffusion3InpaintPipeline),
}


@pytest.mark.parametrize("kind", PIPELINES_FROM_IMAGES)
def test_a_picture_skips_the_steps_that_it_skips_in_the_familys_pipelines(kind: type[Any]) -> None:
    """Of 1 to 30 steps at ten strengths, most of which make no whole number; what a pipeline refuses, no step at all,
    is one step here."""
    family, strengths = kind(), (0.01, 0.1, 0.25, 0.3, 0.33, 0.6, 0.7, 0.75, 0.9, 1.0)
    whole = Image.new("L", (64, 64), 255)
    for masked, pipeline in zip((False, True), PIPELINES_FROM_IMAGES[kind], strict=True):
        for steps, strength in product(range(1, 31), strengths):
            scheduler = SimpleNamespace(timesteps=torch.arange(steps), order=1)
            _, run = pipeline.get_timesteps(SimpleNamespace(scheduler=scheduler), steps, strength, "cpu")
            request = ImageRequest("", 0, steps=steps, image=whole, strength=strength, mask=whole if masked else None)
            assert steps - request.skipped(family) == max(run, 1), (steps, strength, masked)
    assert ImageRequest("", 0, steps=8).skipped(family) == 0


def test_what_was_trained_decides_over_the_models_schedule(unet) -> None:
    """Zero terminal SNR and v trained on a model whose scheduler config knows neither."""
    request = ImageRequest("", 3, width=64, height=64, steps=6, guidance=1.0)
    trained = Ddpm(prediction="v", zero_terminal_snr=True)
    expected = drawn(unet, Family(ZERO), request)
    assert torch.equal(drawn(unet, Family(SD15), request, objective=trained), expected)
    assert (drawn(unet, Family(SD15), request) - expected).abs().max() > 0.1
    solver = trained.solver(SD15, 4)
    assert solver.times.tolist() == [999, 749, 499, 249] and solver.levels.dtype == torch.float32


def test_one_guidance_difference_for_two_steps(unet) -> None:
    request, rows = ImageRequest("", 3, width=64, height=64, steps=4, guidance=3.0), []
    hook = unet.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    exact, lossy = (drawn(unet, Family(SD15), request, reuse_guidance=n) for n in (1, 2))
    hook.remove()
    assert rows == [2, 2, 2, 2, 2, 1, 2, 1]
    assert 0 < (exact - lossy).abs().max() < exact.std()
    scheduler = DPMSolverMultistepScheduler.from_config(SD15)
    scheduler.set_timesteps(4)
    z, (positive, negative) = noises(request, Family(SD15))[0], prompts()
    for index, t in enumerate(scheduler.timesteps):
        prediction = unet(z, t, positive[None]).sample
        if index % 2 == 0:
            away = prediction - unet(z, t, negative[None]).sample
        z = scheduler.step(prediction + 2 * away, t, z).prev_sample
    torch.testing.assert_close(lossy, z, rtol=0, atol=5e-4)


def test_a_drawing_does_not_depend_on_the_one_before(unet) -> None:
    """The solver keeps earlier predictions, so each drawing has its own."""
    request = ImageRequest("", 3, width=64, height=64, steps=4, guidance=3.0)
    sampler = Sampler(unet, Family(SD15), FP32(), objective=Ddpm())
    positive, negative = [[Conditioning(embeds)] * 2 for embeds in prompts()]
    first = sampler.denoise([request], positive[:1], negative[:1])
    both = sampler.denoise([request, replace(request, seed=4)], positive, negative)
    torch.testing.assert_close(both[:1], first, rtol=0, atol=5e-4)
    assert torch.equal(sampler.denoise([request], positive[:1], negative[:1]), first)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_solver_finds_the_picture_that_every_prediction_means(schedule: str) -> None:
    """If the network always predicts the noise and v that lead to one z_0, any number of steps ends there."""
    config, steps = SCHEDULES[schedule], 7
    process = Ddpm().process(lambda: config)
    z_0, noise = (torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    solver = Ddpm().solver(config, steps)
    z = solver.start(noise, None)
    for index, level in enumerate(solver.levels):
        t = level.expand(2)
        zero = torch.zeros_like(z)
        a, s = process.noised(zero + 1, zero, t), process.noised(zero, zero + 1, t)
        prediction = (a * z - z_0) / s if process.v else (z - a * z_0) / s
        z = solver.step(prediction, index, z)
    torch.testing.assert_close(z, z_0, rtol=1e-4, atol=1e-4)


def test_euler_follows_a_constant_velocity_to_its_end() -> None:
    z_0, noise = torch.full((2, 1, 1, 1), 3.0), torch.full((2, 1, 1, 1), -5.0)
    solver = Euler(torch.tensor([0.8, 0.5, 0.1, 0.0]))
    assert solver.levels.tolist() == pytest.approx([0.8, 0.5, 0.1]) and len(solver.times) == 3
    assert solver.times.tolist() == pytest.approx([800, 500, 100])
    assert torch.equal(solver.start(noise, None), noise)
    z = solver.start(noise, z_0)
    torch.testing.assert_close(z, torch.full((2, 1, 1, 1), 0.2 * 3 - 0.8 * 5))
    for index in range(3):
        z = solver.step(noise - z_0, index, z)
    torch.testing.assert_close(z, z_0)


def test_training_and_drawing_say_what_was_trained(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    data = copy.deepcopy(tiny_config) | {"objective": {"logit_mean": 0.25}}
    data["train"] |= {"steps": 1}
    data["validation"] = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 0}
    config, asked = validate(data, "x"), []
    solver = SD3.solver
    monkeypatch.setattr(SD3, "solver", lambda *given: asked.append(given[1]) or solver(*given))
    train(config)
    assert asked == [config.objective] * len(asked) and len(asked) == 2, "before and after training"
    resolved = resolve_folders(config)
    session = GenerationSession(resolved, None, torch.device("cpu"), "cpu", StageTimer(cuda=False), GenerationSpeed())
    session.generate_all([BASE], [ImageRequest("a red disc", 0, width=64, height=64, steps=2, guidance=1.0)])
    assert asked[2:] == [config.objective]


SD = StableDiffusion, StableDiffusionPipeline, StableDiffusionImg2ImgPipeline
XL = SDXL, StableDiffusionXLPipeline, StableDiffusionXLImg2ImgPipeline
PIPELINES: dict[str, tuple[Any, ...]] = {"sd15": SD, "sd2": SD, "sdxl": XL, "v": XL}


@pytest.mark.parametrize("version", slow_but(["sd2", "v"], PIPELINES))
def test_pictures_of_stable_diffusion_are_those_of_its_pipeline(
    version: str, unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    """From the prompt and the starting picture on: text, autoencoder, UNet and schedule are the family's own. An empty
    negative prompt is a text to both; zeros take the place of one that is not given."""
    kind, theirs, from_image = PIPELINES[version]
    folder, prompt, against = unet_pipeline(version), "a red disc", "" if version == "v" else "a blue star"
    family, text = kind(pretrained=str(folder)), tmp_path / "cache"
    cache = TextCache(family, torch.float32, text)
    cache.fill([prompt, against, ""], torch.device("cpu"))
    sampler = Sampler(family.load_denoiser(FP32(), torch.device("cpu")), family, FP32(), objective=Ddpm())
    theirs = theirs.from_pretrained(folder, local_files_only=True)
    theirs.scheduler = DPMSolverMultistepScheduler.from_config(theirs.scheduler.config)
    asked = {"prompt": prompt, "num_inference_steps": 4, "guidance_scale": 5.0}
    for pipe in (theirs, from_image := from_image.from_pipe(theirs)):
        pipe.set_progress_bar_config(disable=True)

    size = {"width": 128, "height": 64}  # which SDXL is also told
    for given in (None, against):
        request = ImageRequest(prompt, 3, family.text.steered_from(given), 128, 64, 4, 5.0)
        latents = noises(request, family)[0]
        expected = theirs(**asked, **size, negative_prompt=given, latents=latents, output_type="latent").images
        torch.testing.assert_close(sampler.latents([request], cache.load)[0], expected, rtol=1e-5, atol=2e-5)

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8))
    image.save(tmp_path / "start.png")
    request = replace(request, image=tmp_path / "start.png", strength=0.6)  # 2 of the 4 steps
    expected = from_image(
        **asked, negative_prompt=against, image=image, strength=0.6, generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).images  # fmt: skip
    starts = encode_inputs(theirs.vae, family, [request])
    torch.testing.assert_close(sampler.latents([request], cache.load, starts)[0], expected, rtol=1e-5, atol=2e-5)
