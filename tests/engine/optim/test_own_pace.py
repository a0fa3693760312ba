"""Optimizers with a pace of their own, Prodigy and schedule-free AdamW, against their authors' packages; in runs."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import prodigyopt
import pytest
import schedulefree
import torch
from safetensors.torch import load_file
from slow_cases import slow_but
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.config.load import validate
from simpletune.engine.optim.options import OptimizerOption, Prodigy, ScheduleFreeAdamW
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.optim.state import begin_step
from simpletune.runs import checkpoint
from simpletune.system.options import ConfigError
from simpletune.training.train import train

SHAPES = ((8, 5), (7,), (3, 3))


def descend(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 60) -> torch.optim.Optimizer:
    """Steps towards a target with noisy gradients; the second parameter starts at 0."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape) * (len(shape) > 1)) for shape in SHAPES]
    targets = [torch.randn(shape) * 3 for shape in SHAPES]
    optimizer = make(parameters)
    for step in range(steps):
        torch.manual_seed(step + 1)
        begin_step(optimizer)
        for parameter, target in zip(parameters, targets, strict=True):
            parameter.grad = parameter.detach() - target + 0.3 * torch.randn(parameter.shape)
        optimizer.step()
    return optimizer


def weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"use_bias_correction": True}, {"safeguard_warmup": True, "d_coef": 2.0, "beta3": 0.9}],
)
def test_prodigy_is_that_of_its_authors(options: dict) -> None:
    """Theirs adds the new d times eps to the root where the paper's algorithm 4 has the old one: eps is 0 here. d0 lets
    the weights move by more than fp32 rounds away."""
    options |= {"d0": 1e-3, "eps": 1e-30}
    ours = descend(lambda parameters: Prodigy(**options).build(parameters))
    theirs = descend(lambda parameters: prodigyopt.Prodigy(parameters, **options))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-5)
    ours.begin_step()
    d = ours.state[ours.param_groups[0]["params"][0]]["d"].item()
    assert d == pytest.approx(float(theirs.param_groups[0]["d"]), rel=1e-4) and d > 2e-3


def test_prodigy_s_first_decay_is_not_rounded() -> None:
    """1 - 0.5 d is 8.4 of fp32's steps below 1. The roundings of single weights cancel on average."""
    torch.manual_seed(0)
    start, gradient = torch.randn(2, 1 << 18)
    weight = nn.Parameter(start.clone())
    weight.grad = gradient
    Prodigy(weight_decay=0.5, eps=1e-30).build([weight]).step()
    p, d = start.double(), 1e-6
    moved = weight.detach().double() - p + d * 0.1 / 0.001**0.5 * gradient.double().sign()  # without Adam's step
    assert float(moved @ p / (p @ p)) == pytest.approx(-0.5 * d, rel=0.01)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "r": 1.0}, {"betas": (0.95, 0.99), "lr": 0.2}])
def test_schedule_free_is_that_of_its_authors(options: dict) -> None:
    option = ScheduleFreeAdamW(**{"lr": 0.05, **options})

    def authors(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = schedulefree.AdamWScheduleFree(parameters, **{"lr": 0.05, **options})
        made.train()
        return made

    ours, theirs = descend(option.build), descend(authors)
    trained = weights(ours)
    torch.testing.assert_close(trained, weights(theirs), rtol=1e-5, atol=1e-6)
    theirs.eval()
    named = {str(number): parameter for number, parameter in enumerate(ours.param_groups[0]["params"])}
    average = option.average(ours, named)
    with average.swap_in():
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)
        assert all((x != y).any() for x, y in zip(weights(ours), trained, strict=True))
    torch.testing.assert_close(weights(ours), trained, rtol=0, atol=0)
    torch.testing.assert_close([*average.tensors().values()], weights(theirs), rtol=1e-5, atol=1e-6)
    before = option.average(option.build([weight := nn.Parameter(torch.randn(4))]), {"w": weight})
    torch.testing.assert_close(before.tensors()["w"], weight.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("option", [Prodigy(d0=1e-3), ScheduleFreeAdamW(lr=1e-2)], ids=lambda option: option.name)
def test_bf16_weights_move_as_those_of_fp32_do(option: OptimizerOption) -> None:
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(64, 128, dtype=dtype))
        optimizer = option.build([weight])
        assert isinstance(optimizer, RoundedOptimizer) == (dtype == torch.bfloat16)
        for _ in range(40):
            begin_step(optimizer)
            weight.grad = weight.detach() - 3
            optimizer.step()
        moved.append(weight.float().mean().item() - 1)
    print(moved)
    assert moved[1] == pytest.approx(moved[0], rel=0.02) and moved[0] > 0.05


