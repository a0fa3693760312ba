"""Updates of bf16 numbers as single operators: against float64, by kernels and by torch, and in predictions."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch
from blocks import on_cuda
from reference.adamw import adamw_step
from slow_cases import slow_but
from torch import Tensor, nn

from simpletune.engine.optim import bf16_updates
from simpletune.engine.optim.bf16_updates import HALF, random_bits, round_into
from simpletune.engine.optim.options import AdamW8bit, AdamWBF16
from simpletune.engine.optim.rounding import RoundedOptimizer, key_draws
from simpletune.estimate.timing.sections import KernelWork
from simpletune.estimate.timing.work import works_of

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("card", slow_but([89], [89, 75, 80, 86, 90, 120]))
@pytest.mark.parametrize("kind", ["round", "bf16", "fp32"])
def test_the_kernels_compile_for_cards_that_are_not_here(card: int, kind: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from simpletune.engine.optim import bf16_kernels

    function = bf16_kernels._round if kind == "round" else bf16_kernels._adamw
    types = dict.fromkeys(function.arg_names, "fp32") | dict.fromkeys(("out", "mean", "square"), "*bf16")
    types |= {"n": "i32", "x": "*fp32", "noise": "*i16", "mean_noise": "*i16", "square_noise": "*i16"}
    types |= {"parameter": f"*{kind}", "gradient": f"*{kind}", "BLOCK": "constexpr"}
    types |= {"compensation": "constexpr" if kind == "fp32" else "*bf16"}
    types = {name: types[name] for name in function.arg_names}
    place = {name: (number,) for number, name in enumerate(function.arg_names)}
    constants = {place["BLOCK"]: bf16_kernels.BLOCK} | ({place["compensation"]: None} if kind == "fp32" else {})
    aligned = {place[name]: [["tt.divisibility", 16]] for name, each in types.items() if each[0] == "*" or name == "n"}
    options = {"num_warps": bf16_kernels.WARPS, "enable_fp_fusion": False}
    built = compile(ASTSource(function, types, constants, aligned), target=GPUTarget("cuda", card, 32), options=options)
    ptx = built.asm["ptx"]
    assert ".local" not in ptx and "fma.rn.f32" not in ptx and ".ftz" not in ptx
    assert re.search(r"ld\.global.*\.v[24]\.b32", ptx), "loads are not vectors"


def tensors_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What a step changes, and what it only reads."""
    parameter, gradient = (torch.randn(shape).to(dtype) for _ in range(2))
    means = torch.zeros(2, *shape, dtype=torch.bfloat16)
    error = torch.zeros(shape, dtype=torch.bfloat16)
    return [parameter, *means, error], [gradient, random_bits(parameter, None), random_bits(parameter, None)]


def test_the_operations_are_what_fake_tensors_take_them_for() -> None:
    factors = [0.1, 0.999, 0.03, 1e-8, 1.0, 1e-4]
    checks = ("test_schema", "test_faketensor")
    for shape in ((1, 7), (33, 64)):
        given = tensors_of(shape, torch.bfloat16)
        torch.library.opcheck(torch.ops.simpletune.adamw_bf16.default, (*given, factors), test_utils=checks)
        x = torch.randn(shape)
        out = torch.empty(shape, dtype=torch.bfloat16)
        torch.library.opcheck(
            torch.ops.simpletune.round_into.default, (out, x, random_bits(x, None)), test_utils=checks
        )


