"""The optimizer in the backward pass: the same numbers as after it, with the gradients of one layer at a time."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from optimizers import option_of
from safetensors.torch import load_file
from slow_cases import slow_but
from tiny_runs import saved_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.engine.optim.in_backward import FEW, step_in_backward
from simpletune.engine.optim.options import AdamW, AdamWBF16
from simpletune.engine.optim.rounding import key_draws
from simpletune.engine.optim.state import begin_step, state_to_tensors
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.runs import checkpoint
from simpletune.runs.checkpoint_folders import CHECKSUM, with_checksum
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.train_step import attach
from simpletune.system.options import ConfigError, UserError, union_of
from simpletune.training.accelerator import make_accelerator
from simpletune.training.train import train

MEMBERS = union_of(TrainConfig.model_fields["optimizer"]).members
OPTIMIZERS = [name for name, option in MEMBERS.items() if option.steps_in_backward]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def make(
    tiny_config: dict, in_backward: bool, name: str, method: str = "lora", dtype: str = "", **changes: dict
) -> dict:
    """A run whose gradients are clipped one by one, with the lever on or off; what trains is held in ``dtype``."""
    data = copy.deepcopy(tiny_config) | {"name": name}
    if dtype and method == "lora":
        data["adapter"] = {"method": "lora", "rank": 2, "dtype": dtype, "dropout": 0.1}
    elif dtype:
        data |= {"adapter": {"method": method}, "precision": {"weights": dtype}}
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values}
    data["train"] = {"clip": "per_parameter", **data["train"]}
    data["memory"] = {"checkpointing": "all", "optimizer_in_backward": in_backward}
    return data


@pytest.mark.parametrize("few", [0, 100, FEW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_the_backward_pass_are_those_after_it_bit_for_bit(
    name: str, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and state, of 8 bits where the layer is large; the rate changes with each step. Of parameters that wait
    for each other, none, the smaller ones, or all, in groups."""
    monkeypatch.setattr("simpletune.engine.optim.in_backward.FEW", few)
    monkeypatch.setattr("simpletune.engine.optim.in_backward.TOGETHER", 6200)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5)).to(dtype)
    x, results = torch.randn(4, 64).to(dtype), []
    for lever in (False, True):
        model = copy.deepcopy(layers)
        optimizer = option_of(name).build(model.parameters(), lever)
        if lever:
            step_in_backward(optimizer, None)
        for step in range(5):
            key_draws(optimizer, 7, step)
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            begin_step(optimizer)
            model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        tensors, others = state_to_tensors(optimizer)
        results.append((model.state_dict(), tensors, others["values"]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert all((results[0][0][key] != tensor).any() for key, tensor in layers.state_dict().items())


@pytest.mark.parametrize(
    ("method", "dtype", "optimizer"),
    slow_but(
        [("lora", "bf16", "adamw_bf16")],
        product(("full", "lora"), ("fp32", "bf16"), OPTIMIZERS),
    ),
)
def test_a_run_is_that_of_the_normal_optimizer_bit_for_bit(
    method: str, dtype: str, optimizer: str, tiny_config: dict
) -> None:
    changes = {"optimizer": {"name": optimizer, "lr": 1e-3}, "train": {"steps": 5, "clip_norm": None}}
    off, on = (
        train(validate(make(tiny_config, lever, f"lever-{lever}", method, dtype, **changes), "test"))
        for lever in (False, True)
    )
    assert losses(on) == losses(off)
    assert losses(on)[0] != losses(on)[-1]
    torch.testing.assert_close(saved_weights(on, 5), saved_weights(off, 5), rtol=0, atol=0)


def test_clipped_one_by_one_the_steps_are_the_same_too(tiny_config: dict) -> None:
    sgd_like = {"name": "adafactor", "clip_threshold": 1e9, "lr": 1e-3}
    runs = []
    for lever, norm in [(False, 0.001), (True, 0.001), (True, None)]:
        changes = {"optimizer": sgd_like, "train": {"steps": 4, "clip_norm": norm}}
        runs.append(train(validate(make(tiny_config, lever, f"{lever}-{norm}", "full", "fp32", **changes), "test")))
    off, on, free = runs
    assert losses(on) == losses(off) != losses(free)
    torch.testing.assert_close(saved_weights(on, 4), saved_weights(off, 4), rtol=0, atol=0)
    norms = [[row["grad_norm"] for row in read_metrics(run)] for run in (off, on)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5) and min(norms[1]) > 0


@pytest.mark.parametrize("optimizer", slow_but(["adamw8bit"], OPTIMIZERS))
def test_resumes_bit_for_bit_with_the_lever_on_or_off(optimizer: str, tiny_config: dict) -> None:
    changes = {"optimizer": {"name": optimizer, "lr": 1e-3}, "checkpoint": {"every": 2}}
    whole = train(validate(make(tiny_config, True, "whole", "full", "bf16", **changes), "test"))
    for name, second in (("on", True), ("off", False)):
        shutil.copytree(whole, whole.with_name(name))
        shutil.rmtree(checkpoint.checkpoint_folder(whole.with_name(name), 4))
        again = train(validate(make(tiny_config, second, name, "full", "bf16", **changes), "test"), resume="latest")
        torch.testing.assert_close(saved_weights(again, 4), saved_weights(whole, 4), rtol=0, atol=0)


def backward(tiny_config: dict, in_backward: bool, watch: Callable[[nn.Module, nn.Parameter], None]) -> nn.Module:
    """A pass of the tiny model in bf16, all of which trains; ``watch`` is called before each update in it."""
    config = resolve_folders(validate(make(tiny_config, in_backward, "loaded", "full", "bf16"), "test"))
    model = config.model.load_denoiser(config.precision, torch.device("cpu"))
    optimizer = attach(config, model, 1)
    if in_backward:
        update = optimizer.update
        optimizer.update = lambda parameter: (watch(model, parameter), update(parameter))
    z = torch.randn(1, model.config.in_channels, 4, 4, dtype=torch.bfloat16)
    text = torch.randn(1, 9, model.config.joint_attention_dim, dtype=torch.bfloat16)
    pooled = torch.randn(1, model.config.pooled_projection_dim, dtype=torch.bfloat16)
    model(z, text, pooled, torch.tensor([500.0]), return_dict=False)[0].float().pow(2).mean().backward()
    return model


def test_no_gradient_outlives_its_update(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lever, the gradients that exist when one is used are its own; without it they are all there at last."""
    monkeypatch.setattr("simpletune.engine.optim.in_backward.FEW", 0)
    alive: list[tuple[int, int]] = []

    def gradient_bytes(model: nn.Module) -> int:
        return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

    model = backward(tiny_config, True, lambda model, own: alive.append((gradient_bytes(model), own.nbytes)))
    assert all(there == own for there, own in alive)
    assert gradient_bytes(model) == 0
    normal = backward(tiny_config, False, lambda *_: None)
    used = sum(own for _, own in alive)
    assert gradient_bytes(normal) == used > 0.9 * sum(p.nbytes for p in normal.parameters())


class Operations(TorchDispatchMode):
    """Counts what runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_small_parameters_wait_for_each_other_and_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are clipped as if each stepped alone. Few of their gradients exist at once, and none after the pass."""
    found: list[list[torch.Tensor]] = []
    counts, alive = [], []
    for few, together in ((0, 1), (1000, 250), (1000, 10**6)):
        monkeypatch.setattr("simpletune.engine.optim.in_backward.FEW", few)
        monkeypatch.setattr("simpletune.engine.optim.in_backward.TOGETHER", together)
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(90).bfloat16()) for _ in range(12)]
        optimizer = AdamW(lr=0.1).build(parameters, in_backward=True)
        step_in_backward(optimizer, 0.5)
        update = optimizer.update_together
        optimizer.update_together = lambda given, update=update: (alive.append(len(given)), update(given))
        for step in range(2):
            key_draws(optimizer, 7, step)
            loss = sum((number * each).float().square().sum() for number, each in enumerate(parameters))
            with Operations() as operations:
                loss.backward()
            assert all(parameter.grad is None for parameter in parameters) and len(optimizer.norms) == 12
        counts.append(operations.count)
        found.append([*parameters, *(optimizer.norms[parameter] for parameter in parameters)])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
    assert alive == [3] * 8 + [12] * 2
    assert counts[2] < counts[1] < counts[0] and counts[0] - counts[2] > 12 * 10


def test_a_parameter_without_gradient_stays_and_has_no_state() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AdamW(lr=0.1, weight_decay=0.5).build([used, unused], in_backward=True)
    step_in_backward(optimizer, None)
    (2 * used).sum().backward()
    assert optimizer.state[used] and not optimizer.state[unused]
    assert torch.equal(unused, torch.ones(3)) and not torch.equal(used, torch.ones(3))


def test_a_weight_used_twice_is_updated_once_with_the_sum_of_its_gradients() -> None:
    torch.manual_seed(0)
    start, x = torch.randn(6, 6), torch.randn(3, 6)
    results, calls = [], []
    for in_backward in (False, True):
        weight = nn.Parameter(start.clone())
        optimizer = AdamW(lr=0.1).build([weight], in_backward=True)
        update = optimizer.update
        optimizer.update = lambda parameter, update=update: (calls.append(1), update(parameter))
        if in_backward:
            step_in_backward(optimizer, None)
        for _ in range(3):
            (torch.tanh(x @ weight) @ weight).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weight.detach())
    assert torch.equal(*results)
    assert len(calls) == 6


@pytest.mark.parametrize("option", [AdamW(lr=0.01), AdamWBF16(lr=0.01)], ids=lambda option: option.name)
def test_draws_depend_on_the_step_and_the_parameter_not_on_the_order(option: AdamW | AdamWBF16) -> None:
    torch.manual_seed(3)
    start = [torch.randn(64).bfloat16() for _ in range(3)]
    gradient = torch.randn(64).bfloat16()

    def stepped(order: Iterator[int], step: int) -> list[torch.Tensor]:
        parameters = [nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = option.build(parameters, in_backward=True)
        key_draws(optimizer, 7, step)
        for number in order:
            parameters[number].grad = gradient.clone()
            optimizer.update(parameters[number])
        means = [optimizer.state[parameter]["exp_avg"].float() for parameter in parameters]
        return [torch.cat([p.detach().float(), m]) for p, m in zip(parameters, means, strict=True)]

    forward, reverse, later = stepped(range(3), 0), stepped(reversed(range(3)), 0), stepped(range(3), 1)
    assert all(torch.equal(a, b) for a, b in zip(forward, reverse, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(forward, later, strict=True))


def test_what_needs_all_gradients_is_refused_with_the_alternative(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(tiny_config, True, "refused")
    config = validate(data, "test")
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.Accelerator.num_processes", 2)
        with pytest.raises(UserError, match="memory.optimizer_in_backward: 2 processes"):
            make_accelerator(config)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="backward: .*adamw needs all gradients at o"):
        patch.setattr(AdamW, "steps_in_backward", False)
        validate(data, "test")
    tiny_config["memory"]["optimizer_in_backward"] = True
    tiny_config["train"]["gradient_accumulation"] = 2
    with pytest.raises(ConfigError) as refused:
        validate(tiny_config, "test")
    said = str(refused.value)
    assert "train.clip: global clipping needs all gradients" in said
    assert "Use train.clip per_parameter, or train.clip_norm null" in said
    assert "train.gradient_accumulation: 2 passes" in said
    assert "2 problems" in said


@pytest.mark.parametrize(
    ("dtype", "optimizer", "per_parameter"),
    [("fp32", "adamw", 16), ("fp32", "adamw8bit", 10.03), ("bf16", "adamw", 12), ("bf16", "adamw8bit", 6.03)],
)
def test_bytes_of_a_lora_are_those_of_the_arithmetic(
    dtype: str, optimizer: str, per_parameter: float, tiny_config: dict
) -> None:
    """Weight, gradient and optimizer state of a LoRA; the table in the documentation is this arithmetic."""
    data = make(tiny_config, False, "bytes", "lora", dtype, optimizer={"name": optimizer})
    data["adapter"]["rank"] = 64  # matrices of 4096 elements: what is smaller keeps fp32 state
    config = resolve_folders(validate(data, "test"))
    model = config.model.load_denoiser(config.precision, torch.device("cpu"))
    optimizer_ = attach(config, model, 1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(p.numel() for p in trained) == config.adapter.trainable(config.model.architecture.shapes())
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer_.step()
    state = [v for p in trained for k, v in optimizer_.state[p].items() if torch.is_tensor(v) and "qmap" not in k]
    taken = sum(t.nbytes for t in [*trained, *(p.grad for p in trained), *state])
    assert taken / sum(p.numel() for p in trained) == pytest.approx(per_parameter, rel=1e-3)
    held = {"fp32": 4, "bf16": 2}[dtype]
    assert per_parameter == pytest.approx(2 * held + config.optimizer.bytes_per_parameter)
    if per_parameter == 16:
        shapes = parameter_shapes(SD3().files.known_config())
        for rank, mib in ((16, 143), (64, 573)):  # [derived] in the memory notes
            count = config.adapter.model_copy(update={"rank": rank}).trainable(shapes)
            assert count * 16 / 2**20 == pytest.approx(mib, abs=0.6)


def test_a_lora_in_bf16_is_exported_in_bf16_and_loads(tiny_config: dict) -> None:
    from simpletune.adapters.files.attach import load_loras

    data = make(tiny_config, False, "exported", "lora", "bf16")
    data["adapter"] |= {"alpha": 4, "dropout": 0.0}  # a scale of 2, which is folded in without rounding
    run = train(validate(data, "test"))
    trained = saved_weights(run, 4)
    assert {tensor.dtype for tensor in trained.values()} == {torch.bfloat16}
    exported = load_file(run / "pytorch_lora_weights.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    config = resolve_folders(validate(data, "test"))
    model = config.model.load_denoiser(config.precision, torch.device("cpu"))
    load_loras(model, [(run / "pytorch_lora_weights.safetensors", 1.0)])
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            scale = 2 if ".lora_B." in name else 1
            torch.testing.assert_close(parameter, scale * trained[name].float(), rtol=0, atol=0)
    assert math.isfinite(json.loads((run / "summary.json").read_text())["final_loss"])


def test_a_checkpoint_from_before_a_field_was_there_resumes(tiny_config: dict) -> None:
    tiny_config["train"]["steps"] = 2
    run = train(validate(tiny_config, "test"))
    state = checkpoint.checkpoint_folder(run, 2) / checkpoint.STATE
    saved = json.loads(state.read_text())
    assert saved["config"]["adapter"].pop("dtype") == "fp32"
    del saved[CHECKSUM]
    state.write_text(with_checksum(saved))
    tiny_config["train"]["steps"] = 3
    train(validate(tiny_config, "test"), resume="latest")
    tiny_config["adapter"]["dtype"] = "bf16"
    with pytest.raises(UserError, match='adapter.dtype: "fp32" -> "bf16"'):
        train(validate(tiny_config, "test"), resume=str(checkpoint.checkpoint_folder(run, 2)))
