"""An epoch of a run: fillers count nothing, and a step's loss is the mean over its samples (see data/test_plan.py)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from blocks import predict_velocity
from PIL import Image
from tiny_runs import resumed_from
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.schema import run_folder
from simpletune.engine.tensors import trained_parameters
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.synthetic import SyntheticBatches
from simpletune.stages.step.train_step import TrainStep
from simpletune.training.set_up import set_up
from simpletune.training.train import train
from simpletune.training.trainer import Job


@pytest.fixture
def uneven(tiny_config: dict, tmp_path: Path) -> dict:
    """Eight pictures in buckets of three, three and two; micro-batches of two, three of them a step."""
    folder = tmp_path / "uneven"
    folder.mkdir()
    for number in range(8):
        gradient = Image.linear_gradient("L").rotate(37 * number).resize([(64, 64), (96, 40), (40, 96)][number % 3])
        Image.merge("RGB", [gradient, gradient.rotate(90), gradient.rotate(180)]).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return tiny_config | {
        "data": {"path": str(folder), "resolution": 32},
        "train": {"epochs": 2, "batch_size": 2, "gradient_accumulation": 3, "clip_norm": None},
    }


def started(data: dict) -> Job:
    config = validate(data, "test")
    run = set_up(config, AttemptRecorder(run_folder(config), 0.0))
    run.core.denoiser.train()
    return run


def gradients_of(run: Job, step: int) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and the gradients that its update would see."""
    found: dict[str, Tensor] = {}

    def keep(loss: Tensor, norm: Tensor) -> bool:
        named = trained_parameters(run.core.denoiser).items()
        found.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return False

    loss, _ = run.core.step(run.batches.step(step), keep)
    return loss.item(), found


def plain_mean(run: Job, step: int) -> tuple[float, dict[str, Tensor]]:
    """The mean over the samples of a step, each computed by itself: no batch, no filler."""
    plan, losses = run.prepared.plan, []
    for micro in range(plan.accumulation):
        for draw in plan.micro_batch(step, micro):
            if draw.weight:
                one = run.batches.load([draw])
                sigma = one.level.view(-1, 1, 1, 1)
                z_t = (1 - sigma) * one.z_0 + sigma * one.noise
                text = one.conditioning
                velocity = predict_velocity(run.core.denoiser, z_t, one.level, text.embeds, text.pooled, torch.float32)
                losses.append((velocity - (one.noise - one.z_0)).square().mean())
    mean = torch.stack(losses).mean()
    parameters = trained_parameters(run.core.denoiser)
    gradients = torch.autograd.grad(mean, list(parameters.values()), allow_unused=True)
    return mean.item(), {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}


@pytest.mark.parametrize("batch", [(2, 3), (2, 2), (8, 1), (3, 8)], ids=str)
def test_the_gradient_is_that_of_the_mean_over_the_samples(batch: tuple[int, int], uneven: dict) -> None:
    """Micro-batches of unequal counts, full ones beside a short one, whole ones missing."""
    uneven["train"] |= {"batch_size": batch[0], "gradient_accumulation": batch[1]}
    run = started(uneven)
    with torch.no_grad():
        for parameter in run.core.parameters:
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    for step in range(run.prepared.plan.steps_per_epoch):
        loss, gradients = gradients_of(run, step)
        expected_loss, expected = plain_mean(run, step)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-7)


def test_an_epoch_of_a_run_shows_every_picture(uneven: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of the defect: one epoch of eight pictures in three buckets saw five of them."""
    seen: list[str] = []
    honest = TrainStep.step

    def counted(self: TrainStep, batches: list, *rest: object) -> object:
        for batch in batches:
            seen.extend(batch.names[: len(batch.names) - batch.fillers])
        return honest(self, batches, *rest)

    monkeypatch.setattr(TrainStep, "step", counted)
    uneven["train"] = {"epochs": 2, "batch_size": 4}
    rows = list(read_metrics(train(validate(uneven, "test"))))
    assert [(row["step"], row["epoch"]) for row in rows] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert Counter(seen) == {f"{number}.png": 2 for number in range(8)}


def test_resuming_amid_an_epoch_is_exact(uneven: dict) -> None:
    uneven |= {"checkpoint": {"every": 1, "keep_last": "all"}}
    whole = train(validate(uneven, "test"))
    assert [row["epoch"] for row in read_metrics(whole)] == [0, 0, 1, 1]
    for done in (1, 2, 3):
        rows = read_metrics(resumed_from(whole, uneven, done))
        assert [row["loss"] for row in rows] == [row["loss"] for row in read_metrics(whole)]


def test_micro_batches_without_a_sample_are_not_computed_and_synthetic_ones_share_a_step(uneven: dict) -> None:
    run = started(uneven)
    assert [len(run.batches.step(step)) for step in (0, 1, 2, 3)] == [3, 2, 3, 2]
    batches = SyntheticBatches(run.config, run.core).step(0)
    assert [(batch.parts, batch.fillers) for batch in batches] == [(3, 0)] * 3
