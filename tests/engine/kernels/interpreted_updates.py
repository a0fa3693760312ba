"""Kernels for updates of bf16 numbers in Triton's interpreter, on the CPU, against float64. Run in a process of its
own by test_triton_interpreter.py, because TRITON_INTERPRET must be set before Triton is imported."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted_examples import examples
from interpreted_rounding import rounding_to_nearest  # noqa: F401  (a fixture)
from reference.adamw import adamw_step
from torch import Tensor

from simpletune.engine.optim import bf16_kernels, bf16_updates
from simpletune.engine.optim.bf16_updates import HALF, Factors

TYPES = [torch.float32, torch.bfloat16, torch.float16]
sizes = st.one_of(st.integers(1, 40), st.sampled_from([bf16_kernels.BLOCK, bf16_kernels.BLOCK + 7]))


def noise_of(n: int, generator: torch.Generator) -> Tensor:
    return torch.empty(n, dtype=torch.int16).random_(-HALF, HALF, generator=generator)


@examples(15)
@given(n=sizes, seed=st.integers(0, 2**31))
def test_the_kernel_rounds_as_the_cpu(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 10 ** torch.randint(-30, 30, (n,), generator=generator)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 3.4e38])[: n // 2]
    x[: len(odd)] = odd
    noise = noise_of(n, generator)
    ours, theirs = torch.empty(2, n, dtype=torch.bfloat16)
    bf16_kernels.round_into(ours, x, noise)
    bf16_updates._round_by_torch(theirs, x, noise)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@examples(25)
@given(
    n=sizes, dtype=st.sampled_from([torch.bfloat16, torch.float32]), given_in=st.sampled_from(TYPES),
    beta=st.sampled_from([0.0, 0.4, 0.9]), step=st.sampled_from([1, 2, 1000]), decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_the_kernel_steps_as_float64_and_as_the_cpu(
    n: int, dtype: torch.dtype, given_in: torch.dtype, beta: float, step: int, decay: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, kind: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(n, generator=generator) * scale).to(kind)

    lr, betas, eps = 1e-3, (beta, 0.999), 1e-8
    start = step > 1
    parameter, gradient = normal(1.0, dtype), normal(0.1, given_in)
    mean, square = normal(0.1 * start), normal(0.1 * start).square()
    error = normal(1e-3 * start) if dtype == torch.bfloat16 else None
    noise = noise_of(n, generator), noise_of(n, generator)
    factors = Factors(
        1 - beta, 0.999, (1 - 0.999**step) ** 0.5, eps, 1 - lr * decay, lr / (1 - beta**step) if beta else lr
    )
    changed = [parameter, mean, square, *([] if error is None else [error])]
    ours, theirs = ([tensor.clone() for tensor in changed] for _ in range(2))
    bf16_kernels.adamw(ours, [gradient, *noise], factors)
    bf16_updates._adamw_by_torch(theirs, [gradient, *noise], list(factors))

    before = parameter.double() + (0 if error is None else error.double())
    exact = adamw_step(before, gradient.double(), (mean.double(), square.double()), step, lr, betas, eps, decay)
    for found in (ours, theirs):
        weight = found[0].double() + (0 if error is None else found[3].double())
        precision = 2.0**-15 if dtype == torch.bfloat16 else 2.0**-22
        torch.testing.assert_close(weight, exact[0], rtol=precision, atol=1e-7)
        for place, value, bits in ((1, exact[1], noise[0]), (2, exact[2], noise[1])):
            torch.testing.assert_close(found[place].double(), value, rtol=2.0**-7, atol=1e-9)  # to a neighbour
            up = (bits.int() + HALF).double() / 65536  # rounds away from zero where it and the fraction reach 1
            cut = (value.float().view(torch.int32) & -65536).view(torch.float32).double()
            gap = (value.float().view(torch.int32) + 65536 & -65536).view(torch.float32).double() - cut
            share = torch.where(gap != 0, (value - cut) / gap, 0.0)
            clear = (share + up - 1).abs() > 1e-2
            expected = torch.where(share + up >= 1, cut + gap, cut)
            assert torch.equal(found[place].double()[clear], expected[clear])


def test_a_tensor_that_does_not_lie_in_order_is_never_given_to_a_kernel() -> None:
    assert bf16_updates.are_contiguous([torch.ones(3, 4)])
    assert not bf16_updates.are_contiguous([torch.ones(3, 4), torch.ones(4, 3).t()])
