"""The optimizer of a simulated run: states as after a first update, and CUDA's default implementations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.snapshot import HOST
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.stages.step.train_step import TrainStep


def make_states(accounting: Accounting, core: TrainStep) -> None:
    """Create the optimizer states as a first update would, so that one simulated step includes them; offloaded weights'
    states go to host memory."""
    with accounting.allocating("optimizer"):
        for parameter in core.parameters:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(core.optimizer, RoundedOptimizer) and core.optimizer.independent:
            for parameter in core.parameters:  # leaves states like a step's, and simulates equal ones once
                core.optimizer.update(parameter)
        else:
            core.optimizer.step()
        core.optimizer.zero_grad(set_to_none=True)
        if isinstance(core.optimizer, RoundedOptimizer) and core.optimizer.offloading is not None:
            for parameter in core.parameters:
                core.optimizer.offloading.keep_state(parameter, core.optimizer.state[parameter])
    accounting.register(host_counters(core.optimizer), HOST)


def take_cuda_paths(optimizer: torch.optim.Optimizer) -> None:
    """Switch torch's unfused optimizers to ``foreach``, their default on CUDA.

    It needs temporaries as large as all parameters together.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def host_counters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield step counters that are tensors: torch keeps them in host memory unless the update is fused."""
    if any(group.get("fused") for group in optimizer.param_groups):
        return iter(())
    counters = (state.get("step") for state in optimizer.state.values())
    return (counter for counter in counters if isinstance(counter, Tensor))


def states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in values if isinstance(value, Tensor))