class HostReads(TorchDispatchMode):
    """Fails on every operation that reads a tensor's value on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read on the host"
        assert func is not torch.ops.aten.nonzero.default, "a size was read on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", [Prodigy(), ScheduleFreeAdamW()], ids=lambda option: option.name)
def test_no_step_reads_from_the_device(option: OptimizerOption, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = option.build(parameters)
    with HostReads():
        for _ in range(3):
            begin_step(optimizer)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    with pytest.raises(AssertionError, match="read on the host"), HostReads():
        parameters[0].sum().item()


def files(run: Path, step: int) -> dict[str, dict[str, Tensor]]:
    folder = checkpoint.checkpoint_folder(run, step)
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


OPTIMIZERS = {"prodigy": {"name": "prodigy", "d0": 1e-3}, "free": {"name": "adamw_schedule_free", "lr": 0.01}}
PRECISIONS = {"fp32": {"weights": "fp32"}, "fp16": {"weights": "int8", "compute": "fp16"}}


@pytest.mark.parametrize(
    ("optimizer", "compute"), slow_but([("prodigy", "fp16"), ("free", "fp32")], product(OPTIMIZERS, PRECISIONS))
)
def test_resumes_bit_for_bit(optimizer: str, compute: str, tiny_config: dict) -> None:
    """Weights, state and schedule-free's average, which is exported; bf16 updates are rounded stochastically."""
    free, precision = optimizer == "free", PRECISIONS[compute]
    data = copy.deepcopy(tiny_config) | {"optimizer": OPTIMIZERS[optimizer], "precision": precision}
    data["adapter"] |= {"rank": 4, "dtype": "bf16" if precision["weights"] == "int8" else "fp32"}
    data["checkpoint"] = {"every": 2}
    whole = train(validate(data, "test"))
    halves = shutil.copytree(whole, whole.with_name("halves"))
    shutil.rmtree(checkpoint.checkpoint_folder(halves, 4))
    train(validate(data | {"name": "halves"}, "test"), "latest")
    ours, theirs = files(halves, 4), files(whole, 4)
    assert ours.keys() == theirs.keys() and ("ema.safetensors" in ours) == free
    for file, tensors in theirs.items():
        torch.testing.assert_close(ours[file], tensors, rtol=0, atol=0)
    if free and precision["weights"] == "fp32":
        average, result = theirs["ema.safetensors"], load_file(whole / "pytorch_lora_weights.safetensors")
        for name, tensor in average.items():
            torch.testing.assert_close(result[f"transformer.{name.replace('.default.', '.')}"], tensor, rtol=0, atol=0)
        assert any((tensor != theirs["trainable.safetensors"][name]).any() for name, tensor in average.items())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schedule": {"name": "cosine"}}, "schedule.name: cosine lowers .* adamw_schedule_free .* Use constant"),
        ({"ema": {"decay": 0.9}}, "ema: optimizer.name adamw_schedule_free averages .* Use ema null"),
        ({"optimizer": {"name": "prodigy", "lr": 1e-4}}, "optimizer.lr: 0.0001 would scale down .* Use 1"),
        (
            {
                "optimizer": {"name": "prodigy"},
                "memory": {"optimizer_in_backward": True},
                "train": {"steps": 4, "clip_norm": None},
            },
            "memory.optimizer_in_backward: optimizer.name prodigy needs all gradients at once",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict, problem: str, tiny_config: dict) -> None:
    data = copy.deepcopy(tiny_config) | {"optimizer": {"name": "adamw_schedule_free"}} | changes
    with pytest.raises(ConfigError, match=problem):
        validate(data, "test")
