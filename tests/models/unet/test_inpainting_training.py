"""Training inpainting UNets: losses and gradients against the step of diffusers' train_dreambooth_inpaint.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_sd15
import torch
import torch.nn.functional as F
import unet_train
from accelerate import Accelerator
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file
from tiny_runs import fail_at, merged, run_with, saved_weights
from torch import Tensor

from simpletune.commands.inspect_data.scan import scan_dataset
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.data.sources.holes import hole_pixels
from simpletune.data.sources.image_files import crop_to_bucket, decode
from simpletune.engine.tensors import trained_parameters
from simpletune.estimate.disk_needs import DataCounts
from simpletune.runs.folder import read_metrics
from simpletune.stages.encode import prepare
from simpletune.stages.plan_data import plan_data
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import assemble
from simpletune.system.options import ConfigError
from simpletune.system.stage_timer import StageTimer

CPU = torch.device("cpu")
SCHEDULES = {"sd15": tiny_sd15.SD15, "sd2": tiny_sd15.SD21}
Pipelines = Callable[[str], Path]


@pytest.fixture(scope="module")
def pipeline(unet_pipeline: Callable[..., Path]) -> Pipelines:
    return lambda version: unet_pipeline(f"inpainting-{version}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    demo_scenes.write_folder(folder, demo_scenes.sample_scenes(4, seed=4, style="striped"), seed=4, pixels=64)
    return folder


def config_of(folder: Path, data: Path, tiny_config: dict, /, **changes: Any) -> dict:
    """A LoRA of linear layers and 1x1 convolutions, of two steps of two micro-batches."""
    own = {
        "model": {"family": "sd15", "pretrained": str(folder)},
        "data": {"path": str(data), "resolution": 64, "variants": 3},
        "adapter": {"method": "lora", "rank": 3, "targets": "all_linear"},
        "train": {"steps": 2, "batch_size": 2, "gradient_accumulation": 2, "seed": 11},
    }
    return merged(tiny_config | own, **changes)


def prepared(config: TrainConfig) -> PreparedData:
    return prepare(config, Accelerator(cpu=True), StageTimer(False))


@pytest.mark.parametrize(
    ("version", "method", "where"),
    [
        ("sd15", "lora", "everywhere"),
        ("sd2", "full", "inside"),
        pytest.param("sd2", "lora", "everywhere", marks=pytest.mark.slow),
        pytest.param("sd15", "full", "inside", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_equal_those_of_diffusers_training_script(
    version: tiny_sd15.Version, method: str, where: str, pipeline: Pipelines, data: Path, tiny_config: dict
) -> None:
    """Its arithmetic on the pictures' pixels and the plan's holes, epsilon and v; ``inside`` weighs its squared errors
    by the mask that the UNet reads."""
    folder = pipeline(version)
    adapter = {} if method == "lora" else {"adapter": {"method": "full"}}
    raw = config_of(folder, data, tiny_config, data={"inpainting_loss": where})
    config = validate({**raw, **adapter}, "ours")
    ready = prepared(config)
    first = config.model.load_denoiser(config.precision, CPU)
    config.adapter.attach(first, config.train.seed)
    lora = {name.replace(".default", ""): p.detach().clone() for name, p in trained_parameters(first).items()}
    unet = config.model.load_denoiser(config.precision, CPU)
    batches = BatchLoader(ready, config.train.seed, CPU)
    (batch, _), draws = batches.step(0), ready.plan.micro_batch(0, 0)
    loss = assemble(config, unet, Accelerator(cpu=True)).compute(batch)
    ours = {name.replace(".default", ""): p.grad for name, p in trained_parameters(unet).items()}

    vae = AutoencoderKL.from_pretrained(folder / "vae")
    views = [draw.view for draw in draws]
    image = torch.stack([
        torch.from_numpy(crop_to_bucket(decode(view.image.read_same()), view.bucket)) for view in views
    ])  # fmt: skip
    mask = torch.from_numpy(np.stack([hole_pixels(view, 8) for view in views])).float()[:, None]
    with torch.no_grad():
        latents, masked_latents = (
            vae.encode(each).latent_dist.mode() * vae.config.scaling_factor for each in (image, image * (mask < 0.5))
        )
    small = F.interpolate(mask, size=latents.shape[2:])
    other = UNet2DConditionModel.from_pretrained(folder / "unet")
    if method == "lora":
        other.requires_grad_(False)
        trained: dict[str, Tensor] = unet_train.add_adapter(other, lora, 3.0)
    else:
        trained = dict(other.named_parameters())
    times = batch.level.long()
    z_t, target = unet_train.dreambooth(SCHEDULES[version], times, latents, batch.noise)
    embeds = unet_train.encode_prompts(folder, [draw.caption for draw in draws])
    predicted = other(torch.cat([z_t, small, masked_latents], dim=1), times, embeds).sample
    errors = F.mse_loss(predicted.float(), target.float(), reduction="none")
    wanted = (errors * small).mean() if where == "inside" else errors.mean()
    (wanted / 2).backward()  # one of two micro-batches
    theirs = {name: p.grad for name, p in trained.items()}
    norm = torch.nn.utils.get_total_norm(list(theirs.values())).item()
    torch.testing.assert_close(2 * loss, wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * max(1.0, norm))
    assert norm > 1e-3 and 0 < small.mean() < 1 and len({view.hole for view in views}) == 2


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_holes(pipeline: Pipelines, data: Path, tiny_config: dict) -> None:
    """The evaluation uses the first variants; a checkpoint pins what is painted."""
    raw = config_of(pipeline("sd15"), data, tiny_config, data={"crop": "random"}, train={"steps": 4})
    raw = merged(raw, checkpoint={"every": 2}, validation={"loss_samples": 2, "every": 2})
    whole = run_with(raw, name="whole")
    fail_at("step.begun", raw, 4, name="killed")
    again = run_with(raw, "auto", name="killed")
    assert [row["loss"] for row in read_metrics(again)][-2:] == [row["loss"] for row in read_metrics(whole)][-2:]
    for name, tensor in saved_weights(whole, 4).items():
        assert torch.equal(tensor, saved_weights(again, 4)[name]), name
    rows = json.loads((whole / "data.json").read_text())["samples"]
    assert {row["inpainting_mask"] for row in rows} == {"random"}
    assert load_file(next(whole.glob("*.safetensors")))


def test_holes_in_check_the_data_report_and_the_counts_of_entries(
    pipeline: Pipelines, unet_pipeline: Callable[..., Path], data: Path, tiny_config: dict
) -> None:
    config = validate(config_of(pipeline("sd15"), data, tiny_config), "test")
    assert "random holes, loss everywhere" in explain(config) and "3 variants" in explain(config)
    single = config_of(pipeline("sd15"), data, tiny_config, data={"variants": 1})
    assert "keeps one hole" in explain(validate(single, "test"))
    plan = plan_data(config).plan
    holes = {view.hole for view in plan.views()}
    whole = any(hole is not None and hole.kind == "whole" for hole in holes)
    entries = len(plan.samples) + len([hole for hole in holes if hole and hole.draw]) + whole
    assert DataCounts.from_plan(config, plan).pixels == 64 * 64 * entries
    found = scan_dataset(config, 4)
    assert found.holes == ["random"] and found.sources[0].holes == len(plan.views()) and found.sources[0].crops == 4
    for seen in found.usable:
        assert seen.tile is not None and len(seen.variants) == 3
        assert any((np.asarray(each) == 128).all(2).any() for each in seen.variants)
    plain = unet_pipeline("sd15")
    fields = {"mask": "alpha", "inpainting_mask": "own", "inpainting_loss": "inside"}
    with pytest.raises(ConfigError) as caught:
        validate(config_of(plain, data, tiny_config, data=fields), "test")
    assert [problem.path for problem in caught.value.problems] == ["data.inpainting_mask", "data.inpainting_loss"]
    words = "data.inpainting_mask: own is for inpainting models, whose input has 9 channels; this model's has 4. Leave"
    assert words in str(caught.value)
