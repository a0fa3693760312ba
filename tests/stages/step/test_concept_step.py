"""Steps from prompts alone: drawing, loss and gradients by the papers' equations, with diffusers' models and solvers;
with every lever; resumed; predicted."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import Accelerator
from slider import erasure, preserved, slider
from tiny_runs import resumed_from, saved_weights
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.engine.tensors import trained_parameters
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.objectives.conventions import FlowConventions
from simpletune.models.objectives.ddpm import DdpmProcess, schedule_of
from simpletune.models.objectives.flow import FlowProcess
from simpletune.models.objectives.objective import NoisingProcess
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.flops import trained_of
from simpletune.runs.folder import read_metrics
from simpletune.stages import sample
from simpletune.stages.encode import prepare
from simpletune.stages.step.concept import ConceptBatch, ConceptLoader
from simpletune.stages.step.synthetic import SingleProcess
from simpletune.stages.step.train_step import TrainStep, assemble
from simpletune.system.options import UserError
from simpletune.system.stage_timer import StageTimer
from simpletune.training.train import train

CPU = torch.device("cpu")
SIZE = {"target": "a circle", "positive": "a large circle", "negative": "a small circle", "guidance": 2.0}
KEPT = {"preserved": ["a red heart"], "preserved_weight": 0.7}
ERASED = {"target": "stripes", "negative": "stripes", "neutral": "", "guidance": 1.5, "weight": 0.6}
CONCEPT = {"directions": [SIZE | KEPT], "resolutions": [32], "drawing_steps": 4}


def concept_data(tiny_config: dict, concept: dict[str, Any] = CONCEPT, **sections: Any) -> dict:
    data = copy.deepcopy(tiny_config) | {"concept": concept} | sections
    del data["data"]
    return data


def assembled(data: dict) -> tuple[TrainConfig, TrainStep, ConceptLoader]:
    """A step core whose adapter already changes the model, and the run's batches."""
    config = resolve_folders(validate(data, "test"))
    core = assemble(config, config.model.load_denoiser(config.precision, CPU, 0), SingleProcess(CPU))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in core.parameters:
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    core.denoiser.train()
    prepared = prepare(config, Accelerator(cpu=True), StageTimer(cuda=False))
    return config, core, ConceptLoader(prepared, config.train.seed, CPU)


class Reference:
    """diffusers' model of a pipeline's folder, with W + strength B A in its weights."""

    def __init__(self, folder: Path, factors: dict[str, Tensor]):
        kind, name = ("SD3Transformer2DModel", "transformer")
        if not (folder / name).is_dir():
            kind, name = "UNet2DConditionModel", "unet"
        self.model = getattr(diffusers, kind).from_pretrained(folder / name, torch_dtype=torch.float32).eval()
        self.weights = dict(self.model.named_parameters())
        self.factors = {key: value.detach().clone().requires_grad_() for key, value in factors.items()}

    def __call__(self, z: Tensor, time: Tensor, text: Conditioning, strength: float) -> Tensor:
        weights = dict(self.weights)
        for name in [key.removesuffix(".lora_A.default.weight") for key in self.factors if ".lora_A." in key]:
            a, b = (self.factors[f"{name}.lora_{part}.default.weight"] for part in "AB")
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + strength * (b @ a)
        time = time.expand(len(z))
        if hasattr(self.model, "transformer_blocks"):
            inputs = {"hidden_states": z, "timestep": time, "pooled_projections": text.pooled}
        else:
            told = {} if text.pooled is None else {"text_embeds": text.pooled, **text.extra}
            inputs = {"sample": z, "timestep": time, "added_cond_kwargs": told}
        inputs["encoder_hidden_states"] = text.embeds
        return functional_call(self.model, weights, (), inputs | {"return_dict": False})[0]


