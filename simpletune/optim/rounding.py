"""Training bf16 weights so that they learn: fp32 arithmetic for one parameter at a time, and stochastic rounding.

bf16 has 8 bits of precision: an update under 1/256 of a weight is lost when rounded to nearest, every time, and
training stalls. Rounded up or down at random, in proportion to the distance, it is kept in the mean (arXiv:2010.06192).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def stochastic_round(x: Tensor) -> Tensor:
    """fp32 to bf16, up or down at random so that the mean is x; draws from the global generator of x's device.

    A random number below 2^16 is added to the bits that bf16 cuts off. Infinities stay what they are.
    """
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=x.device)
    rounded = (noise.add_(bits)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return rounded.to(torch.bfloat16)


class RoundedOptimizer(torch.optim.Optimizer):
    """Any optimizer over bf16 parameters: each steps as an fp32 copy, which is then rounded stochastically.

    The copy lives only while its parameter steps: beside the optimizer's state, the extra memory is that of the largest
    parameter in fp32, twice (weight and gradient). State is that of an fp32 parameter.

    Args:
        parameters: to be trained.
        make: builds the optimizer of one parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make: MakeOptimizer):
        parameters = list(parameters)
        self._shells = [nn.Parameter(torch.empty(0, device=p.device)) for p in parameters]
        self._inner = [make([shell]) for shell in self._shells]
        super().__init__(parameters, dict(self._inner[0].defaults))
        for parameter, shell, inner in zip(parameters, self._shells, self._inner, strict=True):
            self.state[parameter] = inner.state[shell]  # one dictionary, so that state is saved and loaded in place

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        group = self.param_groups[0]
        settings = {key: value for key, value in group.items() if key != "params"}
        for parameter, shell, inner in zip(group["params"], self._shells, self._inner, strict=True):
            if parameter.grad is None:
                continue
            shell.data, shell.grad = parameter.detach().float(), parameter.grad.float()
            inner.param_groups[0].update(settings)
            inner.step()
            parameter.copy_(stochastic_round(shell.data) if parameter.dtype == torch.bfloat16 else shell.data)
            shell.data, shell.grad = shell.data.new_empty(0), None
