"""The steps of schedule-free AdamW, and its average in place of the weights that train.

y are the weights that train and get gradients, z the weights of plain AdamW, x the average:
y = (1 - beta_1) z + beta_1 x (arXiv:2405.15682, eq. 3 to 5). Parameters are y, state is z, and x follows from both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simpletune.engine.optim.loss_scale import portions
from simpletune.engine.optim.state import State


class ScheduleFreeSteps(torch.optim.Optimizer):
    """Schedule-free AdamW with the weight decay at y.

    State of each parameter: ``z`` and ``exp_avg_sq`` in its type; on the host ``step``, ``lr_max`` and ``weight_sum``,
    which still count a step that is undone on the device. Settings: ``lr``, ``betas``, ``eps``, ``weight_decay``,
    ``r`` and ``weight_lr_power``.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for portion in portions(group["params"]):
                alike: dict[tuple[float, ...], list[nn.Parameter]] = {}
                for parameter in portion:
                    alike.setdefault(self._count(parameter, group), []).append(parameter)
                for (step, _, share), members in alike.items():
                    self._update(members, group, step, share)

    def _count(self, parameter: nn.Parameter, group: State) -> tuple[float, ...]:
        """Count a step of a parameter: its number, its weight in the sum of weights, and its share in the average."""
        state = self.state[parameter]
        if not state:
            state |= {"z": parameter.detach().clone(), "exp_avg_sq": torch.zeros_like(parameter)}
            state |= {"step": 0, "lr_max": 0.0, "weight_sum": 0.0}
        state["step"] += 1
        state["lr_max"] = max(state["lr_max"], group["lr"])
        weight = state["step"] ** group["r"] * state["lr_max"] ** group["weight_lr_power"]
        state["weight_sum"] += weight
        return state["step"], weight, weight / state["weight_sum"]

    def _update(self, parameters: Sequence[nn.Parameter], group: State, step: float, share: float) -> None:
        """Update parameters with equal counters."""
        y: list[Tensor] = list(parameters)
        z, square = ([self.state[parameter][name] for parameter in parameters] for name in ("z", "exp_avg_sq"))
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        beta_1, beta_2 = group["betas"]
        torch._foreach_mul_(square, beta_2)
        torch._foreach_addcmul_(square, gradients, gradients, value=1 - beta_2)
        roots = torch._foreach_div(square, 1 - beta_2**step)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        change = torch._foreach_div(gradients, roots)
        del roots
        if group["weight_decay"]:
            torch._foreach_add_(change, y, alpha=group["weight_decay"])
        torch._foreach_lerp_(y, z, share)
        torch._foreach_add_(y, change, alpha=group["lr"] * (beta_1 * (1 - share) - 1))
        torch._foreach_sub_(z, change, alpha=group["lr"])


class ScheduleFreeAverage:
    """The average x, an ``Average`` derived from the state of the optimizer (or of one that rounds its weights)."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], beta: float):
        self._optimizer = optimizer
        self._parameters = dict(parameters)
        self._beta = beta

    def update(self, undone: Tensor | None = None) -> None:
        """Do nothing: the optimizer's step has updated the average."""

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Do nothing: the optimizer's state and the weights contain the average."""

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        # the weights wait in host memory
        kept = [parameter.detach().cpu().clone() for parameter in self._parameters.values()]
        try:
            with torch.no_grad():
                for parameter in self._parameters.values():
                    parameter.copy_(self._average_of(parameter))
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self._parameters.values(), kept, strict=True):
                    parameter.copy_(before)

    def tensors(self) -> dict[str, Tensor]:
        """Compute the averages in fp32 by name, in host memory."""
        return {name: self._average_of(parameter).cpu() for name, parameter in self._parameters.items()}

    def _average_of(self, parameter: nn.Parameter) -> Tensor:
        """Compute x = y + (1 / beta_1 - 1) (y - z), in fp32; before the first step the weights themselves."""
        y = parameter.detach().float()
        state = self._optimizer.state.get(parameter)
        if not state:
            return y
        z = state["z"].to(y.device, torch.float32)
        return y.lerp(z, 1 - 1 / self._beta)
