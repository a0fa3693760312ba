"""Train bf16 weights with fp32 arithmetic for a few parameters at a time and stochastic rounding.

bf16 has 8 bits of precision: rounding to nearest always loses an update below 1/256 of a weight, and training stalls.
Rounding up or down at random, in proportion to the distance, preserves the update on average (arXiv:2010.06192).

Each parameter's draws have their own key, (seed, step, index of the parameter). They do not depend on the order of
updates, on grouping, on whether the update runs in the backward pass, or on the process. A shard takes its part of the
whole parameter's draws, so they do not depend on the number of processes either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletune.engine.optim.bf16_updates import Draws, round_into, truncate_bits
from simpletune.engine.optim.place import ParameterRange, PartGenerator
from simpletune.engine.optim.state import begin_step
from simpletune.system.rng import random_key

if TYPE_CHECKING:
    from simpletune.engine.memory.block_offload import BlockOffload

GROUP = 1 << 22
"""Largest number of elements that step together: 36 MiB of temporaries, less than for one large matrix of SD3."""
SMALL = GROUP // 4
"""Largest number of elements of a parameter that joins a group; a larger one keeps a GPU busy by itself."""
ALIGNED = 128
"""Alignment of parameters in a group, in elements: 512 bytes, like CUDA's allocator."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def key_draws(optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
    """Set the key of an optimizer's random draws in the next step; without a key it uses the global generators."""
    for group in optimizer.param_groups:
        group["draws"] = (seed, step)


