"""Kernels for adaptive norms and gated sums in Triton's interpreter, on the CPU, against float64. Run in a process of
its own by test_triton_interpreter.py, because TRITON_INTERPRET must be set before Triton is imported."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted_examples import examples
from interpreted_rounding import rounding_to_nearest  # noqa: F401  (a fixture)
from reference.adaln import gated_sum, modulated_norm, rms_norm, rotated, swiglu
from torch import Tensor

from simpletune.engine.kernels import adaln_kernels, rms_kernels, rotary_kernels, swiglu_kernels
from simpletune.engine.kernels.sizes import ROWS

TYPES = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""One rounding of each type, relative: half a unit in the last place, with a little for fp32's own."""
EPS = 1e-6
dtypes = st.sampled_from(list(TYPES))
shapes = st.tuples(
    st.integers(1, 2),
    st.sampled_from([1, 2, 7, ROWS, ROWS + 1]),
    st.sampled_from([1, 8, 24, 40, 64, 100]),
)
seeds = st.integers(0, 2**31)


def assert_close(found: Tensor, exact: Tensor, sizes: Tensor | float = 0.0) -> None:
    """Within one rounding of the exact result, and fp32's errors of what it is the difference of."""
    relative = TYPES[found.dtype]
    allowed = exact.abs() * relative * 1.01 + sizes * 2.0**-19 + 1e-7
    assert found.shape == exact.shape
    worst = ((found.double() - exact).abs() - allowed).max().item()
    assert worst <= 0, worst


def tokens(shape: tuple[int, ...], dtype: torch.dtype, seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 1.5).to(dtype) for _ in range(count)]


def views(b: int, d: int, dtype: torch.dtype, seed: int, count: int) -> list[Tensor]:
    """Modulations as a block has them: parts of one row."""
    return list(tokens((b, count * d), dtype, seed + 1, 1)[0].chunk(count, dim=1))


@examples(10)
@given(shape=shapes, dtype=dtypes, adds=st.booleans(), count=st.sampled_from([1, 2]), seed=seeds)
def test_modulated_norms_are_within_one_rounding_of_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, adds: bool, count: int, seed: int
) -> None:
    x, y = tokens(shape, dtype, seed, 2)
    gate, *rows = views(shape[0], shape[2], dtype, seed, 5)
    scales, shifts = rows[:count], rows[2 : 2 + count]
    *outs, mean, rstd = adaln_kernels.modulate(x, y if adds else None, gate if adds else None, scales, shifts, EPS)
    total = x
    if adds:
        total = outs.pop()
        assert_close(total, gated_sum(x.double(), y.double(), gate.double()), x.double().abs() + 4)
    wide = total.double()
    assert_close(mean, wide.mean(-1), 4.0)
    spread = rstd.double()[:, :, None]  # cancelling digits weigh more where a row is nearly constant
    assert_close(rstd, (wide.var(-1, unbiased=False) + EPS).rsqrt(), rstd.double() ** 3 * 20 + rstd.double())
    for out, scale, shift in zip(outs, scales, shifts, strict=True):
        exact = modulated_norm(wide, scale.double(), shift.double(), EPS)
        assert_close(out, exact, (wide.abs() + 1) * spread * (2 + scale.double().abs()[:, None]) + 10)


@examples(10)
@given(
    shape=shapes, dtype=dtypes, adds=st.booleans(), count=st.sampled_from([1, 2]), trains=st.booleans(),
    joined=st.booleans(), seed=seeds,
)  # fmt: skip
def test_their_gradients_are_within_one_rounding_of_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, adds: bool, count: int, trains: bool, joined: bool, seed: int
) -> None:
    """Against autograd over the reference; the gradient of y is that of the rounded gradient of the sum."""
    b, _, d = shape
    x, y, grad_total, *grads = tokens(shape, dtype, seed, 3 + count)
    gate, *scales = views(b, d, dtype, seed, 1 + count)
    wide = x.double().requires_grad_()
    wide_scales = [scale.double().requires_grad_() for scale in scales]
    shift = torch.zeros(b, d, dtype=torch.float64)
    outs = [modulated_norm(wide, scale, shift, EPS) for scale in wide_scales]
    torch.autograd.backward(outs, [grad.double() for grad in grads])
    mean, variance = x.double().mean(-1), x.double().var(-1, unbiased=False)
    given = (x, y if adds and trains else None, gate if adds else None, grad_total if joined else None)
    statistics = [mean.float(), (variance + EPS).rsqrt().float()]
    found = adaln_kernels.modulate_backward(grads, *given, scales, statistics, EPS, trains)
    assert wide.grad is not None
    steep = (variance + EPS).rsqrt()[:, :, None]
    sizes = 40 * steep * (1 + steep * x.double().abs())
    exact = wide.grad + (grad_total.double() if joined else 0)
    assert_close(found[0], exact, sizes)
    if adds:
        assert_close(found[1], found[0].double() * gate.double()[:, None], 1.0)
    if trains:
        sums = []
        for scale, grad in zip(wide_scales, grads, strict=True):
            assert scale.grad is not None
            sums += [scale.grad, grad.double().sum(1)]
        sums += [(found[0].double() * y.double()).sum(1)] if adds else []
        assert_close(found[-1], torch.stack(sums), 200 * (1 + float(sizes.max())) * shape[1] ** 0.5)
    else:
        assert len(found) == 1 + adds


