"""An epoch: every sample counts once, fillers count nothing, and a step's loss is the mean over its samples."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blocks import predict_velocity
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from plans import make_plan, some_pictures
from torch import Tensor

from simpletune.commands.train.set_up import set_up
from simpletune.commands.train.train import train
from simpletune.config.load import validate
from simpletune.config.schema import run_folder
from simpletune.data.plan import Plan
from simpletune.engine.tensors import trained_parameters
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.synthetic import SyntheticBatches
from simpletune.stages.step.train_step import TrainStep
from simpletune.training.trainer import Job

BUCKETS = [(64, 64), (48, 80), (80, 48), (96, 32), (32, 96)]


@st.composite
def plans(draw: st.DrawFn) -> dict:
    """The arguments of ``make_plan``."""
    counts = draw(st.lists(st.integers(0, 7), min_size=5, max_size=5).filter(any))
    small = st.integers(1, 5)
    return {
        "pictures": some_pictures([size for size, count in zip(BUCKETS, counts, strict=True) for _ in range(count)]),
        "repeats": draw(st.integers(1, 3)), "batch_size": draw(small), "accumulation": draw(small),
        "seed": draw(st.integers(0, 2**63 - 1)), "caption_dropout": 0.5,
    }  # fmt: skip


def rows_of(plan: Plan, step: int) -> list[list]:
    """The draws of each micro-batch of a step, and of those that an epoch's last step lacks."""
    return [plan.micro_batch(step, micro) for micro in range(plan.accumulation)]


@settings(deadline=None, max_examples=60)
@given(plans(), st.integers(0, 2))
def test_each_sample_counts_once_an_epoch(options: dict, epoch: int) -> None:
    plan = make_plan(**options)
    counted: Counter[str] = Counter()
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        micros = rows_of(plan, step)
        real = [draw for micro in micros for draw in micro if draw.weight == 1]
        assert real, "a step without a sample"
        assert sum(map(len, plan.micros(step))) == len(real)
        assert len({draw.noise_key for draw in real}) == len(real)
        assert {draw.weight for micro in micros for draw in micro} <= {0, 1}
        for micro in micros:
            assert len(micro) == plan.batch_size
            assert len({draw.view.bucket for draw in micro}) == 1
            assert sorted(micro, key=lambda draw: -draw.weight) == micro, "fillers stand last"
        counting = [any(draw.weight for draw in micro) for micro in micros]
        assert len(plan.micros(step)) == sum(counting)
        assert counting == sorted(counting, reverse=True)
        counted.update(draw.view.picture.name for draw in real)
    assert counted == {picture.name: options["repeats"] for picture in options["pictures"]}


@settings(deadline=None, max_examples=60)
@given(plans(), st.integers(0, 12))
def test_a_plan_taken_up_at_any_step_goes_on_as_if_it_had_begun_at_the_first(options: dict, start: int) -> None:
    whole, resumed = make_plan(**options), make_plan(**options)
    before = [rows_of(whole, step) for step in range(start + 4)]
    assert [rows_of(resumed, step) for step in range(start, start + 4)] == before[start:]


@settings(deadline=None, max_examples=30)
@given(plans())
def test_an_epoch_has_as_many_steps_as_its_micro_batches_need(options: dict) -> None:
    plan = make_plan(**options)
    micros = sum(math.ceil(len(members) / plan.batch_size) for members in plan.buckets.values())
    assert plan.steps_per_epoch == math.ceil(micros / plan.accumulation)
    samples = sum(sum(map(len, plan.micros(step))) for step in range(plan.steps_per_epoch))
    assert samples == len(plan.samples) == pytest.approx(plan.samples_per_step * plan.steps_per_epoch)


def test_a_filler_repeats_a_row_of_its_own_micro_batch() -> None:
    """So it needs no other file, and a picture that is not finite spoils no step that it is not part of."""
    plan = make_plan(some_pictures([(64, 64)] * 3), batch_size=2, accumulation=3)
    for step in range(4):
        first, second, third = rows_of(plan, step)
        assert [draw.weight for micro in (first, second, third) for draw in micro].count(1) == 3
        for micro in (first, second):
            assert all(draw.weight or replace(draw, weight=1) == micro[0] for draw in micro)
        assert third == [replace(draw, weight=0) for draw in second]


# Of a real run


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
                velocity = predict_velocity(
                    run.core.denoiser, z_t, one.level, one.prompt_embeds, one.pooled, torch.float32
                )
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
    whole = read_metrics(train(validate(uneven | {"name": "whole"}, "test")))
    assert [row["epoch"] for row in whole] == [0, 0, 1, 1]
    for done in (1, 2, 3):
        halves = uneven | {"name": f"halves-{done}"}
        train(validate(halves | {"train": {**uneven["train"], "epochs": None, "steps": done}}, "test"))
        rows = read_metrics(train(validate(halves, "test"), "latest"))
        assert [row["loss"] for row in rows] == [row["loss"] for row in whole]


def test_micro_batches_without_a_sample_are_not_computed(uneven: dict) -> None:
    run = started(uneven)
    assert [len(run.batches.step(step)) for step in (0, 1, 2, 3)] == [3, 2, 3, 2]


def test_synthetic_micro_batches_share_a_step(uneven: dict) -> None:
    run = started(uneven)
    batches = SyntheticBatches(run.config, run.core).step(0)
    assert [(batch.parts, batch.fillers) for batch in batches] == [(3, 0)] * 3
