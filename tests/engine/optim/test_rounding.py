"""Stochastic rounding and the optimizer that uses it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from optimizers import NAMES, alone, option_of, start_of, stepped
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.optim import rounding
from simpletune.engine.optim.bf16_updates import round_into
from simpletune.engine.optim.options import AdamW
from simpletune.engine.optim.rounding import RoundedOptimizer


def stochastic_round(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    round_into(out, x, None)
    return out


@pytest.mark.parametrize("value", [1.0 + 1 / 512, -0.3, 3e-5, 1234.567, -1e-30])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    torch.manual_seed(0)
    rounded = stochastic_round(torch.full((100_000,), value)).double()
    assert abs(rounded.mean().item() / value - 1) < 3e-5
    assert rounded.unique().numel() <= 2


def fp32_of(patterns: list[int]) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_every_exponent_at_the_edges_of_its_mantissa() -> None:
    """Of 2^32 patterns some at random, and those around which bits carry over: finite numbers go to a neighbour, keep
    their sign, and stay if bf16 holds them; infinity stays, and NaN's bits plus noise do not become -0.0."""
    edges = [0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7EFFFF, 0x7F0000, 0x7F0001, 0x7FFFFF]
    edges += torch.randint(1 << 23, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    x = fp32_of([sign << 31 | e << 23 | m for sign in (0, 1) for e in range(256) for m in edges]).repeat(256)
    rounded = stochastic_round(x).float()
    assert torch.equal(rounded.isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(rounded.signbit()[known], x.signbit()[known])
    low = (x.view(torch.int32) & -65536).view(torch.float32)
    high = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((rounded == low) | ((rounded == high) & (x != low)))[known].all()


@pytest.mark.parametrize("count", [1, 3])  # alone, and together in a group
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000, 0x7F800000], ids=hex)
def test_a_gradient_that_is_not_finite_is_seen_in_the_weight(count: int, pattern: int) -> None:
    """As SGD moves a weight: what the gradient is, the weight becomes; others of its group are left alone. CUDA's
    arithmetic gives 0x7fffffff (PTX)."""
    weights = [nn.Parameter(torch.ones(5).bfloat16()) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.zeros(5).bfloat16()
    RoundedOptimizer(weights, lambda p: Written(p, pattern)).step()
    assert not weights[0][2].isfinite() and weights[0][2].isnan() == (pattern & 0x7FFFFF != 0)
    assert torch.stack([weight.detach() for weight in weights]).isfinite().sum() == 5 * count - 1


class Written(torch.optim.Optimizer):
    """Writes a bit pattern into the third element of the first parameter, as a GPU's arithmetic would."""

    def __init__(self, parameters: object, pattern: int):
        super().__init__(parameters, {})  # type: ignore[arg-type]
        self.value = fp32_of([pattern])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]["params"][0]
        first.data.view(torch.int32)[2] = self.value.view(torch.int32)[0]


def test_steps_equal_fp32_adamw_but_for_the_rounding() -> None:
    torch.manual_seed(1)
    start = torch.randn(64).bfloat16()
    rounded, exact = nn.Parameter(start.clone()), nn.Parameter(start.float())
    option = AdamW(lr=0.01, weight_decay=0.1)
    pair = [(rounded, option.build([rounded])), (exact, option.build([exact]))]
    assert [isinstance(optimizer, RoundedOptimizer) for _, optimizer in pair] == [True, False]
    for _ in range(5):
        gradient = torch.randn(64).bfloat16()
        for weight, optimizer in pair:
            weight.grad = gradient.to(weight.dtype)
            optimizer.step()
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()
    state = [optimizer.state[weight]["exp_avg"] for weight, optimizer in pair]
    torch.testing.assert_close(state[0], state[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("group", [1 << 22, 9000])
@pytest.mark.parametrize("name", NAMES)
def test_a_group_s_numbers_are_those_of_parameters_that_step_alone(
    name: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "GROUP", group)
    option, updates, honest = option_of(name, weight_decay=0.1), [], RoundedOptimizer.update

    def update(self: RoundedOptimizer, parameter: nn.Parameter) -> None:
        updates.append(parameter)
        honest(self, parameter)

    monkeypatch.setattr(RoundedOptimizer, "update", update)
    together = stepped(option, start_of(), RoundedOptimizer.step)
    by_itself = len(updates)
    apart = stepped(option, start_of(), alone)
    assert len(updates) > 20 > by_itself or name == "adamw_bf16"
    assert together.keys() == apart.keys() and any("weight" not in key for key in together)
    for key, value in together.items():
        assert value.dtype == apart[key].dtype and value.untyped_storage().nbytes() == apart[key].nbytes, key
    torch.testing.assert_close(together, apart, rtol=0, atol=0, equal_nan=False)


class _Kernels(TorchDispatchMode):
    """Counts kernels by name; what only looks at memory in another way is none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func):
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_kernels_do_not_grow_with_the_number_of_small_parameters_but_for_the_draws() -> None:
    counts = []
    for number in (10, 40):
        parameters = [nn.Parameter(tensor) for tensor in start_of(number)]
        optimizer = AdamW().build(parameters)
        for _ in range(2):  # the first makes the state
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            with _Kernels() as kernels:
                optimizer.step()
        counts.append(kernels.found)
    few, many = counts
    assert (few.pop("random_"), many.pop("random_")) == (10, 40)
    assert few == many and sum(many.values()) < 14
    assert not {"_local_scalar_dense", "nonzero"} & many.keys()


def test_temporaries_are_those_of_one_group_or_one_large_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak_of(shapes: list[tuple[int, ...]]) -> int:
        parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
        optimizer = AdamW().build(parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            with Accounting() as accounting:
                accounting.register([*parameters, *(p.grad for p in parameters)], "adapter")
                values = [value for state in optimizer.state.values() for value in state.values()]
                accounting.register([value for value in values if isinstance(value, torch.Tensor)], "optimizer")
                before = accounting.current.bytes
                optimizer.step()
        return accounting.peak.bytes - before

    monkeypatch.setattr(rounding, "GROUP", 8192)
    monkeypatch.setattr(rounding, "SMALL", 2048)
    assert peak_of([(32, 32)] * 4) == (4 + 4 + 1) * 4096  # weights, gradients that become noise, where NaN is
    assert peak_of([(32, 32)] * 40) == (4 + 4 + 1) * 8192
    assert peak_of([(32, 32)] * 40 + [(128, 128), (64, 64)]) == (4 + 4) * 128 * 128  # weight and gradient


def test_what_is_no_contiguous_bf16_steps_alone_beside_groups() -> None:
    torch.manual_seed(2)
    start = [torch.randn(8, 6).bfloat16(), torch.randn(6, 8).bfloat16().T, torch.randn(9), torch.randn(4).bfloat16()]
    together = stepped(AdamW(), start, RoundedOptimizer.step)
    torch.testing.assert_close(together, stepped(AdamW(), start, alone), rtol=0, atol=0)
    assert together["weight 2"].dtype == torch.float32 and not torch.equal(together["weight 1"], start[1])
