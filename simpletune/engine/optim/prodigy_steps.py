"""The steps of Prodigy, whose estimate stays on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from simpletune.engine.optim.loss_scale import portions
from simpletune.engine.optim.state import State


class ProdigySteps(torch.optim.Optimizer):
    """Prodigy over Adam (arXiv:2306.06101, algorithm 4) with decoupled weight decay.

    All updates of a step use the estimate d that ``begin_step`` computes from the state left by earlier steps. So
    parameters may be updated in any portions, an update that is undone leaves no trace in d, and a checkpoint needs
    only the parameters' state.

    State of each parameter: ``exp_avg``, ``exp_avg_sq``, ``s`` and ``p0`` in the parameter's type; ``step``; and on the
    device, as fp32 scalars, its contributions ``d_numerator`` and ``d_denominator`` to the estimate. The first
    parameter also stores the estimate itself, ``d``.

    Args:
        parameters: the parameters to train, on one device.
        settings: ``lr``, ``eps``, ``weight_decay``, ``d0``, ``d_coef``, three ``betas``, and whether the estimate
            ``safeguards`` against warm-up and the step ``corrects`` the bias of the running means.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: State):
        self._parameters = list(parameters)  # in an order that neither grouping nor resuming changes
        super().__init__(self._parameters, settings)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Compute d = max(d, d_coef x sum of numerators / sum of denominators), on the device."""
        states = [state for parameter in self._parameters if "s" in (state := self.state[parameter])]
        if not states:
            return
        numerator, denominator = (
            torch.stack([state[name] for state in states]).sum() for name in ("d_numerator", "d_denominator")
        )
        guess = self.defaults["d_coef"] * numerator / denominator
        home = self.state[self._parameters[0]]
        home["d"] = torch.maximum(self._d(), guess.nan_to_num(nan=0.0))  # 0 / 0 if all gradients were 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for portion in portions(group["params"]):
                by_step: dict[int, list[nn.Parameter]] = {}
                for parameter in portion:
                    state = self.state[parameter]
                    if "s" not in state:  # its first update
                        zero = torch.zeros((), dtype=torch.float32, device=parameter.device)
                        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq", "s")}
                        state |= {"p0": parameter.detach().clone(), "step": 0}
                        state |= {"d_numerator": zero, "d_denominator": zero.clone()}
                    by_step.setdefault(state["step"], []).append(parameter)
                for number, members in by_step.items():
                    self._update(members, group, number)

    def _d(self) -> Tensor:
        """Return the estimate; at first d0."""
        first = self._parameters[0]
        state = self.state[first]
        if "d" not in state:
            state["d"] = torch.full((), self.defaults["d0"], dtype=torch.float32, device=first.device)
        return state["d"]

    def _update(self, parameters: Sequence[nn.Parameter], group: State, number: int) -> None:
        """Update parameters that all have taken ``number`` steps."""
        states = [self.state[parameter] for parameter in parameters]
        beta_1, beta_2, beta_3 = group["betas"]
        d = self._d()
        corrected = (1 - beta_2 ** (number + 1)) ** 0.5 / (1 - beta_1 ** (number + 1)) if group["corrects"] else 1.0
        d_lr = d * (group["lr"] * corrected)
        own: list[Tensor] = list(parameters)
        mean, square, sums = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "s"))
        gradients = [gradient for parameter in own if (gradient := parameter.grad) is not None]
        scaled = torch._foreach_mul(gradients, d)
        torch._foreach_lerp_(mean, scaled, 1 - beta_1)
        torch._foreach_mul_(square, beta_2)
        torch._foreach_addcmul_(square, scaled, scaled, value=1 - beta_2)
        torch._foreach_mul_(sums, beta_3)  # relative to d0, as in the authors' code, so that it does not underflow
        relative = d_lr / group["d0"]
        torch._foreach_mul_(scaled, d / group["d0"] if group["safeguards"] else relative)
        torch._foreach_add_(sums, scaled)
        del scaled
        sizes = torch._foreach_norm(sums, 1, dtype=torch.float32)
        for parameter, gradient, state, size in zip(own, gradients, states, sizes, strict=True):
            moved = torch.dot((state["p0"] - parameter).flatten().float(), gradient.flatten().float())
            numerator = d / group["d0"] * d_lr * moved
            state["d_numerator"].mul_(beta_3).add_(numerator)
            state["d_denominator"].copy_(size)
            state["step"] = number + 1
        if group["weight_decay"]:  # at a small d, fp32 rounds 1 - weight_decay d_lr by percents of the decay
            torch._foreach_add_(own, torch._foreach_mul(own, -group["weight_decay"] * d_lr))
        roots = torch._foreach_sqrt(square)
        torch._foreach_mul_(roots, 1 / d)  # d m / (sqrt(v) + d eps) = m / (sqrt(v) / d + eps)
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(mean, roots)
        torch._foreach_add_(own, steps, alpha=-group["lr"] * corrected)
