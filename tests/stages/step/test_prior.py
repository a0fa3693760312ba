"""Prior preservation by the base's own prediction: the loss it adds, by hand; with every lever; in whole runs."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from tiny_runs import resumed_from, saved_weights
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate.simulate import simulate
from simpletune.runs.folder import read_metrics
from simpletune.stages.encode import prepare
from simpletune.stages.step.batch_loader import Batch, BatchLoader, TrainingPasses
from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import TrainStep, assemble
from simpletune.system.options import ConfigError, UserError
from simpletune.system.stage_timer import StageTimer
from simpletune.training.train import train

CPU = torch.device("cpu")
LATENT = 16 * 4 * 4 * 4  # bytes in fp32
CLASS = "a flat picture"
PRIOR = {"method": "base_prediction", "prompt": CLASS, "weight": 0.7}


def config_of(tiny_config: dict, **sections: Any) -> TrainConfig:
    return resolve_folders(validate(copy.deepcopy(tiny_config) | {"prior": PRIOR} | sections, "test"))


def assembled(config: TrainConfig) -> tuple[TrainStep, BatchLoader]:
    """A step core whose adapter already changes the model, and the run's batches."""
    model = config.model.load_denoiser(config.precision, CPU, 0)
    core = assemble(config, model, SingleProcess(CPU))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in core.parameters:
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    prepared = prepare(config, Accelerator(cpu=True), StageTimer(cuda=False))
    return core, BatchLoader(prepared, config.train.seed, CPU, modulation=core.modulation, prior=config.prior)


def predicted(config: TrainConfig, model: torch.nn.Module, batch: Batch) -> Tensor:
    z_t = torch.lerp(batch.z_0, batch.noise, batch.level.view(-1, 1, 1, 1))
    return config.model.predict(model, z_t, 1000 * batch.level, batch.conditioning, torch.float32)


def test_the_loss_is_that_of_a_base_loaded_again(tiny_config: dict) -> None:
    """Two micro-batches: the pictures against noise - z_0, then the class prompt against the base, times the weight."""
    config = config_of(tiny_config, train={"steps": 1, "batch_size": 2, "clip_norm": None})
    core, batches = assembled(config)
    first, second = batches.step(0)
    assert (first.prior, first.weight) == (None, None)
    assert second.prior.flatten().tolist() == pytest.approx([0.7, 0.7]) and not second.weight.any()
    for name in ("z_0", "noise", "level"):
        torch.testing.assert_close(getattr(second, name), getattr(first, name), rtol=0, atol=0)
    of_class = batches.text.load(CLASS).embeds
    assert all((row == of_class).all() for row in second.conditioning.embeds)
    assert (first.conditioning.embeds[0] != of_class).any()

    base = config.model.load_denoiser(config.precision, CPU, 0)
    learned = (predicted(config, core.model, first) - (first.noise - first.z_0)).square().mean()
    kept = (predicted(config, core.model, second) - predicted(config, base, second).detach()).square().mean()
    expected = torch.autograd.grad(learned + 0.7 * kept, core.parameters, allow_unused=True)
    gradients: dict[int, Tensor] = {}
    for number, parameter in enumerate(core.parameters):
        parameter.register_post_accumulate_grad_hook(lambda p, at=number: gradients.update({at: p.grad.clone()}))
    total, _ = core.step([first, second])
    assert kept.item() > 1e-3
    assert total.item() == pytest.approx((learned + 0.7 * kept).item(), rel=1e-5)
    for number, gradient in enumerate(expected):
        if gradient is not None:
            torch.testing.assert_close(gradients[number], gradient, rtol=1e-4, atol=1e-6)