def drawn_by_diffusers(
    folder: Path, reference: Reference, batch: ConceptBatch, away: Conditioning, steps: int
) -> tuple[Tensor, Tensor]:
    """z_t and the timestep where the drawing stops, by diffusers' scheduler with guidance 3."""
    if hasattr(reference.model, "transformer_blocks"):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    else:
        scheduler = diffusers.DPMSolverMultistepScheduler.from_pretrained(
            folder / "scheduler", algorithm_type="dpmsolver++", solver_order=2
        )
    scheduler.set_timesteps(steps)
    z, target = batch.noise * getattr(scheduler, "init_noise_sigma", 1.0), batch.prompts[batch.drawing.direction.target]
    for time in scheduler.timesteps[: batch.drawing.steps]:
        plain, wanted = (reference(z, time, text, batch.drawing.strength) for text in (away, target))
        z = scheduler.step(plain + 3.0 * (wanted - plain), time, z).prev_sample.detach()
    return z, scheduler.timesteps[batch.drawing.steps]


@pytest.mark.parametrize("model", ["sd3", "sd15", "sdxl"])
def test_loss_and_gradients_are_the_papers(
    model: str, tiny_config: dict, tiny_pipeline: Path, unet_pipeline: Callable[..., Path]
) -> None:
    """A step of two micro-batches: a slider with a preserved prompt, and an erasure."""
    folder = tiny_pipeline if model == "sd3" else unet_pipeline(model)
    side = 32 if model == "sd3" else 128
    concept = CONCEPT | {"directions": [SIZE | KEPT, ERASED], "resolutions": [side]}
    data = concept_data(tiny_config, concept, train={"batch_size": 2, "gradient_accumulation": 2, "clip_norm": None})
    if model != "sd3":
        data["model"] = {"family": model, "pretrained": str(folder)}
    config, core, batches = assembled(data)
    step = next(n for n in range(40) if batches.plan.drawing(n, 0).steps == 2)
    found = batches.step(step)
    assert {len(each.drawing.direction.strengths) for each in found} == {1, 2}
    assert {each.drawing.steps for each in found} == {2}

    reference, expected = Reference(folder, trained_parameters(core.denoiser)), torch.zeros(())
    for batch in found:
        direction = batch.drawing.direction
        away = batches._rows([""] * 2, (side, side))
        z_t, time = drawn_by_diffusers(folder, reference, batch, away, config.concept.drawing_steps)

        def predict(
            prompt: str, strength: float, batch: ConceptBatch = batch, z_t: Tensor = z_t, time: Tensor = time
        ) -> Tensor:
            return reference(z_t, time, batch.prompts[prompt], strength)

        if direction.neutral is None:
            ends = direction.positive, direction.negative
            expected = expected + slider(predict, direction.target, ends, 2.0) / 2
            expected = expected + 0.7 * preserved(predict, "a red heart", (1.0, -1.0)) / 2
        else:
            expected = expected + 0.6 * erasure(predict, direction.target, 1.5) / 2
    expected.backward()

    gradients: dict[str, Tensor] = {}
    for name, parameter in core.named.items():
        parameter.register_post_accumulate_grad_hook(lambda p, at=name: gradients.update({at: p.grad.clone()}))
    loss, _ = core.step(found)
    assert expected.item() > 1e-5
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, gradient in gradients.items():
        wanted = reference.factors[name].grad
        assert (gradient - wanted).norm() <= 2e-3 * wanted.norm() + 1e-7, name


def test_the_strength_is_back_after_a_step(tiny_config: dict) -> None:
    _, core, batches = assembled(concept_data(tiny_config))
    batch = batches.load(batches.plan.micro_batch(0, 0))
    before = [dict(module.scaling) for module in core.denoiser.modules() if hasattr(module, "scaling")]
    core.step(batches.step(0))
    assert before == [dict(module.scaling) for module in core.denoiser.modules() if hasattr(module, "scaling")]
    assert isinstance(batch, ConceptBatch) and core.denoiser.training


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


LEVERS: dict[str, dict[str, Any]] = {
    "streaming": {"memory": {"checkpointing": "all", "resident_blocks": 0}},
    "plan": {"memory": {"checkpointing": "none", "modulation": "plan", "modulation_window": 3}},
    "boundaries on the host": {"memory": {"checkpointing": "all", "offload_checkpoint_inputs": True}},
    "exact sums": {"train": {"steps": 2, "batch_size": 2, "reduce": "exact"}},
}