def test_narrow_random_bits_are_those_of_wide_ones() -> None:
    """The draws of earlier versions, which runs are resumed from: 0 to 65535 as int32, one after the other."""
    ours, theirs = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for shape in ((5,), (40, 30)):
        wide = torch.randint(0, 1 << 16, shape, dtype=torch.int32, generator=theirs)
        assert torch.equal(random_bits(torch.empty(shape), ours).int() + HALF, wide)
    out = torch.zeros(8, dtype=torch.bfloat16)
    before = out._version
    round_into(out, torch.ones(8), None)
    assert out._version > before and (out == 1).all(), "autograd knows that it has changed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_are_those_of_the_paper(dtype: torch.dtype) -> None:
    """Weight and compensation together follow float64 to 16 bits; the means, rounded at random, on average."""
    lr, betas, eps, decay = 1e-3, (0.9, 0.99), 1e-8, 0.1
    weight = nn.Parameter(torch.linspace(-2, 2, 4096).to(dtype))
    optimizer = AdamWBF16(lr=lr, betas=betas, eps=eps, weight_decay=decay).build([weight])
    exact, state = weight.detach().double(), optimizer.state[weight]
    for step in (1, 2, 3):
        weight.grad = torch.sin(step * torch.arange(4096)).to(dtype)
        means = tuple(
            state[name].double() if state else torch.zeros(4096).double() for name in ("exp_avg", "exp_avg_sq")
        )
        key_draws(optimizer, 0, step)
        optimizer.step()
        exact, m, v = adamw_step(exact, weight.grad.double(), means, step, lr, betas, eps, decay)
        found = weight.detach().double() + (state["compensation"].double() if dtype == torch.bfloat16 else 0)
        torch.testing.assert_close(found, exact, rtol=2.0**-15, atol=1e-7)
        for name, mean in (("exp_avg", m), ("exp_avg_sq", v)):
            torch.testing.assert_close(state[name].double(), mean, rtol=2.0**-7, atol=1e-12)
            assert state[name].double().mean() == pytest.approx(mean.mean().item(), abs=2e-5)
        exact = found


@pytest.mark.parametrize("option", [AdamWBF16(lr=0.1), AdamW8bit(lr=0.1)], ids=lambda option: option.name)
def test_pieces_change_no_bit(option: AdamWBF16, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(piece: int) -> Tensor:
        monkeypatch.setattr(bf16_updates, "PIECE", piece)
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(96, 100).bfloat16())
        optimizer = RoundedOptimizer([weight], option.make, rounded=option.rounding == "stochastic")
        for step in range(3):
            weight.grad = torch.randn(96, 100).bfloat16()
            key_draws(optimizer, 0, step)
            optimizer.update(weight)
        return weight.detach()

    assert torch.equal(weights(1 << 20), weights(1024))


def test_strided_weights_step_as_those_in_order() -> None:
    torch.manual_seed(0)
    values, gradient = torch.randn(2, 30, 40).bfloat16()
    found = []
    for weight in (nn.Parameter(values.clone()), nn.Parameter(values.t().contiguous().t())):
        optimizer = AdamWBF16().build([weight])
        weight.grad = gradient.clone().as_strided(weight.shape, weight.stride()).copy_(gradient)
        key_draws(optimizer, 0, 0)
        optimizer.step()
        found.append(weight.detach())
    assert not found[1].is_contiguous() and torch.equal(*found)


def test_strided_gradients_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read in the order of memory."""
    monkeypatch.setitem(sys.modules, "simpletune.engine.optim.bf16_kernels", None)
    monkeypatch.setattr(bf16_updates.FALLBACK, "failed", {})
    given, strided = tensors_of((64, 64), torch.bfloat16), torch.randn(64, 64).t()
    read = [strided, *given[1][1:]]
    on_cuda("adamw_bf16", given[0], read, [0.1] * 6)
    on_cuda("round_into", given[0][0], strided, given[1][1])
    assert bf16_updates.FALLBACK.failed == {}


def test_the_prediction_counts_what_the_kernels_move() -> None:
    """The step reads weight, gradient, two means, compensation and 16 random bits of each mean, and writes all but the
    gradient."""
    given, n = tensors_of((64, 64), torch.bfloat16), 64 * 64
    step = torch.ops.simpletune.adamw_bf16.default
    assert list(works_of(step, (*given, [0.1] * 6), {}, None)) == [KernelWork("add", "bf16", (2 * n * (5 + 4 + 2),))]
    x = torch.randn(64, 64)
    found = list(works_of(torch.ops.simpletune.round_into.default, (given[0][0], x, given[1][1]), {}, None))
    assert sum(work.extents[0] for work in found) == n * (4 + 2 + 2)
