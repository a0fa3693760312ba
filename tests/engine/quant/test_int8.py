"""The lean frozen int8 linear: rounding error, gradients, and what it keeps for the backward pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from simpletune.engine.quant.int8_linear import Int8Linear, quantise_rows

sizes = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(rows=sizes, columns=sizes, seed=st.integers(0, 2**31), outlier=st.sampled_from([1.0, 50.0, 1e6, 1e-20]))
def test_rounding_error_is_at_most_half_a_scale(rows: int, columns: int, seed: int, outlier: float) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0, 0] *= outlier
    q, scale = quantise_rows(weight)
    assert q.dtype == torch.int8 and q.abs().max() <= 127
    assert ((weight - q * scale[:, None]).abs() <= scale[:, None] * 0.5001).all()
    assert torch.equal(scale, scale.bfloat16().float())
    assert (scale <= weight.abs().amax(1).clamp(min=1e-38) / 127 * (1 + 2**-7)).all()


def test_zeros_and_the_meta_device() -> None:
    q, scale = quantise_rows(torch.zeros(3, 5))
    assert (q == 0).all() and (scale == 1).all()
    weight = torch.randn(48, 16, dtype=torch.bfloat16)
    for twin, real in zip(quantise_rows(weight.to("meta")), quantise_rows(weight), strict=True):
        assert twin.is_meta
        assert (twin.shape, twin.stride(), twin.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_output_and_input_gradient_are_those_of_the_dequantised_layer(bias: bool, dtype: torch.dtype) -> None:
    """It keeps no activation and no copy of the weight."""
    torch.manual_seed(0)
    layer = Int8Linear.from_linear(nn.Linear(24, 40, bias=bias), dtype)
    x, kept = torch.randn(2, 7, 24).to(dtype).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert sorted(tensor.data_ptr() for tensor in kept) == sorted([layer.weight.data_ptr(), layer.scale.data_ptr()])
    y.float().square().sum().backward()
    x_plain = x.detach().float().requires_grad_()
    y_plain = nn.functional.linear(x_plain, layer.dequantise(), layer.bias.float() if bias else None)
    y_plain.square().sum().backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}
    torch.testing.assert_close(y.float(), y_plain, **tolerance)
    torch.testing.assert_close(x.grad.float(), x_plain.grad, **tolerance)
    assert layer.weight.grad is None


def test_gradcheck_against_numbers() -> None:
    layer = Int8Linear.from_linear(nn.Linear(6, 4), torch.float64)
    assert torch.autograd.gradcheck(layer, torch.randn(3, 6, dtype=torch.float64, requires_grad=True))