@pytest.mark.parametrize(("weights", "compute"), [("int8", "fp32"), ("int8", "fp16"), ("nf4", "fp32")])
def test_levers_change_nothing(weights: str, compute: str, tiny_config: dict) -> None:
    data = concept_data(tiny_config, precision={"weights": weights, "compute": compute})
    data["train"] = {"steps": 2, "batch_size": 2}
    expected = losses(train(validate(data | {"name": "plain"}, "test")))
    assert len(set(expected)) == 2
    for name in LEVERS if compute == "fp32" else ("streaming", "plan"):
        found = losses(train(validate(data | {"name": "lever"} | LEVERS[name], "test")))
        if name == "plan":  # products with another number of rows differ in their last bits
            assert found == pytest.approx(expected, rel=1e-3 if compute == "fp16" else 1e-5), name
        else:
            assert found == expected, name


@pytest.mark.parametrize("method", ["lora", "lokr", "loha", "dora", "oft"])
def test_any_adapter_resumes_bit_for_bit(method: str, tiny_config: dict) -> None:
    concept = CONCEPT | {"directions": [SIZE | KEPT, ERASED]}
    data = concept_data(tiny_config, concept, checkpoint={"every": 1, "keep_last": "all"}, adapter={"method": method})
    if method in ("lora", "dora"):
        data["adapter"] |= {"dropout": 0.2}
    whole = train(validate(data | {"name": "whole"}, "test"))
    halves = resumed_from(whole, data, 2)
    torch.testing.assert_close(saved_weights(halves, 4), saved_weights(whole, 4), rtol=0, atol=0)
    assert any(tensor.any() for tensor in saved_weights(whole, 4).values())


def test_another_concept_is_not_resumed(tiny_config: dict) -> None:
    data = concept_data(tiny_config, train={"steps": 1})
    train(validate(data, "test"))
    other = CONCEPT | {"directions": [SIZE | KEPT | {"guidance": 3.0}]}
    with pytest.raises(UserError, match=r"concept.directions.0.guidance: 2.0 -> 3.0"):
        train(validate(data | {"concept": other, "train": {"steps": 2}}, "test"), "latest")


def test_its_memory_is_predicted_with_its_passes(tiny_config: dict) -> None:
    """Drawing and the base's predictions are phases of the simulated step; guidance makes drawing the larger one."""
    config = resolve_folders(validate(concept_data(tiny_config, train={"batch_size": 4}), "test"))
    report = simulate(config)
    assert {"draw", "base", "forward", "backward"} <= set(report.phases)
    assert report.phases["draw"].bytes > report.phases["base"].bytes
    alone = CONCEPT | {"drawing_guidance": 1.0}
    less = simulate(resolve_folders(validate(concept_data(tiny_config, alone, train={"batch_size": 4}), "test")))
    assert less.phases["draw"].bytes < report.phases["draw"].bytes


