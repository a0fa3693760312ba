"""Training Stable Diffusion 1.5 and 2: losses and updates against the papers' formulas and diffusers' own step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_sd15
import torch
import torch.nn.functional as F
import unet_train
from accelerate import Accelerator
from diffusers import UNet2DConditionModel
from image_files import list_folder
from PIL import Image
from plan import stream as reference_stream
from safetensors.torch import load_file
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.engine.tensors import trained_parameters
from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.shared.conditioning import Conditioning
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.train_step import assemble
from simpletune.system.rng import stream
from simpletune.training.train import train

STEPS = 2
SETTINGS: dict[str, Any] = {
    "seed": 11, "resolution": 128, "batch_size": 2, "accumulation": 2, "steps": STEPS, "lr": 1e-3,
    "weight_decay": 0.01, "clip_norm": 0.5, "caption_dropout": 0.3, "lora_alpha": 4.5,
    "eps": 1e-4,  # else biases before a norm of single channels, whose gradient is a rounding error, follow its sign
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pictures in three buckets, of which one has a short micro-batch."""
    folder = tmp_path_factory.mktemp("pictures")
    demo_scenes.write_folder(folder, demo_scenes.sample_scenes(5, seed=4, style="striped"), seed=4, pixels=128)
    for number, size in enumerate([(128, 64), (64, 128), (70, 130)]):
        file = folder / f"00{number}.png"
        Image.open(file).resize(size).save(file)
    return folder


@pytest.fixture(scope="module")
def pipeline(unet_pipeline: Callable[..., Path]) -> Callable[[tiny_sd15.Version], Path]:
    return unet_pipeline


def config_of(pipeline: Path, data: Path, tiny_config: dict, method: str) -> TrainConfig:
    """The run that ``SETTINGS`` says."""
    adapter = {"method": "lora", "rank": 3, "alpha": 4.5, "targets": "all_linear"}
    changes = {
        "model": {"family": "sd15", "pretrained": str(pipeline)},
        "data": {"path": str(data), "resolution": 128, "caption_dropout": 0.3},
        "adapter": adapter if method == "lora" else {"method": "full"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4},
        "train": {"steps": STEPS, "batch_size": 2, "gradient_accumulation": 2, "seed": 11, "clip_norm": 0.5},
        "checkpoint": {"every": 1, "keep_last": STEPS},
    }
    return validate(tiny_config | changes, "ours")


def initial_lora(config: TrainConfig) -> dict[str, Tensor]:
    """A LoRA's weights before the first step, by the reference's names."""
    unet = config.model.load_denoiser(config.precision, torch.device("cpu"))
    config.adapter.attach(unet, config.train.seed)
    return {name.replace(".default", ""): p.detach().clone() for name, p in trained_parameters(unet).items()}


@pytest.mark.parametrize(
    ("version", "method"),
    [
        ("sd15", "lora"),
        pytest.param("sd2", "full", marks=pytest.mark.slow),
        pytest.param("sd15", "full", marks=pytest.mark.slow),
        pytest.param("sd2", "lora", marks=pytest.mark.slow),
    ],
)
def test_losses_and_updates_equal_the_papers_and_diffusers_examples(
    version: tiny_sd15.Version, method: str, pipeline: Callable, data: Path, tiny_config: dict
) -> None:
    """Epsilon of Stable Diffusion 1.5 and v of 2, in fp32."""
    folder = pipeline(version)
    config = config_of(folder, data, tiny_config, method)
    lora = initial_lora(config) if method == "lora" else None
    run = train(config)
    rows = list(read_metrics(run))
    ours = [load_file(checkpoint.checkpoint_folder(run, step) / checkpoint.TRAINABLE) for step in range(1, STEPS + 1)]
    papers = unet_train.run(folder, list_folder(data), SETTINGS, lora)
    examples = unet_train.run(folder, list_folder(data), SETTINGS | {"steps": 1}, lora, examples=True)
    for theirs in (papers, examples):
        for row, weights, step in zip(rows, ours, theirs, strict=False):
            assert row["loss"] == pytest.approx(step.loss, rel=1e-5)
            assert row["grad_norm"] == pytest.approx(step.norm, rel=1e-4)
            named = {name.replace(".default", ""): tensor for name, tensor in weights.items()}
            torch.testing.assert_close(named, step.weights, rtol=0, atol=1e-6)  # of updates of 1e-3
    moved = [(papers[1].weights[name] - tensor).abs().max() for name, tensor in papers[0].weights.items()]
    assert max(moved) > 1e-4 and sum(float(each) == 0 for each in moved) < len(moved) / 8
    assert len(papers) == len({row["loss"] for row in rows}) == STEPS and min(row["grad_norm"] for row in rows) > 0


def test_gradients_with_offset_noise_equal_diffusers(pipeline: Callable, data: Path, tiny_config: dict) -> None:
    """At 64 px, fp32 loses gradients: the lowest level has one position, so a group norm there has two values."""
    folder, generator = pipeline("sd15"), torch.Generator().manual_seed(0)
    config = config_of(folder, data, tiny_config, "lora").model_copy(update={"objective": Ddpm(offset_noise=0.5)})
    z_0, prompt_embeds = (torch.randn(shape, generator=generator) for shape in ((2, 4, 16, 16), (2, 77, 32)))
    level = torch.tensor([40, 700])
    lora = initial_lora(config)

    unet = config.model.load_denoiser(config.precision, torch.device("cpu"))
    step = assemble(config, unet, Accelerator(cpu=True))
    noise = torch.stack([torch.from_numpy(config.objective.noise(stream(3, n), (4, 16, 16))) for n in range(2)])
    loss = step.compute(Batch(z_0, noise, level.float(), Conditioning(prompt_embeds), ("a", "b")))
    ours = {name.replace(".default", ""): p.grad for name, p in trained_parameters(unet).items()}

    draws = [reference_stream(3, n) for n in range(2)]
    fine, constant = (
        torch.stack([torch.from_numpy(draw.standard_normal(shape, dtype="float32")) for draw in draws])
        for shape in ((4, 16, 16), (4, 1, 1))
    )
    other = UNet2DConditionModel.from_pretrained(folder / "unet").requires_grad_(False)
    trained = unet_train.add_adapter(other, lora, 4.5)
    z_t, target = unet_train.dreambooth(tiny_sd15.SD15, level, z_0, fine + 0.5 * constant)
    wanted = F.mse_loss(other(z_t, level, prompt_embeds).sample, target)
    wanted.backward()
    theirs = {name: p.grad for name, p in trained.items()}
    norm = torch.nn.utils.get_total_norm(list(theirs.values())).item()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * norm)
