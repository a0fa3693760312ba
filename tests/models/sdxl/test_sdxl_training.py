"""Training Stable Diffusion XL: a step against the arithmetic of diffusers' script, from files to gradients.

The script is examples/text_to_image/train_text_to_image_lora_sdxl.py of diffusers; it samples the autoencoder's
posterior, where simpletune takes its mode.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, StableDiffusionXLPipeline
from diffusers.training_utils import compute_snr
from peft import LoraConfig
from PIL import Image, ImageOps
from torch import Tensor, nn

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.samples import PlannedSample
from simpletune.engine.tensors import trained_parameters
from simpletune.stages.encode import prepare
from simpletune.stages.plan_data import plan_data
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import assemble
from simpletune.stages.text_side import load_text_side
from simpletune.system.options import ConfigError, UserError
from simpletune.system.stage_timer import StageTimer

CPU = torch.device("cpu")
SIZES = [(600, 290), (150, 78), (290, 140), (134, 66)]  # all in one bucket; the last is scaled up
BUCKET = (256, 128)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, unet_pipeline: Callable[..., Path]) -> Path:
    """By what it predicts; with v, the terminal SNR is zero."""
    return unet_pipeline("v" if getattr(request, "param", "epsilon") == "v" else "sdxl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pictures of different sizes, of which a phone has turned one."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for number, (width, height) in enumerate(SIZES):
        coarse = draw.integers(0, 256, (5, 7, 3), np.uint8)
        image, exif = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), Image.Exif()
        if number == 1:
            image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(folder / f"{number}.png", exif=exif)
        (folder / f"{number}.txt").write_text(f"a {('red', 'blue', 'green', 'white')[number]} circle")
    return folder


def config_of(folder: Path, data: Path, tiny_config: dict, text: dict | None = None) -> TrainConfig:
    changes = {
        "model": {"family": "sdxl", "pretrained": str(folder)},
        "data": {"path": str(data), "resolution": 192, "crop": "random", "flip": True, "caption_dropout": 0.3},
        "adapter": {"method": "lora", "rank": 4, "alpha": 6.0},
        "train": {"steps": 1, "batch_size": 2, "gradient_accumulation": 2, "seed": 18},
        "objective": {"min_snr_gamma": 5.0} if folder.name == "v" else {},
        "text": text or {},
    }
    return resolve_folders(validate(tiny_config | changes, "ours"))


class Script:
    """diffusers' step in fp32, with given initial factors of the adapters."""

    def __init__(self, folder: Path, data: Path, gamma: float | None):
        self.data, self.gamma = data, gamma
        self.pipeline = StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True)
        self.schedule = DDPMScheduler.from_config(self.pipeline.scheduler.config)

    def add(self, model: nn.Module, lora: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
        """Add LoRA to a network with these factors, by the names of peft, and return its trained parameters."""
        modules = sorted({name.rsplit(".lora_", 1)[0] for name in lora})
        rank = next(tensor.shape[0] for name, tensor in lora.items() if ".lora_A." in name)
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules))
        assert not model.load_state_dict(lora, strict=False).unexpected_keys
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def example(self, draw: PlannedSample) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
        """preprocess_train with a given place of the crop: pixels, the original size and the crop's top and left."""
        image = ImageOps.exif_transpose(Image.open(self.data / draw.view.image.name)).convert("RGB")
        original, (width, height) = (image.height, image.width), BUCKET
        scale = max(width / image.width, height / image.height)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
        left = int((image.width - width) * draw.view.offset[0])
        top = int((image.height - height) * draw.view.offset[1])
        if draw.view.flip:
            image, left = ImageOps.mirror(image), image.width - width - left
        pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 127.5 - 1
        return torch.from_numpy(pixels.transpose(2, 0, 1)), original, (top, left)

    def loss(self, draws: list[PlannedSample], noise: Tensor) -> Tensor:
        """The loss of a batch whose timesteps and captions are those of the draws."""
        pipeline, examples = self.pipeline, [self.example(draw) for draw in draws]
        with torch.no_grad():
            latent = pipeline.vae.encode(torch.stack([pixels for pixels, _, _ in examples])).latent_dist.mode()
        model_input = latent * pipeline.vae.config.scaling_factor
        timesteps = torch.tensor([int(draw.level) for draw in draws])
        noisy = self.schedule.add_noise(model_input, noise, timesteps)
        target_size = BUCKET[::-1]
        add_time_ids = torch.tensor([list(size + crop + target_size) for _, size, crop in examples])
        prompts = [draw.caption for draw in draws]
        embeds, _, pooled, _ = pipeline.encode_prompt(prompts, device=CPU, do_classifier_free_guidance=False)
        added = {"time_ids": add_time_ids.float(), "text_embeds": pooled}
        prediction = pipeline.unet(noisy, timesteps, embeds, added_cond_kwargs=added, return_dict=False)[0]
        v = self.schedule.config.prediction_type == "v_prediction"
        target = self.schedule.get_velocity(model_input, noise, timesteps) if v else noise
        if self.gamma is None:
            return F.mse_loss(prediction.float(), target.float(), reduction="mean")
        snr = compute_snr(self.schedule, timesteps)
        weights = torch.stack([snr, self.gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
        weights = weights / (snr + 1 if v else snr)
        losses = F.mse_loss(prediction.float(), target.float(), reduction="none")
        return (losses.mean(dim=list(range(1, losses.ndim))) * weights).mean()


def factors(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the trained factors, none of which is zero, so that both have gradients."""
    found, generator = trained_parameters(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in found.items():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return {name: parameter.detach().clone() for name, parameter in found.items()}


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("epsilon", {"lora": {"rank": 2}}),
        pytest.param("epsilon", {}, marks=pytest.mark.slow),
        pytest.param("v", {}, marks=pytest.mark.slow),
        pytest.param("v", {"lora": {"rank": 2}}, marks=pytest.mark.slow),
    ],
    indirect=["folder"],
)
def test_a_steps_loss_and_gradients_are_those_of_diffusers_script(
    folder: Path, text: dict[str, Any], data: Path, tiny_config: dict
) -> None:
    """With LoRA on the UNet, or on both text encoders too; v also has the weights of min-SNR."""
    config = config_of(folder, data, tiny_config, text)
    prepared = prepare(config, Accelerator(cpu=True), StageTimer(False))
    unet = config.model.load_denoiser(config.precision, CPU)
    side = load_text_side(config, prepared.text, prepared.plan.captions(), CPU)
    step = assemble(config, unet, Accelerator(cpu=True), text=side)
    start, draws = factors(unet), prepared.plan.micro_batch(0, 0)
    assert {draw.view.flip for draw in draws} == {False, True} and {draw.view.bucket for draw in draws} == {BUCKET}
    batch = BatchLoader(prepared, 18, CPU).load(draws)
    loss = step.compute(batch)
    ours = {name: parameter.grad for name, parameter in trained_parameters(unet).items()}

    script, theirs = Script(folder, data, config.objective.min_snr_gamma), dict[str, Tensor]()
    parts = {"clip_l": script.pipeline.text_encoder, "clip_g": script.pipeline.text_encoder_2} if text else {}
    for prefix, model in {"": script.pipeline.unet, **{f"text.encoders.{n}.": m for n, m in parts.items()}}.items():
        own = {n.removeprefix(prefix): t for n, t in start.items() if n.startswith(prefix or ("down", "mid", "up"))}
        theirs |= {prefix + name: p for name, p in script.add(model, own, 2.0 if prefix else 6.0).items()}
    expected = script.loss(draws, batch.noise)
    expected.backward()
    # diffusers' tables of v with min-SNR are products in fp32
    rtol = 1e-6 if config.objective.min_snr_gamma is None else 5e-6
    torch.testing.assert_close(loss, expected.detach(), rtol=rtol, atol=0)
    gradients = {name: parameter.grad for name, parameter in theirs.items()}
    unread = {name for name in gradients if "clip_l.encoder.layers.1" in name}  # CLIP-L's last layer
    assert {name for name, gradient in gradients.items() if gradient is None} == unread and theirs.keys() == ours.keys()
    for name in unread:
        assert ours.pop(name) is gradients.pop(name) is None
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    torch.testing.assert_close(ours, gradients, rtol=0, atol=rtol * norm)


def test_masks_and_the_prior_weigh_the_loss_of_framed_pictures(folder: Path, tiny_config: dict, tmp_path: Path) -> None:
    """Of two pictures with other crops: outside their masks 0.3 counts; then the class prompt against the base."""
    draw = np.random.default_rng(3)
    for number, (width, height) in enumerate(SIZES[:2]):
        image = Image.fromarray(draw.integers(0, 256, (height, width, 4), np.uint8))
        image.save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"a {('red', 'blue')[number]} circle")
    own = config_of(folder, tmp_path, tiny_config).model_dump(mode="json", by_alias=True)
    own["data"] |= {"mask": "alpha", "unmasked_weight": 0.3, "caption_dropout": 0}
    prior = {"method": "base_prediction", "prompt": "a flat picture", "weight": 0.7}
    config = resolve_folders(validate(own | {"prior": prior}, "ours"))
    model, base = (config.model.load_denoiser(config.precision, CPU) for _ in range(2))
    step = assemble(config, model, Accelerator(cpu=True))
    factors(model)
    prepared = prepare(config, Accelerator(cpu=True), StageTimer(False))
    batches = BatchLoader(prepared, 18, CPU, prior=config.prior).step(0)
    first, second = batches[:2]
    draws = prepared.plan.micro_batch(0, 0)
    masks = torch.stack([prepared.latents.load(draw.view).mask for draw in draws])
    assert 0.3 < first.weight.min() < first.weight.max() < 1
    sizes = [batch.conditioning.extra["time_ids"].tolist() for batch in (first, second)]
    assert sizes[0][0] != sizes[0][1] == sizes[1][1]

    schedule = DDPMScheduler.from_pretrained(folder, subfolder="scheduler")

    def predicted(network: nn.Module, batch: Any) -> Tensor:
        noisy = schedule.add_noise(batch.z_0, batch.noise, batch.level.long())
        text = batch.conditioning
        added = {"time_ids": text.extra["time_ids"], "text_embeds": text.pooled}
        return network(noisy, batch.level, text.embeds, added_cond_kwargs=added, return_dict=False)[0]

    weight = 0.3 + 0.7 * masks
    learned = (weight * (predicted(model, first) - first.noise).square()).mean()
    kept = 0.7 * (predicted(model, second) - predicted(base, second).detach()).square().mean()
    assert kept > 1e-4
    expected = torch.autograd.grad(learned + kept, list(trained_parameters(model).values()))
    found = [step.compute(batch) for batch in (first, second)]
    torch.testing.assert_close(torch.stack(found), torch.stack([learned, kept]).detach(), rtol=1e-5, atol=0)
    gradients = [parameter.grad for parameter in trained_parameters(model).values()]
    torch.testing.assert_close(gradients, list(expected), rtol=1e-4, atol=1e-7)


def test_a_hypernetwork_is_refused_with_its_reason(folder: Path, data: Path, tiny_config: dict) -> None:
    changes = {"model": {"family": "sdxl", "pretrained": str(folder)}, "adapter": {"method": "hypernetwork"}}
    with pytest.raises(
        ConfigError, match=r"adapter.method: hypernetwork .* width 768 or 1024, and SDXL.*Use adapter.m"
    ):
        validate(tiny_config | changes, "refused")


def test_a_small_picture_is_refused_by_its_factor_and_remedied_by_the_limit(
    folder: Path, data: Path, tiny_config: dict
) -> None:
    config = config_of(folder, data, tiny_config)
    strict = config.data.model_copy(update={"max_upscale": 1.5})
    with pytest.raises(UserError, match=r"1.png: is too small: 150x78 would be scaled up 1.7 times; .*max_upscale=1.5"):
        plan_data(config.model_copy(update={"data": strict}))