def test_the_command_predicts_a_whole_run(write_config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    directions = CONCEPT | {"resolutions": [64]}
    file = write_config({"name": "size", "model": {"pretrained": "demo:tiny-sd3"}, "concept": directions})
    assert main(["estimate", str(file), "--device", "L4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["peak_allocated_mib"] > 0 and {"text", "train", "validate"} <= set(told["stages"])


@pytest.mark.parametrize("sides", [[32], [32, 64]], ids=str)
def test_the_time_of_a_step_has_all_its_passes(sides: list[int], tiny_config: dict) -> None:
    """The products of an average step are those counted for the steps of whole epochs, of two unequal directions."""
    concept = CONCEPT | {"directions": [SIZE | KEPT, ERASED], "drawing_steps": 9, "resolutions": sides}
    data = concept_data(tiny_config, concept, train={"batch_size": 2}, memory={"checkpointing": "none"})
    config, core, batches = assembled(data)
    trained = trained_of({name: tuple(value.shape) for name, value in core.named.items()})
    report = simulate(config)
    found = again = 0.0
    for each in report.sections:
        for (kind, _, extents), count in each.work.items():
            if kind.startswith(("product", "attention")):
                times = {"attention": 4, "attention_backward": 10}.get(kind, 2)
                found += each.share * times * count * math.prod(extents)
                again += each.share * 2 * count * math.prod(extents) * (kind == "attention_backward")
    expected = {}
    for step in range(200 * len(sides)):
        samples, drawing = batches.plan.micro_batch(step, 0), batches.plan.drawing(step, 0)
        expected[drawing.steps, drawing.passes, samples[0].view.bucket] = batches.flops(samples, trained)
    assert len(expected) == 18 * len(sides)
    assert found - again == pytest.approx(sum(expected.values()) / len(expected), rel=0.02)


def added(y: list[int], a: list[int], b: list[int], **more: object) -> int:
    return 2 * a[0] * a[1] * b[1]


def test_the_operations_of_a_step_are_what_torch_counts(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    data = concept_data(tiny_config, precision={"weights": "fp32"}, memory={"checkpointing": "none"})
    config, core, batches = assembled(data | {"speed": {"attention": "math"}})
    prompt = config.model.text.blank(torch.float32, 1).map(
        lambda tensor: tensor[0]
    )  # as long as the published encoders' are
    monkeypatch.setattr(batches.text, "load", lambda _: prompt)
    step = next(n for n in range(40) if batches.plan.drawing(n, 0).steps == 2)
    trained = trained_of({name: tuple(value.shape) for name, value in core.named.items()})
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added}) as counter:
        core.step(batches.step(step))
    assert counter.get_total_flops() == batches.flops(batches.plan.micro_batch(step, 0), trained)


@pytest.mark.parametrize("prompt", ["a large circle", "a red heart", ""])
def test_a_prompt_that_is_not_finite_is_named_and_set_aside(prompt: str, tiny_config: dict, tmp_path: Path) -> None:
    data = concept_data(tiny_config, CONCEPT | {"drawing_steps": 30}, train={"steps": 1})
    data["output"] = data["output"] | {"cache": str(tmp_path / "own")}
    _, _, batches = assembled(data)
    for cache, key in batches.text.places(prompt):
        cache.save(key, {name: value * math.nan for name, value in cache.load(key).items()})
    named = repr(prompt) if prompt else "the unconditional prompt"
    with pytest.raises(UserError, match=f"step 1: .*direction 1 at 32 px: its embedding of {named} is") as said:
        train(validate(data, "test"))
    assert "Set aside" in str(said.value) and len(list((tmp_path / "own").rglob("*.damaged"))) >= 1


def test_a_signal_never_ends_a_step_half_way(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing asks for signals between its steps, but not within a training step, which is saved whole."""

    def ask() -> None:
        raise AssertionError("a training step asked for signals")

    monkeypatch.setattr(sample, "poll", ask)
    train(validate(concept_data(tiny_config), "test"))


@pytest.mark.parametrize("kind", ["velocity", "reversed", "epsilon", "v"])
def test_a_prediction_splits_into_what_would_have_it_as_the_target(kind: str) -> None:
    """noised and target of the halves are z_t and the prediction, at low and high noise."""
    if kind in ("velocity", "reversed"):
        process: NoisingProcess = FlowProcess(conventions=FlowConventions(sign=1 if kind == "velocity" else -1))
        level = torch.tensor([0.02, 0.5, 0.999])
    else:
        process, level = DdpmProcess(schedule_of({}), kind == "v", None), torch.tensor([3.0, 500.0, 990.0])
    z_t, prediction = torch.randn(2, 3, 4, 5, 5, generator=torch.Generator().manual_seed(1)).unbind()
    z_0, noise = process.split(z_t, prediction, level)
    torch.testing.assert_close(process.noised(z_0, noise, level), z_t, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(process.target(z_0, noise, level), prediction, rtol=1e-5, atol=1e-5)
