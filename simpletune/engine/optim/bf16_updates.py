"""Updates of bf16 numbers as single operators: one Triton kernel each on CUDA, torch's operators elsewhere.

An update reads and writes every number once, where torch's operators pass over fp32 temporaries some twenty times. The
random bits are drawn first, by torch, so that both forms round alike. Both steps are custom operators
(``simpletune::round_into``, ``simpletune::adamw_bf16``), so that fake tensors and memory accounting see exactly what
CUDA allocates and moves.

Shapes: all tensors of an update have the parameter's shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from simpletune.engine.kernels.fallback import Fallback
from simpletune.engine.optim.place import PartGenerator
from simpletune.engine.optim.state import State

PIECE = 1 << 20
"""How many elements torch's operators update at once; small enough for their temporaries to stay in a CPU's cache."""
HALF = 1 << 15
Draws = torch.Generator | PartGenerator | None
"""A source of random bits; None: torch's global generator."""


class Factors(NamedTuple):
    """The factors of one step of AdamW, as plain numbers."""

    lerp: float  # 1 - beta_1, the rate at which the running mean approaches the gradient
    beta_2: float  # decay rate of the running mean of squares
    root: float  # square root of that mean's bias correction
    eps: float  # added to the denominator
    decay: float  # the factor for the weights: 1 - lr * weight_decay
    rate: float  # lr divided by the first mean's bias correction


def random_bits(like: Tensor, generator: Draws) -> Tensor:
    """Draw 16 random bits for each element, as int16 less 2^15: half as wide as int32, and the same bits."""
    noise = torch.empty(like.shape, dtype=torch.int16, device=like.device)
    if isinstance(generator, PartGenerator):
        return generator.draw(noise, -HALF, HALF)
    return noise.random_(-HALF, HALF, generator=generator)


def round_into(out: Tensor, x: Tensor, generator: Draws) -> None:
    """Write fp32 numbers to a bf16 tensor, rounded up or down at random so that the expected value is x."""
    # Adds a random number below 2^16 to the bits that bf16 truncates. Preserves infinities and NaN; CUDA's NaN,
    # 0x7fffffff, would otherwise carry into the sign and become -0.0.
    torch.ops.simpletune.round_into(out, x, random_bits(x, generator))
    torch.autograd.graph.increment_version(out)


class CompensatedAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with bf16 state and fp32 arithmetic, for bf16 or fp32 parameters.

    The running means are rounded at random. A bf16 parameter is rounded to nearest, and its rounding error is kept in
    the compensation. State of each parameter: ``exp_avg``, ``exp_avg_sq``, and for bf16 weights ``compensation``, all
    bf16; ``step``. Draws random numbers from the group's ``generator``, or from the global one if it is None.
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
            lr, (beta_1, beta_2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: State = self.state[parameter]
                if not state:
                    names = ["exp_avg", "exp_avg_sq", *(["compensation"] if parameter.dtype == torch.bfloat16 else [])]
                    state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in names}
                    state["step"] = 0
                state["step"] += 1
                factors = Factors(
                    lerp=1 - beta_1,
                    beta_2=beta_2,
                    root=math.sqrt(1 - beta_2 ** state["step"]),
                    eps=group["eps"],
                    decay=1 - lr * group["weight_decay"],
                    rate=lr / (1 - beta_1 ** state["step"]),
                )
                bits = [random_bits(parameter, group["generator"]) for _ in range(2)]  # of the mean, then of the square
                changed = [parameter, state["exp_avg"], state["exp_avg_sq"]]
                changed += [state["compensation"]] if "compensation" in state else []
                torch.ops.simpletune.adamw_bf16(changed, [parameter.grad, *bits], list(factors))
                torch.autograd.graph.increment_version(changed)


def round_with_bits(x: Tensor, noise: Tensor) -> Tensor:  # fp32, int16 -> bf16 numbers as fp32
    """Round with given random bits (see ``round_into``)."""
    return truncate_bits(noise.to(torch.int32).add_(HALF).add_(x.contiguous().view(torch.int32)), x.isnan())


def truncate_bits(bits: Tensor, nan: Tensor) -> Tensor:
    """Clear the bits that bf16 truncates, in place, and restore what was NaN before noise was added: int32 as fp32."""
    return bits.bitwise_and_(-(1 << 16)).view(torch.float32).masked_fill_(nan, torch.nan)


def _round_by_torch(out: Tensor, x: Tensor, noise: Tensor) -> None:
    for piece, values, bits in _pieces([out, x, noise]):
        piece.copy_(round_with_bits(values, bits))


def _adamw_by_torch(changed: list[Tensor], read: list[Tensor], factors: list[float]) -> None:
    of = Factors(*factors)
    for gradient, mean_bits, square_bits, parameter, kept_mean, kept_square, *compensation in _pieces(
        [*read, *changed]
    ):
        gradient = gradient.float()
        mean = kept_mean.float().lerp_(gradient, of.lerp)
        square = kept_square.float().mul_(of.beta_2).addcmul_(gradient, gradient, value=1 - of.beta_2)
        kept_mean.copy_(round_with_bits(mean, mean_bits))
        kept_square.copy_(round_with_bits(square, square_bits))
        denominator = square.sqrt_().div_(of.root).add_(of.eps)
        weight = parameter.float()
        for error in compensation:
            weight += error.float()
        weight.mul_(of.decay)
        weight.addcdiv_(mean, denominator, value=-of.rate)
        parameter.copy_(weight)
        for error in compensation:
            error.copy_(weight.sub_(parameter.float()))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Cut tensors of one shape into pieces; if any is not contiguous, all stay whole."""
    if not are_contiguous(tensors) or tensors[0].numel() <= PIECE:
        yield tensors
        return
    yield from zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True)


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are contiguous."""
    return all(tensor.is_contiguous() for tensor in tensors)


def _round_by_kernel(out: Tensor, x: Tensor, noise: Tensor) -> None:
    if not are_contiguous([out, x, noise]):
        return _round_by_torch(out, x, noise)
    from simpletune.engine.optim import bf16_kernels

    bf16_kernels.round_into(out, x, noise)


def _adamw_by_kernel(changed: list[Tensor], read: list[Tensor], factors: list[float]) -> None:
    if not are_contiguous([*changed, *read]):
        return _adamw_by_torch(changed, read, factors)
    from simpletune.engine.optim import bf16_kernels

    bf16_kernels.adamw(changed, read, factors)


FALLBACK = Fallback("updates of bf16 numbers by torch's operators on {device}, which is slower: {reason}")


_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
FALLBACK.define(_LIBRARY, "round_into(Tensor(a!) out, Tensor x, Tensor noise) -> ()", _round_by_torch, _round_by_kernel)
FALLBACK.define(
    _LIBRARY,
    "adamw_bf16(Tensor(a!)[] changed, Tensor[] read, float[] factors) -> ()",
    _adamw_by_torch,
    _adamw_by_kernel,
)
for _name in ("round_into", "adamw_bf16"):
    torch.library.register_fake(f"simpletune::{_name}", lambda *_: None, lib=_LIBRARY)
