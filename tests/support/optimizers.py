"""Optimizers by name, and steps of those that round."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import TypeAdapter
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.optim import Optimizer
from simpletune.engine.optim.options import OptimizerOption
from simpletune.engine.optim.rounding import RoundedOptimizer, key_draws
from simpletune.engine.optim.state import state_to_tensors
from simpletune.system.options import union_of

NAMES = list(union_of(TrainConfig.model_fields["optimizer"]).members)
STEPS, LR = 100, 2e-4
SHAPES = [(16, 96), (96, 16), (5,), (64, 128), (1,), (3, 7, 11), (40, 200)]


def option_of(name: str, **fields: object) -> OptimizerOption:
    return TypeAdapter(Optimizer).validate_python({"name": name, "lr": LR, **fields})


def start_of(count: int = len(SHAPES)) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(SHAPES[number % len(SHAPES)]).bfloat16() for number in range(count)]


def stepped(
    option: OptimizerOption, start: list[torch.Tensor], step: Callable[[RoundedOptimizer], None], steps: int = 5
) -> dict[str, torch.Tensor]:
    """Weights and state after some steps in which not every parameter has a gradient."""
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = option.build(parameters)
    assert isinstance(optimizer, RoundedOptimizer)
    for number in range(steps):
        key_draws(optimizer, 7, number)
        optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        for index, parameter in enumerate(parameters):
            parameter.grad = None if (index + number) % 4 == 3 else torch.sin(parameter.detach() * (number + 2))
        step(optimizer)
    tensors, scalars = state_to_tensors(optimizer)
    counters = {key: torch.tensor(float(value)) for key, value in scalars["values"].items()}
    return {**{f"weight {index}": p.detach() for index, p in enumerate(parameters)}, **tensors, **counters}


def alone(optimizer: RoundedOptimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            optimizer.update(parameter)
