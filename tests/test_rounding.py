"""Stochastic rounding and the optimizer that uses it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from simpletune.optim.adamw import AdamW
from simpletune.optim.rounding import RoundedOptimizer, stochastic_round


@pytest.mark.parametrize("value", [1.0 + 1 / 512, -0.3, 3e-5, 1234.567, -1e-30])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    torch.manual_seed(0)
    rounded = stochastic_round(torch.full((100_000,), value)).double()
    assert abs(rounded.mean().item() / value - 1) < 3e-5
    assert rounded.unique().numel() <= 2


@settings(max_examples=100, deadline=None)
@given(st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100))
def test_rounds_to_a_neighbour(value: float) -> None:
    x = torch.tensor([value], dtype=torch.float32)
    up, down = (x.view(torch.int32) + 0xFFFF) & -65536, x.view(torch.int32) & -65536
    rounded = stochastic_round(x).float()
    assert rounded in (up.view(torch.float32), down.view(torch.float32))


def test_what_bf16_holds_is_left_alone() -> None:
    x = torch.randn(1000).bfloat16()
    assert torch.equal(stochastic_round(x.float()), x)
    edge = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert torch.equal(stochastic_round(edge).float(), edge)


def test_an_fp32_parameter_is_not_wrapped() -> None:
    option = AdamW()
    assert not isinstance(option.build([nn.Parameter(torch.ones(3))]), RoundedOptimizer)
    assert isinstance(option.build([nn.Parameter(torch.ones(3).bfloat16())]), RoundedOptimizer)


def test_steps_equal_fp32_adamw_but_for_the_rounding() -> None:
    torch.manual_seed(1)
    start = torch.randn(64).bfloat16()
    rounded, exact = nn.Parameter(start.clone()), nn.Parameter(start.float())
    option = AdamW(lr=0.01, weight_decay=0.1)
    pair = [(rounded, option.build([rounded])), (exact, option.build([exact]))]
    for _ in range(5):
        gradient = torch.randn(64).bfloat16()
        for weight, optimizer in pair:
            weight.grad = gradient.to(weight.dtype)
            optimizer.step()
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()
    state = [optimizer.state[weight]["exp_avg"] for weight, optimizer in pair]
    torch.testing.assert_close(state[0], state[1], rtol=1e-6, atol=1e-7)
