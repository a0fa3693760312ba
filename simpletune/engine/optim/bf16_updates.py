"""Updates of bf16 numbers as single operators: one Triton kernel each on CUDA, torch's operators elsewhere.

An update reads and writes every number once, where torch's operators pass over fp32 temporaries some twenty times. The
random bits are drawn first, by torch, so that both forms round alike. Both steps are custom operators
(``simpletune::round_into``, ``simpletune::adamw_bf16``), so that fake tensors and memory accounting see exactly what
CUDA allocates and moves.

Shapes: all tensors of an update have the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from simpletune.engine.kernels.fallback import Fallback
from simpletune.engine.optim.place import PartGenerator

PIECE = 1 << 20
"""How many elements torch's operators update at once; small enough for their temporaries to stay in a CPU's cache."""
HALF = 1 << 15
Draws = torch.Generator | PartGenerator | None
"""A source of random bits; None: torch's global generator."""

_LIBRARY = torch.library.Library("simpletune", "FRAGMENT")
_LIBRARY.define("round_into(Tensor(a!) out, Tensor x, Tensor noise) -> ()")
_LIBRARY.define("adamw_bf16(Tensor(a!)[] changed, Tensor[] read, float[] factors) -> ()")
for _name in ("round_into", "adamw_bf16"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # nothing here has a gradient


class Factors(NamedTuple):
    """The factors of one step of AdamW, as plain numbers.

    Args:
        lerp: 1 - beta_1, the rate at which the running mean approaches the gradient.
        beta_2: decay rate of the running mean of squares.
        root: square root of that mean's bias correction.
        eps: added to the denominator.
        decay: the factor for the weights: 1 - lr * weight_decay.
        rate: lr divided by the first mean's bias correction.
    """

    lerp: float
    beta_2: float
    root: float
    eps: float
    decay: float
    rate: float


def random_bits(like: Tensor, generator: Draws) -> Tensor:
    """Draw 16 random bits for each element, as int16 less 2^15: half as wide as int32, and the same bits.

    Args:
        like: a tensor of the same shape, on the same device.
        generator: a generator on that device; a shard's draws for the whole parameter. None uses the global one.
    """
    noise = torch.empty(like.shape, dtype=torch.int16, device=like.device)
    if isinstance(generator, PartGenerator):
        return generator.draw(noise, -HALF, HALF)
    return noise.random_(-HALF, HALF, generator=generator)


def round_into(out: Tensor, x: Tensor, generator: Draws) -> None:
    """Write fp32 numbers to a bf16 tensor, rounded up or down at random so that the expected value is x.

    Adds a random number below 2^16 to the bits that bf16 truncates. Preserves infinities and NaN; CUDA's NaN,
    0x7fffffff, would otherwise carry into the sign and become -0.0.

    Args:
        out: bf16.
        x: fp32.
        generator: a generator on x's device; None uses the global one.
    """
    torch.ops.simpletune.round_into(out, x, random_bits(x, generator))
    torch.autograd.graph.increment_version(out)


def adamw_bf16(
    parameter: Tensor,
    gradient: Tensor,
    state: tuple[Tensor, Tensor, Tensor | None],
    generator: Draws,
    factors: Factors,
) -> None:
    """Take a step of AdamW (arXiv:1711.05101) with bf16 state, in fp32 arithmetic, in place.

    The running means are rounded at random. A bf16 parameter is rounded to nearest, and its rounding error is kept in
    the compensation.

    Args:
        parameter: bf16 or fp32.
        gradient: in any floating type.
        state: running mean of the gradient and of its square, and the compensation of a bf16 parameter, all bf16.
        generator: the generator of the random bits, those of the mean first; None uses the global one.
        factors: this step's factors.
    """
    read = [gradient, random_bits(parameter, generator), random_bits(parameter, generator)]
    changed = [tensor for tensor in (parameter, *state) if tensor is not None]
    torch.ops.simpletune.adamw_bf16(changed, read, list(factors))
    torch.autograd.graph.increment_version(changed)


@torch.library.register_fake("simpletune::round_into", lib=_LIBRARY)
def _(out: Tensor, x: Tensor, noise: Tensor) -> None:
    return None


@torch.library.register_fake("simpletune::adamw_bf16", lib=_LIBRARY)
def _(changed: list[Tensor], read: list[Tensor], factors: list[float]) -> None:
    return None


def round_with_bits(x: Tensor, noise: Tensor) -> Tensor:  # fp32, int16 -> bf16 numbers as fp32
    """Round with given random bits (see ``round_into``)."""
    return truncate_bits(noise.to(torch.int32).add_(HALF).add_(x.contiguous().view(torch.int32)), x.isnan())


def truncate_bits(bits: Tensor, nan: Tensor) -> Tensor:
    """Clear the bits that bf16 truncates, in place, and restore NaN.

    Args:
        bits: fp32 numbers as int32, with noise added.
        nan: mask of the numbers that were NaN before adding noise.

    Returns:
        The same memory as fp32.
    """
    return bits.bitwise_and_(-(1 << 16)).view(torch.float32).masked_fill_(nan, torch.nan)


@torch.library.impl(_LIBRARY, "round_into", "CPU")
def _round_by_torch(out: Tensor, x: Tensor, noise: Tensor) -> None:
    for piece, values, bits in _pieces([out, x, noise]):
        piece.copy_(round_with_bits(values, bits))


@torch.library.impl(_LIBRARY, "adamw_bf16", "CPU")
def _adamw_by_torch(changed: list[Tensor], read: list[Tensor], factors: list[float]) -> None:
    for piece in _pieces([*read, *changed]):
        _adamw_piece(piece, Factors(*factors))


def _adamw_piece(tensors: Sequence[Tensor], factors: Factors) -> None:
    gradient, mean_noise, square_noise, parameter, kept_mean, kept_square, *compensation = tensors
    gradient = gradient.float()
    mean = kept_mean.float().lerp_(gradient, factors.lerp)
    square = kept_square.float().mul_(factors.beta_2).addcmul_(gradient, gradient, value=1 - factors.beta_2)
    kept_mean.copy_(round_with_bits(mean, mean_noise))
    kept_square.copy_(round_with_bits(square, square_noise))
    denominator = square.sqrt_().div_(factors.root).add_(factors.eps)
    weight = parameter.float()
    for error in compensation:
        weight += error.float()
    weight.mul_(factors.decay)
    weight.addcdiv_(mean, denominator, value=-factors.rate)
    parameter.copy_(weight)
    for error in compensation:
        error.copy_(weight.sub_(parameter.float()))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Cut tensors of one shape into pieces; if any is not contiguous, all stay whole."""
    if not in_order(tensors) or tensors[0].numel() <= PIECE:
        yield tensors
        return
    yield from zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True)


def in_order(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous."""
    return all(tensor.is_contiguous() for tensor in tensors)


FALLBACK = Fallback("updates of bf16 numbers by torch's operators on {device}, which is slower: {reason}")


@torch.library.impl(_LIBRARY, "round_into", "CUDA")
def _round_on_cuda(out: Tensor, x: Tensor, noise: Tensor) -> None:
    def kernel() -> None:
        from simpletune.engine.optim import bf16_kernels

        bf16_kernels.round_into(out, x, noise)

    if not in_order([out, x, noise]):
        return _round_by_torch(out, x, noise)
    FALLBACK.run(x.device, kernel, lambda: _round_by_torch(out, x, noise))


@torch.library.impl(_LIBRARY, "adamw_bf16", "CUDA")
def _adamw_on_cuda(changed: list[Tensor], read: list[Tensor], factors: list[float]) -> None:
    def kernel() -> None:
        from simpletune.engine.optim import bf16_kernels

        bf16_kernels.adamw(changed, read, factors)

    if not in_order([*changed, *read]):
        return _adamw_by_torch(changed, read, factors)
    FALLBACK.run(changed[0].device, kernel, lambda: _adamw_by_torch(changed, read, factors))
