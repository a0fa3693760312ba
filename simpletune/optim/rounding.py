"""Training bf16 weights so that they learn: fp32 arithmetic for one parameter at a time, and stochastic rounding.

bf16 has 8 bits of precision: an update under 1/256 of a weight is lost when rounded to nearest, every time, and
training stalls. Rounded up or down at random, in proportion to the distance, it is kept in the mean (arXiv:2010.06192).

Each parameter's draws have a key of their own, (seed, step, number of the parameter): they are the same in whatever
order parameters are updated, with the backward pass or after it, and in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from simpletune.streams import key_of

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def key_draws(optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
    """Tell an optimizer the key of the coming step's draws; without one they come from the global generators."""
    for group in optimizer.param_groups:
        group["draws"] = (seed, step)


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 to bf16, up or down at random so that the mean is x.

    A random number below 2^16 is added to the bits that bf16 cuts off. Infinities stay what they are.

    Args:
        x: of any shape.
        generator: on x's device; None: the global one.
    """
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = (noise.add_(bits)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return rounded.to(torch.bfloat16)


class RoundedOptimizer(torch.optim.Optimizer):
    """Any optimizer, one parameter at a time; bf16 ones step as an fp32 copy, which is then rounded stochastically.

    The copy lives only while its parameter steps: beside the optimizer's state, the extra memory is that of the largest
    parameter in fp32, twice (weight and gradient). State is that of an fp32 parameter.

    Args:
        parameters: to be trained.
        make: builds the optimizer of one parameter.
        rounded: whether bf16 parameters step as said; if not, every parameter steps in its own type.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make: MakeOptimizer, rounded: bool = True):
        parameters = list(parameters)
        self._wide = [torch.float32 if rounded else parameter.dtype for parameter in parameters]
        self._shells = [
            nn.Parameter(torch.empty(0, dtype=wide, device=parameter.device))
            for parameter, wide in zip(parameters, self._wide, strict=True)
        ]
        self._inner = [make([shell]) for shell in self._shells]
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._generators: dict[torch.device, torch.Generator] = {}
        self.norms: dict[nn.Parameter, Tensor] = {}  # of gradients that are freed in the backward pass
        super().__init__(parameters, dict(self._inner[0].defaults) | {"draws": None})
        for parameter, shell, inner in zip(parameters, self._shells, self._inner, strict=True):
            self.state[parameter] = inner.state[shell]  # one dictionary, so that state is saved and loaded in place

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.update(parameter)

    @torch.no_grad()
    def update(self, parameter: nn.Parameter) -> None:
        """Update one parameter from its gradient, which is left; independent of the order of updates."""
        assert parameter.grad is not None
        number = self._numbers[parameter]
        shell, inner, wide = self._shells[number], self._inner[number], self._wide[number]
        shell.data, shell.grad = parameter.detach().to(wide), parameter.grad.to(wide)
        generator = self._generator(number, parameter.device)
        settings = {key: value for key, value in self.param_groups[0].items() if key in inner.defaults}
        inner.param_groups[0].update(settings | ({"generator": generator} if "generator" in settings else {}))
        counter = inner.state[shell].get("step")
        if inner.defaults.get("fused") and counter is not None:  # of a checkpoint, beside a weight in host memory
            inner.state[shell]["step"] = counter.to(parameter.device)
        inner.step()
        if wide != parameter.dtype:
            bf16 = parameter.dtype == torch.bfloat16
            parameter.copy_(stochastic_round(shell.data, generator) if bf16 else shell.data)
        shell.data, shell.grad = shell.data.new_empty(0), None

    def _generator(self, number: int, device: torch.device) -> torch.Generator | None:
        """The source of a parameter's draws in this step."""
        draws = self.param_groups[0]["draws"]
        if draws is None:
            return None
        seed, step = draws
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed(key_of(seed, "rounding", step, number) % 2**63)
