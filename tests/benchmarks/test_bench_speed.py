"""The speed grid and the yardstick: figures agree with each other, and diffusers' recipe is the same job as ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import speed, speed_rows
from benchmarks.diffusers_training import DreamBooth, Flags
from benchmarks.roofline import least_seconds
from benchmarks.tiny_models import tiny_sd3
from simpletune.config.load import read_config
from simpletune.engine.profiling.figures import KINDS, Recording, Span, shares
from simpletune.models.shared.conditioning import Conditioning
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.synthetic import SingleProcess
from simpletune.stages.step.train_step import assemble
from simpletune.system.options import UserError

CPU = torch.device("cpu")
SMALL = ("data.resolution=64", "model.t5_length=8")


def test_every_row_is_a_valid_configuration_beside_one_of_equal_settings() -> None:
    rows = speed_rows.grid()
    assert 20 <= len(rows) <= 31
    for name, row in {**rows, **speed_rows.demo_grid()}.items():
        config, _ = read_config(speed_rows.CONFIG, [*speed_rows.ENOUGH, *row.overrides])
        if row.beside is None:
            continue
        all_rows = rows if row.beside in rows else speed_rows.demo_grid()
        beside, _ = read_config(speed_rows.CONFIG, [*speed_rows.ENOUGH, *all_rows[row.beside].overrides])
        assert (config.data.resolution, config.train.batch_size) == (beside.data.resolution, beside.train.batch_size)
        assert config.memory.checkpointing == beside.memory.checkpointing, name
        assert config.adapter.method == beside.adapter.method


def test_a_row_that_fails_does_not_end_the_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(name: str, *_: object) -> dict:
        if name == "LoRA int8":
            raise FloatingPointError("the loss is nan after 3 steps")
        return {"seconds_per_step": 1.0}

    monkeypatch.setattr(speed, "rates", lambda device: {"copy": {"rate": 1.0}})
    monkeypatch.setattr(speed, "measure", measure)
    with pytest.raises(UserError, match="LoRA int8: FloatingPointError: the loss is nan") as caught:
        speed.run(tmp_path, 60, "", "demo", "cpu")
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert caught.value.code == 1 and set(speed_rows.demo_grid()) - set(rows) == {"LoRA int8"}
    assert "| full bf16 |" in (tmp_path / "speed.md").read_text()


def test_no_row_downloads_the_gated_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fresh machine has neither the weights nor a licence, and random weights need none."""
    from simpletune.system import hub

    monkeypatch.setattr(hub, "fetch", lambda parts: pytest.fail(f"fetched {parts}"))
    monkeypatch.setattr(hub, "listing", lambda repository: pytest.fail(f"listed {repository}"))
    for row in speed_rows.grid().values():
        config = speed.config_of(row.overrides)
        assert config.model.files.known_config() and config.model.text.tokens > 0 and Path(config.data.path).is_dir()


def test_kinds_on_a_device_follow_what_launched_the_work() -> None:
    ranges = [Span("ProfilerStep#1", 0, 100, 1), Span("Optimizer.step#AdamW.step", 60, 80, 1)]
    starts = {"aten::addmm_": 1, "aten::_scaled_dot_product_flash_attention": 11, "_QuantisedProduct": 21,
              "aten::add": 61, "aten::add_": 85}  # fmt: skip
    operators = [Span(name, at, at + 8, 1, id=n) for n, (name, at) in enumerate(starts.items(), 1)]
    operators.append(Span("aten::mul", 22, 28, 1, id=3))
    device = [Span("kernel", 10 * n, 10 * n + 10, 7, id=n + 1) for n in range(5)]
    found = shares(Recording(ranges, operators, device), 1)
    expected = dict.fromkeys(("linears", "attention", "quantisation", "optimizer", "element-wise"), 0.1)
    assert found == {**dict.fromkeys(KINDS, 0.0), **expected, "idle": 0.5}


def test_the_floor_is_the_longer_of_products_and_traffic() -> None:
    rates = {"bf16 products": {"rate": 2.0}, "int8 products": {"rate": 4.0}, "copy": {"rate": 10.0}}
    assert least_seconds(rates, 4e12, 1e9) == pytest.approx(2)
    assert least_seconds(rates, 4e12, 1e9, 2e12) == pytest.approx(1.5)
    assert least_seconds(rates, 4e12, 50e9) == pytest.approx(5)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "pipeline"
    tiny_sd3.build(folder, tiny_sd3.Sizes(layers=2, heads=2), dtype="fp32")
    return folder


def recipe(pipeline: Path, accelerator, **flags) -> DreamBooth:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    torch.manual_seed(0)
    kinds = {"transformer": SD3Transformer2DModel, "vae": AutoencoderKL, "scheduler": FlowMatchEulerDiscreteScheduler}
    parts = [kind.from_pretrained(pipeline, subfolder=name) for name, kind in kinds.items()]
    return DreamBooth(*parts, accelerator, 4, Flags(**flags))


def test_the_yardsticks_gradients_are_ours(pipeline: Path, tiny_config: dict) -> None:
    """In fp32, for one batch: with preconditioning its loss is sigma^2 times ours."""
    from simpletune.config.load import validate

    model = {**tiny_config["model"], "pretrained": str(pipeline)}
    config = validate({**tiny_config, "model": model, "adapter": {"method": "lora", "rank": 4}}, "speed")
    transformer = config.model.load_denoiser(config.precision, CPU)
    core = assemble(config, transformer, SingleProcess(CPU))  # type: ignore[arg-type]
    transformer.train()
    z_0, noise, text, pooled = (torch.randn(size) for size in ((1, 16, 8, 8), (1, 16, 8, 8), (1, 32, 96), (1, 80)))
    with speed.accelerator_on(CPU, "no") as accelerator:
        for precondition in (False, True):
            theirs = recipe(pipeline, accelerator, precondition=precondition)
            index = torch.tensor([400])
            sigma = theirs.sigmas(theirs.scheduler.timesteps[index], z_0).flatten()
            own = dict(transformer.named_parameters())
            with torch.no_grad():
                for number, (name, parameter) in enumerate(theirs.transformer.named_parameters()):
                    if parameter.requires_grad:
                        generator = torch.Generator().manual_seed(number)
                        own[name].copy_(parameter.normal_(0, 0.1, generator=generator))
            batch = Batch(z_0, noise, sigma, Conditioning(text, pooled=pooled), ("one",))
            transformer.zero_grad()
            core.loss(transformer, batch).backward()
            theirs.loss(z_0, noise, index, text, pooled).backward()
            factor = sigma.item() ** 2 if precondition else 1.0
            compared = 0
            for name, parameter in theirs.transformer.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(parameter.grad, factor * own[name].grad, rtol=1e-5, atol=1e-7)
                    compared += 1
            assert compared == 2 * 15  # the last block has no to_add_out


def test_the_yardstick_learns(pipeline: Path) -> None:
    with speed.accelerator_on(CPU, "no") as accelerator:
        theirs = recipe(pipeline, accelerator, lr=0.05)
        pixels, text, pooled = torch.rand(2, 3, 32, 32), torch.randn(2, 32, 96), torch.randn(2, 80)
        losses = []
        for _ in range(12):
            torch.manual_seed(5)
            losses.append(theirs.step(pixels, text, pooled).item())
    assert losses[-1] < 0.8 * losses[0]