@examples(8)
@given(shape=shapes, dtype=dtypes, trains=st.booleans(), seed=seeds)
def test_gated_sums_and_their_gradients_are_within_one_rounding_of_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, trains: bool, seed: int
) -> None:
    x, y, grad = tokens(shape, dtype, seed, 3)
    gate = views(shape[0], shape[2], dtype, seed, 3)[1]
    exact = gated_sum(x.double(), y.double(), gate.double())
    assert_close(adaln_kernels.add_gated(x, y, gate), exact, x.double().abs() + 4)
    grad_y, *sums = adaln_kernels.gate_backward(grad, y if trains else None, gate)
    assert_close(grad_y, grad.double() * gate.double()[:, None], 1.0)
    assert len(sums) == trains
    if trains:
        assert_close(sums[0], (grad.double() * y.double()).sum(1).unsqueeze(0), 100.0 * shape[1])


@examples(8)
@given(
    shape=st.tuples(*map(st.sampled_from, ([1, 2], [1, 5, 70], [1, 2, 3], [4, 16, 40, 64])))
    | st.tuples(*map(st.sampled_from, ([1, 2], [1, 3], [2560, 3840]))),  # tokens of Z-Image, a row each program
    dtype=dtypes, trains=st.booleans(), seed=seeds,
)  # fmt: skip
def test_norms_of_queries_and_tokens_are_within_one_rounding_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, trains: bool, seed: int
) -> None:
    x, grad = tokens(shape, dtype, seed, 2)
    weight = tokens(shape[-1:], dtype, seed + 1, 1)[0]
    wide, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = rms_norm(wide, wide_weight, EPS)
    exact.backward(grad.double())
    assert_close(rms_kernels.rms_norm(x, weight, EPS), exact.detach(), exact.detach().abs() + 1)
    grad_x, *sums = rms_kernels.rms_norm_backward(grad, x, weight, EPS, trains)
    assert wide.grad is not None and wide_weight.grad is not None and len(sums) == trains
    steep = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert_close(grad_x, wide.grad, 40 * steep)
    if trains:
        assert_close(sums[0], wide_weight.grad, 100.0 * x.numel() / len(weight))


@examples(8)
@given(
    shape=st.tuples(*map(st.sampled_from, ([1, 2], [1, 5], [1, 8, 40, swiglu_kernels.COLUMNS + 8]))),
    dtype=dtypes, joined=st.booleans(), large=st.booleans(), seed=seeds,
)  # fmt: skip
def test_swiglu_and_its_gradients_are_within_one_rounding_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, joined: bool, large: bool, seed: int
) -> None:
    """Of halves of one tensor, which lies in a wider one as in a parallel block, or of two tensors."""
    d = shape[-1]
    wide = tokens((*shape[:-1], 3 * d), dtype, seed, 1)[0] * (30 if large else 1)
    x, grad = wide[..., d:], tokens((*shape[:-1], 2 * d), dtype, seed + 1, 1)[0][..., :d]
    gate, value = x.chunk(2, dim=-1)
    if not joined:
        gate, value = gate.contiguous(), value.contiguous()
    exact_gate, exact_value = (each.double().requires_grad_() for each in (gate, value))
    exact = swiglu(exact_gate, exact_value)
    exact.backward(grad.double())
    assert exact_gate.grad is not None and exact_value.grad is not None
    size = 1 + exact_gate.detach().abs()
    assert_close(swiglu_kernels.swiglu(gate, value), exact.detach(), size * exact_value.detach().abs())
    found = swiglu_kernels.swiglu_backward(grad, gate, value, joined)
    assert len(found) == 2 - joined
    of_gate, of_value = found[0].chunk(2, dim=-1) if joined else found
    assert_close(of_gate, exact_gate.grad, size * (grad.double() * exact_value.detach()).abs())
    assert_close(of_value, exact_value.grad, size * grad.double().abs())