def test_a_trigger_is_replaced_in_the_captions(tiny_config: dict) -> None:
    """A caption without it, such as a dropped one, is replaced as a whole."""
    data = tiny_config["data"] | {"caption_dropout": 0.5}
    config = config_of(tiny_config, prior=PRIOR | {"prompt": "thing", "trigger": "background"}, data=data)
    prepared = prepare(config, Accelerator(cpu=True), StageTimer(cuda=False))
    passes = TrainingPasses(prepared.plan, config.prior)
    pairs = [[passes.micro_batch(step, micro)[0].caption for micro in (0, 1)] for step in range(8)]
    assert {"", *(own for own, _ in pairs)} == {own for own, _ in pairs} and passes.accumulation == 2
    for own, of_class in pairs:
        assert of_class == (own.replace("background", "thing") if "background" in own else "thing")
        prepared.text.load(of_class)  # encoded ahead
    assert any("background" in own for own, _ in pairs)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def test_before_the_first_update_it_adds_nothing_and_then_it_does(tiny_config: dict) -> None:
    """An adapter that is not trained yet predicts what the base does."""
    ours, theirs = (
        losses(train(validate(copy.deepcopy(tiny_config) | {"name": name, "prior": prior}, "test")))
        for name, prior in (("with", PRIOR), ("without", {"method": "none"}))
    )
    assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], rel=0.1) and ours[2:] != theirs[2:]


LEVERS: dict[str, dict[str, Any]] = {
    "streaming": {"memory": {"checkpointing": "all", "resident_blocks": 0}},
    "plan": {"memory": {"checkpointing": "none", "modulation": "plan", "modulation_window": 3}},
    "boundaries on the host": {"memory": {"checkpointing": "all", "offload_checkpoint_inputs": True}},
}
PRECISIONS = {"int8": {"weights": "int8", "compute": "fp32"}, "fp16": {"weights": "int8", "compute": "fp16"}}


@pytest.mark.parametrize(("precision", "levers"), [("int8", list(LEVERS)), ("fp16", ["streaming", "plan"])])
def test_levers_change_nothing(precision: str, levers: list[str], tiny_config: dict) -> None:
    data = copy.deepcopy(tiny_config) | {"prior": PRIOR, "precision": PRECISIONS[precision]}
    data["train"] = {"steps": 2, "batch_size": 2}
    expected = losses(train(validate(data | {"name": "plain"}, "test")))
    assert len(set(expected)) == 2
    for name in levers:
        found = losses(train(validate(data | {"name": "lever"} | LEVERS[name], "test")))
        if "plan" in name:  # products with another number of rows differ in their last bits
            assert found == pytest.approx(expected, rel=1e-3 if precision == "fp16" else 1e-5), name
        else:
            assert found == expected, name


def test_resumes_bit_for_bit(tiny_config: dict) -> None:
    data = copy.deepcopy(tiny_config) | {"prior": PRIOR, "checkpoint": {"every": 1, "keep_last": "all"}}
    data["adapter"] |= {"dropout": 0.2}
    whole = train(validate(data | {"name": "whole"}, "test"))
    halves = resumed_from(whole, data, 2)
    torch.testing.assert_close(saved_weights(halves, 4), saved_weights(whole, 4), rtol=0, atol=0)
    with pytest.raises(UserError, match="prior.prompt"):
        train(validate(data | {"name": "whole", "prior": PRIOR | {"prompt": "other"}}, "t"), "latest")


def test_a_source_for_regularization_gives_places_and_no_targets(tiny_config: dict) -> None:
    """Its rows have the weight 0 against their own targets, and its weight times the prior's against the base's."""
    one = tiny_config["data"]
    data = {"sources": [one, one | {"regularization": True, "weight": 0.5, "prompt": CLASS}]}
    sections = {"data": data, "train": {"steps": 1, "batch_size": 12}}
    core, batches = assembled(config_of(tiny_config, prior={"method": "base_prediction", "weight": 0.4}, **sections))
    (batch,) = batches.step(0)
    draws = batches.plan.micro_batch(0, 0)
    of_class = torch.tensor([draw.view.image.source == 1 for draw in draws])
    assert of_class.sum() == 6
    torch.testing.assert_close(batch.weight.flatten(), (~of_class).float())
    torch.testing.assert_close(batch.prior.flatten(), 0.2 * of_class.float())

    core, batches = assembled(config_of(tiny_config, **sections))  # with a prompt, the second pass is the others'
    first, second = batches.step(0)
    torch.testing.assert_close(first.prior.flatten(), 0.35 * of_class.float())
    torch.testing.assert_close(second.prior.flatten(), 0.7 * (~of_class).float())
    assert not second.weight.any()
    assert all(batch.prior is None for batch in batches.single_batches(batches.plan.evaluation(2)))


