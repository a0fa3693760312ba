"""AdamW over bf16 weights with a compensation buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from simpletune.engine.optim.bf16_updates import Factors, adamw_bf16
from simpletune.engine.optim.state import State


class CompensatedAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with bf16 state; one kernel steps a parameter on CUDA.

    State of each parameter: ``exp_avg``, ``exp_avg_sq``, and for bf16 weights ``compensation``, all bf16; ``step``.

    Draws random numbers from the group's ``generator``, or from the global one if it is None.

    Args:
        parameters: bf16 or fp32.
        lr: the learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator for numerical stability.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "generator": None}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group)

    def _step(self, parameter: Tensor, state: State, group: State) -> None:
        if not state:
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in self._buffers(parameter)}
            state["step"] = 0
        state["step"] += 1
        beta_1, beta_2 = group["betas"]
        correction_1, correction_2 = 1 - beta_1 ** state["step"], 1 - beta_2 ** state["step"]
        factors = Factors(
            1 - beta_1,
            beta_2,
            math.sqrt(correction_2),
            group["eps"],
            1 - group["lr"] * group["weight_decay"],
            group["lr"] / correction_1,
        )
        buffers = state["exp_avg"], state["exp_avg_sq"], state.get("compensation")
        assert parameter.grad is not None
        adamw_bf16(parameter, parameter.grad, buffers, group["generator"], factors)

    @staticmethod
    def _buffers(parameter: Tensor) -> list[str]:
        return ["exp_avg", "exp_avg_sq", *(["compensation"] if parameter.dtype == torch.bfloat16 else [])]
