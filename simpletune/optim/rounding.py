"""Training bf16 weights so that they learn: fp32 arithmetic for a few parameters at a time, and stochastic rounding.

bf16 has 8 bits of precision: an update under 1/256 of a weight is lost when rounded to nearest, every time, and
training stalls. Rounded up or down at random, in proportion to the distance, it is kept in the mean (arXiv:2010.06192).

Each parameter's draws have a key of their own, (seed, step, number of the parameter): they are the same in whatever
order parameters are updated, alone or in a group, with the backward pass or after it, and in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn

from simpletune.system.rng import key_of

GROUP = 1 << 22
"""Elements that step together at most: 36 MiB of temporaries, less than one large matrix of SD3 takes by itself."""
SMALL = GROUP // 4
"""Elements up to which a parameter joins a group: larger ones keep a GPU busy by themselves."""
ALIGNED = 128
"""Elements: in a group each parameter begins where CUDA's allocator would let it, at 512 bytes, as kernels like it."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def key_draws(optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
    """Tell an optimizer the key of the coming step's draws; without one they come from the global generators."""
    for group in optimizer.param_groups:
        group["draws"] = (seed, step)


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 to bf16, up or down at random so that the mean is x.

    A random number below 2^16 is added to the bits that bf16 cuts off. Infinities and NaN stay what they are: the bits
    of CUDA's NaN, 0x7fffffff, would carry over into the sign and become -0.0.

    Args:
        x: of any shape.
        generator: on x's device; None: the global one.
    """
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=x.device, generator=generator)
    return _cut(noise.add_(bits), x.isnan()).to(torch.bfloat16)


def _cut(bits: Tensor, nan: Tensor) -> Tensor:
    """Clear what bf16 does not hold, in place; NaN where there was NaN.

    Args:
        bits: of fp32 numbers, as int32, with noise added.
        nan: where there was NaN before the noise.

    Returns:
        The same memory as fp32.
    """
    return bits.bitwise_and_(-(1 << 16)).view(torch.float32).masked_fill_(nan, torch.nan)


def padded(tensor: Tensor) -> int:
    """Elements that a tensor takes in a group's buffer."""
    return -(-tensor.numel() // ALIGNED) * ALIGNED


def buffer_of(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Memory in fp32 for several tensors together, not set to anything.

    Args:
        tensors: contiguous, on one device.

    Returns:
        The buffer [elements, with padding], and views into it with the tensors' shapes.
    """
    ends = list(accumulate(map(padded, tensors), initial=0))
    flat = torch.empty(ends[-1], dtype=torch.float32, device=tensors[0].device)
    return flat, [flat.as_strided(t.shape, t.stride(), begin) for t, begin in zip(tensors, ends, strict=False)]


class RoundedOptimizer(torch.optim.Optimizer):
    """Any optimizer; bf16 parameters step as an fp32 copy, which is then rounded stochastically.

    Small ones are copied into one buffer and step together, so that their copies, their update where the optimizer has
    one for many tensors, and their rounding are a few launches a group; but for the draws, one launch each because each
    has its own key. Every number is that of a parameter that steps alone. Optimizers that draw for themselves
    (adamw_bf16) step one parameter at a time; those that go through parameters one by one (Adafactor, the 8-bit ones)
    gain what is around their update.

    A copy lives only while its parameter steps: beside the optimizer's state, the extra memory is at most that of the
    largest parameter in fp32, three times and a half (weight, gradient, noise, result), or of a group, twice. State is
    that of an fp32 parameter.

    Args:
        parameters: to be trained.
        make: builds the optimizer of some parameters, which must not depend on each other.
        rounded: whether bf16 parameters step as said; if not, every parameter steps in its own type.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make: MakeOptimizer, rounded: bool = True):
        parameters = list(parameters)
        self._wide = [torch.float32 if rounded else parameter.dtype for parameter in parameters]
        self._shells = [
            nn.Parameter(torch.empty(0, dtype=wide, device=parameter.device))
            for parameter, wide in zip(parameters, self._wide, strict=True)
        ]
        homes: dict[torch.device, list[nn.Parameter]] = {}
        for shell in self._shells:
            homes.setdefault(shell.device, []).append(shell)
        made = {device: make(shells) for device, shells in homes.items()}
        self._inner = [made[shell.device] for shell in self._shells]
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._generators: dict[torch.device, torch.Generator] = {}
        self.norms: dict[nn.Parameter, Tensor] = {}  # of gradients that are freed in the backward pass
        super().__init__(parameters, dict(self._inner[0].defaults) | {"draws": None})
        for parameter, shell, inner in zip(parameters, self._shells, self._inner, strict=True):
            self.state[parameter] = inner.state[shell]  # one dictionary, so that state is saved and loaded in place

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self._groups():
            if len(group) == 1:
                self.update(group[0])
            else:
                self._update_together(group)

    @torch.no_grad()
    def update(self, parameter: nn.Parameter) -> None:
        """Update one parameter from its gradient, which is left; independent of the order of updates."""
        assert parameter.grad is not None
        number = self._numbers[parameter]
        shell, wide = self._shells[number], self._wide[number]
        shell.data, shell.grad = parameter.detach().to(wide), parameter.grad.to(wide)
        generator = self._generator(number, parameter.device)
        self._step_inner([number], generator)
        if wide != parameter.dtype:
            bf16 = parameter.dtype == torch.bfloat16
            parameter.copy_(stochastic_round(shell.data, generator) if bf16 else shell.data)
        shell.data, shell.grad = shell.data.new_empty(0), None

    def _groups(self) -> Iterator[list[nn.Parameter]]:
        """The parameters that have a gradient, in groups that step together; the rest are alone."""
        open_groups: dict[tuple[torch.device, torch.device], list[nn.Parameter]] = {}
        room: dict[tuple[torch.device, torch.device], int] = {}
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            if not self._joins(parameter):
                yield [parameter]
                continue
            home = self._shells[self._numbers[parameter]].device, parameter.device
            taken = padded(parameter)
            if taken > room.get(home, 0):
                if home in open_groups:
                    yield open_groups[home]
                open_groups[home], room[home] = [], GROUP
            open_groups[home].append(parameter)
            room[home] -= taken
        yield from open_groups.values()

    def _joins(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter may step in a group."""
        number = self._numbers[parameter]
        rounded = parameter.dtype == torch.bfloat16 and self._wide[number] == torch.float32
        return rounded and parameter.numel() <= SMALL and parameter.is_contiguous() and not self._draws_itself(number)

    @torch.no_grad()
    def _update_together(self, parameters: list[nn.Parameter]) -> None:
        """Update several bf16 parameters of one device from their gradients, which are left."""
        numbers = [self._numbers[parameter] for parameter in parameters]
        shells = [self._shells[number] for number in numbers]
        own: list[Tensor] = list(parameters)
        flat, weights = buffer_of(own)
        rest, gradients = buffer_of(own)
        torch._foreach_copy_(weights, own)
        torch._foreach_copy_(gradients, [gradient for tensor in own if (gradient := tensor.grad) is not None])
        for shell, weight, gradient in zip(shells, weights, gradients, strict=True):
            shell.data, shell.grad = weight, gradient
        self._step_inner(numbers, None)
        nothing = flat.new_empty(0)
        for shell in shells:
            shell.data, shell.grad = nothing, None
        for number, gradient in zip(numbers, gradients, strict=True):  # done with: the memory is the noise's
            noise = gradient.view(torch.int32)
            noise.random_(0, 1 << 16, generator=self._generator(number, flat.device))
        nan = flat.isnan()
        _cut(flat.view(torch.int32).add_(rest.view(torch.int32)), nan)  # as in stochastic_round
        torch._foreach_copy_(own, weights)

    def _step_inner(self, numbers: list[int], generator: torch.Generator | None) -> None:
        """Let the optimizer update some shells, which are on one device."""
        inner, shells = self._inner[numbers[0]], [self._shells[number] for number in numbers]
        settings = {key: value for key, value in self.param_groups[0].items() if key in inner.defaults}
        settings |= {"generator": generator} if "generator" in settings else {}
        inner.param_groups[0].update(settings | {"params": shells})
        for shell in shells if inner.defaults.get("fused") else ():
            counter = inner.state[shell].get("step")
            if counter is not None:  # of a checkpoint, beside a weight in host memory
                inner.state[shell]["step"] = counter.to(shell.device)
        inner.step()

    def _draws_itself(self, number: int) -> bool:
        """Whether a parameter's optimizer draws."""
        return "generator" in self._inner[number].defaults

    def _generator(self, number: int, device: torch.device) -> torch.Generator | None:
        """The source of a parameter's draws in this step."""
        draws = self.param_groups[0]["draws"]
        if draws is None:
            return None
        seed, step = draws
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed(key_of(seed, "rounding", step, number) % 2**63)