def padded_size(tensor: Tensor) -> int:
    """Return the number of elements that a tensor takes in a group's buffer."""
    return -(-tensor.numel() // ALIGNED) * ALIGNED


def buffer_of(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Allocate an uninitialised fp32 buffer for contiguous tensors of one device, and views into it of their shapes."""
    ends = list(accumulate(map(padded_size, tensors), initial=0))
    flat = torch.empty(ends[-1], dtype=torch.float32, device=tensors[0].device)
    return flat, [flat.as_strided(t.shape, t.stride(), begin) for t, begin in zip(tensors, ends, strict=False)]


class RoundedOptimizer(torch.optim.Optimizer):
    """Wraps any optimizer: bf16 parameters step as an fp32 copy, which is then rounded stochastically.

    Small parameters are copied into one buffer and step together, so that copies, rounding, and the update of
    optimizers with a multi-tensor implementation take only a few kernel launches per group. The random draws take one
    launch per parameter, because each has its own key. Grouping does not change any value. Optimizers that draw random
    numbers themselves (adamw_bf16) step one parameter at a time; those that loop over parameters (Adafactor, the 8-bit
    ones) are faster only outside their update.

    A copy exists only while its parameter steps: besides the optimizer's state, the extra memory is at most twice the
    largest parameter in fp32 (weight and gradient), or twice a group. State is that of an fp32 parameter.

    Args:
        parameters, ratios, places: see ``OptimizerOption.build``.
        make: builds the optimizer for some parameters; their updates must be independent of each other.
        rounded: whether to round bf16 parameters stochastically; if not, every parameter steps in its own type.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: MakeOptimizer,
        rounded: bool = True,
        ratios: Sequence[float] | None = None,
        places: Sequence[ParameterRange] | None = None,
    ):
        parameters = list(parameters)
        self._places = places
        self._ratios = [1.0] * len(parameters) if ratios is None else list(ratios)
        self._wide = [torch.float32 if rounded else parameter.dtype for parameter in parameters]
        self._shells = [
            nn.Parameter(torch.empty(0, dtype=wide, device=parameter.device))
            for parameter, wide in zip(parameters, self._wide, strict=True)
        ]
        homes: dict[tuple[torch.device, float], list[nn.Parameter]] = {}
        for shell, ratio in zip(self._shells, self._ratios, strict=True):
            homes.setdefault((shell.device, ratio), []).append(shell)
        made = {home: make(shells) for home, shells in homes.items()}
        self._inner = [made[shell.device, ratio] for shell, ratio in zip(self._shells, self._ratios, strict=True)]
        self._draws = "generator" in self._inner[0].defaults  # whether the wrapped optimizer draws random numbers
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._generators: dict[torch.device, torch.Generator] = {}
        self.norms: dict[nn.Parameter, Tensor] = {}  # norms of gradients freed in the backward pass
        self.offloading: BlockOffload | None = None  # moves parameters that are updated in the backward pass
        super().__init__(parameters, dict(self._inner[0].defaults) | {"draws": None})
        for parameter, shell, inner in zip(parameters, self._shells, self._inner, strict=True):
            self.state[parameter] = inner.state[shell]  # shared dictionary: state saves and loads in place

    @property
    def independent(self) -> bool:
        """Whether an update depends on nothing but its own parameter, gradient and state."""
        return not any(hasattr(inner, "begin_step") for inner in self._inner)

    def kind_of(self, parameter: nn.Parameter) -> tuple[object, ...]:
        """Return a key that is equal for parameters that ``update`` treats alike, if their layouts and states are equal
        as well."""
        number = self._numbers[parameter]
        return id(self._inner[number]), self._wide[number], self._shells[number].device

    def begin_step(self) -> None:
        """Let the wrapped optimizers prepare for the updates of the next step."""
        for inner in dict.fromkeys(self._inner):
            begin_step(inner)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self.update_together(self.param_groups[0]["params"])

    def update_together(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update those of some parameters that have a gradient, small ones together. Does not clear their gradients."""
        for group in self._groups(parameters):
            if len(group) == 1:
                self.update(group[0])
            elif group[0].dtype == self._wide[self._numbers[group[0]]]:
                self._update_in_place(group)
            else:
                self._update_group(group)

    @torch.no_grad()
    def update(self, parameter: nn.Parameter) -> None:
        """Update one parameter, independently of the order of updates. Does not clear its gradient."""
        assert parameter.grad is not None
        number = self._numbers[parameter]
        shell, wide = self._shells[number], self._wide[number]
        shell.data, shell.grad = parameter.detach().to(wide), parameter.grad.to(wide)
        generator = self._generator(number, parameter.device)
        self._step_inner([number], generator)
        shell.grad = None  # its memory is reused for the random bits
        if wide == torch.float32 and parameter.dtype == torch.bfloat16:
            round_into(parameter, shell.data, generator)
        elif wide != parameter.dtype:
            parameter.copy_(shell.data)
        shell.data = shell.data.new_empty(0)

    def _groups(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Group those of some parameters that have a gradient. Without a copy they step together, as do small ones;
        others step alone."""
        Home = tuple[torch.device, torch.device, float]
        open_groups: dict[Home, list[nn.Parameter]] = {}
        plain: dict[Home, list[nn.Parameter]] = {}
        room: dict[Home, int] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            number = self._numbers[parameter]
            wide = self._wide[number]
            home = self._shells[number].device, parameter.device, self._ratios[number]
            if wide == parameter.dtype and not self._draws:
                plain.setdefault(home, []).append(parameter)
                continue
            rounded = parameter.dtype == torch.bfloat16 and wide == torch.float32
            if self._draws or not rounded or parameter.numel() > SMALL or not parameter.is_contiguous():
                yield [parameter]
                continue
            taken = padded_size(parameter)
            if taken > room.get(home, 0):
                if home in open_groups:
                    yield open_groups[home]
                open_groups[home], room[home] = [], GROUP
            open_groups[home].append(parameter)
            room[home] -= taken
        yield from open_groups.values()
        yield from plain.values()

    @torch.no_grad()
    def _update_in_place(self, parameters: list[nn.Parameter]) -> None:
        """Update several parameters on one device in their own memory. Does not clear their gradients."""
        numbers = [self._numbers[parameter] for parameter in parameters]
        shells = [self._shells[number] for number in numbers]
        for shell, parameter in zip(shells, parameters, strict=True):
            shell.data, shell.grad = parameter.detach(), parameter.grad
        self._step_inner(numbers, None)
        for shell in shells:
            shell.data, shell.grad = shell.data.new_empty(0), None

    @torch.no_grad()
    def _update_group(self, parameters: list[nn.Parameter]) -> None:
        """Update several bf16 parameters on one device. Does not clear their gradients."""
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
        for number, gradient in zip(numbers, gradients, strict=True):  # reuse their memory for the noise
            noise, generator = gradient.view(torch.int32), self._generator(number, flat.device)
            if isinstance(generator, PartGenerator):
                noise.copy_(generator.draw(noise, 0, 1 << 16))
            else:
                noise.random_(0, 1 << 16, generator=generator)
        nan = flat.isnan()
        truncate_bits(flat.view(torch.int32).add_(rest.view(torch.int32)), nan)  # as round_into does
        torch._foreach_copy_(own, weights)

    def _step_inner(self, numbers: list[int], generator: Draws) -> None:
        """Run the wrapped optimizer on some shells, which are on one device."""
        inner, shells = self._inner[numbers[0]], [self._shells[number] for number in numbers]
        settings = {key: value for key, value in self.param_groups[0].items() if key in inner.defaults}
        if self._draws:
            settings["generator"] = generator
        if "lr" in settings:
            settings["lr"] = settings["lr"] * self._ratios[numbers[0]]
        inner.param_groups[0].update(settings | {"params": shells})
        for shell in shells if inner.defaults.get("fused") else ():
            counter = inner.state[shell].get("step")
            if counter is not None:  # a checkpoint loads it next to a weight in host memory
                inner.state[shell]["step"] = counter.to(shell.device)
        inner.step()

    def _generator(self, number: int, device: torch.device) -> Draws:
        """Return the generator of a parameter's draws in this step; None for the global one."""
        draws = self.param_groups[0]["draws"]
        place = None if self._places is None else self._places[number]
        generator = None
        if draws is not None:
            seed, step = draws
            generator = self._generators.setdefault(device, torch.Generator(device))
            key = random_key(seed, "rounding", step, number if place is None else place.number)
            generator.manual_seed(key % 2**63)
        return generator if place is None else PartGenerator(generator, place)