def test_outside_of_masks_the_base_is_the_target(tiny_config: dict, tmp_path: Path) -> None:
    for number in range(2):
        image = Image.new("RGBA", (32, 32), (200, 30 * number, 0, 255))
        image.paste((0, 0, 255, 0), (0, 0, 16, 32))  # the left half is transparent
        image.save(tmp_path / f"{number}.png")
    data = {"path": str(tmp_path), "resolution": 32, "prompt": "a red square", "mask": "alpha"}
    prior = {"method": "base_prediction", "outside_mask": 0.3}
    core, batches = assembled(config_of(tiny_config, data=data, prior=prior, train={"steps": 1, "batch_size": 2}))
    (batch,) = batches.step(0)
    assert all(one.prior is None for one in batches.single_batches(batches.plan.evaluation(2)))
    inside = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(2, 1, 4, 4)
    torch.testing.assert_close(batch.prior, 0.3 * (1 - inside))
    learned = batch.weight
    torch.testing.assert_close(learned[..., 2:], torch.ones(2, 1, 4, 2))
    assert (learned[..., :2] < 0.5).all()
    both = core.loss(core.model, batch).item()
    base = core.config.model.load_denoiser(core.config.precision, CPU, 0)
    found, kept = (predicted(core.config, model, batch).detach() for model in (core.model, base))
    errors = learned * (found - (batch.noise - batch.z_0)).square() + batch.prior * (found - kept).square()
    assert both == pytest.approx(errors.mean().item(), rel=1e-5)


def test_it_is_predicted_because_it_runs(tiny_config: dict) -> None:
    """A pass of the base leaves nothing behind, so the peak hardly grows; the pass itself is seen."""
    accumulating = {"train": {"steps": 4, "gradient_accumulation": 2}}
    with_prior = simulate(config_of(tiny_config))
    without = simulate(config_of(tiny_config, prior={"method": "none"}, **accumulating))
    assert "prior" in with_prior.phases and "prior" not in without.phases
    assert without.peak.bytes < with_prior.peak.bytes < without.peak.bytes + 16 * LATENT


def test_its_weights_are_predicted_a_number_a_position_where_a_mask_is(tiny_config: dict) -> None:
    core: Any = SimpleNamespace(modulation=None)
    for mask, shape in (({}, (1, 1, 1, 1)), ({"mask": "alpha"}, (1, 1, 4, 4))):
        config = config_of(tiny_config, data=tiny_config["data"] | {"resolution": 32} | mask)
        for batch in SyntheticBatches(config, core).step(0):
            assert batch.prior is not None and batch.prior.shape == shape
            assert any(tensor is batch.prior for tensor in batch.tensors())


IN_BACKWARD = {"memory": {"optimizer_in_backward": True}, "train": {"steps": 4, "clip_norm": None}}


@pytest.mark.parametrize(
    ("prior", "changes", "problem"),
    [
        (PRIOR, {"adapter": {"method": "full"}}, "method: base_prediction needs the base, which.*Use class_pictures"),
        ({"method": "base_prediction"}, {}, "prompt: null, and no data source has regularization.*Name"),
        (PRIOR, IN_BACKWARD, "prompt: the second pass accumulates gradients, but memory.optimizer_in_backward keeps"),
        (PRIOR | {"outside_mask": 1.0}, {}, "outside_mask: 1, but no data source has masks. Set data.mask, or use 0"),
        (
            PRIOR | {"trigger": "flat"},
            {},
            "trigger: 'flat' is in prior.prompt 'a flat picture'.*Name the class without",
        ),
        (
            {"method": "base_prediction", "trigger": "x", "outside_mask": 1.0},
            {},
            "trigger: 'x' is replaced by prior.prompt, which is null. Name the class",
        ),
        (PRIOR | {"prompt": "a blick"}, {}, "prompt: 'a blick' is also the prompt of the pictures"),
        ({"method": "class_pictures"}, {}, "prompt"),
    ],
)
def test_what_does_not_go_together_is_refused(prior: dict, changes: dict, problem: str, tiny_config: dict) -> None:
    data = copy.deepcopy(tiny_config) | {"prior": prior} | changes
    data["data"]["prompt"] = "a blick"
    with pytest.raises(ConfigError, match=f"prior.{problem}"):
        validate(data, "test")