@examples(8)
@given(
    b=st.sampled_from([1, 2]), n=st.sampled_from([[5], [1, 7], [3, 40]]), heads=st.sampled_from([1, 3]),
    d=st.sampled_from([4, 16, 40]), dtype=dtypes, trains=st.booleans(), shared=st.booleans(), wide=st.booleans(),
    seed=seeds,
)  # fmt: skip
def test_norms_with_positions_are_within_one_rounding_of_float64(
    b: int, n: list[int], heads: int, d: int, dtype: torch.dtype, trains: bool, shared: bool, wide: bool, seed: int
) -> None:
    """Of one part or two, which may lie in a wider tensor; with angles of all samples, or each sample's own, whose
    tables are views of complex numbers."""
    extra = 2 if wide else 0
    stored = [tokens((b, count, heads + extra, d), dtype, seed + number, 1)[0] for number, count in enumerate(n)]
    parts = [each[:, :, extra:] for each in stored]
    grad = tokens((b, sum(n), heads, d), dtype, seed + 5, 1)[0]
    weights = [tokens((d,), dtype, seed + 6 + number, 1)[0] for number in range(len(n))]
    angles = tokens((1 if shared else b, sum(n), d // 2), torch.float32, seed + 9, 1)[0]
    cos, sin = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).unbind(-1)
    exact = [each.double().requires_grad_() for each in (*parts, *weights)]
    normed = [rms_norm(x, weight, EPS) for x, weight in zip(exact[: len(n)], exact[len(n) :], strict=True)]
    out = rotated(torch.cat(normed, dim=1), cos.double(), sin.double())
    out.backward(grad.double())
    found = rotary_kernels.rms_norm_rotary(parts, weights, cos, sin, EPS, True)
    assert_close(found, out.detach(), 2 * out.detach().abs().amax(-1, keepdim=True) + 1)
    grads = rotary_kernels.rms_norm_rotary_backward(grad, parts, weights, cos, sin, EPS, True, trains)
    assert len(grads) == len(n) * (1 + trains)
    for x, wanted, of_part in zip(parts, exact, grads, strict=False):
        assert wanted.grad is not None
        assert_close(of_part, wanted.grad, 80 * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt())
    for wanted, of_weight in zip(exact[len(n) :], grads[len(n) :], strict=False):
        assert wanted.grad is not None
        assert_close(of_weight, wanted.grad, 200.0 * b * sum(n) * heads)
    turned = grad.transpose(1, 2).contiguous().transpose(1, 2)
    again = rotary_kernels.rms_norm_rotary_backward(turned, parts, weights, cos, sin, EPS, True, trains)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_sums_over_tokens_are_repeated_bit_for_bit() -> None:
    x, y, grad = tokens((2, ROWS + 1, 40), torch.bfloat16, 5, 3)
    gate, scale = views(2, 40, torch.bfloat16, 5, 2)
    statistics = [torch.zeros(2, ROWS + 1), torch.ones(2, ROWS + 1)]
    first, second = (
        adaln_kernels.modulate_backward([grad], x, y, gate, None, [scale], statistics, EPS, True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_that_do_not_lie_in_order_are_read_all_the_same() -> None:
    """Tokens with another order in memory, and modulations with different strides."""
    (x, y), gate = tokens((2, 9, 24), torch.float32, 3, 2), tokens((24, 2), torch.float32, 4, 1)[0].t()
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    assert torch.equal(adaln_kernels.add_gated(turned, y, gate), adaln_kernels.add_gated(x, y, gate.contiguous()))
    scale = tokens((2, 24), torch.float32, 6, 1)[0]
    for a, b in zip(
        adaln_kernels.modulate(turned, y, gate, [scale], [scale], EPS),
        adaln_kernels.modulate(x, y, gate.contiguous(), [scale], [scale], EPS),
        strict=True,
    ):
        assert torch.equal(a, b)
