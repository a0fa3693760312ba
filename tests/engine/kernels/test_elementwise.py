"""Adaptive norms, gates and residuals as single operators: diffusers' bits on the CPU, float64 in the kernels."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import on_cuda
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from reference.adaln import gated_sum, modulated_norm
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import elementwise
from benchmarks.elementwise import Row
from simpletune.engine.kernels import adaln, rms_norm, rotary, swiglu
from simpletune.engine.kernels.adaln import GatedTokens, ScaleShift, add_gated, normalise_and_modulate
from simpletune.engine.memory.checkpointing import set_passes
from simpletune.engine.memory.kernel_workspace import temporaries
from simpletune.engine.optim import bf16_updates
from simpletune.engine.quant import int8_gelu, int8_products
from simpletune.estimate.timing.sections import KernelWork
from simpletune.estimate.timing.work import works_of
from simpletune.models.sd3.joint_block import JointBlock, use_joint_blocks
from simpletune.system.options import UserError

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = {
    "plain": {}, "last": {"context_pre_only": True}, "norms of q and k": {"qk_norm": "rms_norm"},
    "dual": {"qk_norm": "rms_norm", "use_dual_attention": True},
    "dual and last": {"context_pre_only": True, "use_dual_attention": True},
}  # fmt: skip
TRAINED = {"all": ".", "attention": "attn.to_", "modulation of the text": "norm1_context.linear.weight"}
Block = Callable[..., tuple[Tensor | None, Tensor]]


def blocks(kind: str, trained: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """diffusers' block and ours, with the same weights."""
    torch.manual_seed(0)
    theirs = JointTransformerBlock(32, 2, 16, **KINDS[kind]).to(dtype)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(TRAINED[trained] in name)
    ours = copy.deepcopy(theirs)
    use_joint_blocks([ours])
    return theirs, ours


def inputs(dtype: torch.dtype, gradient: bool, samples: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (samples, 12, 32), (samples, 5, 32), (samples, 32)
    made = [(torch.randn(shape, generator=generator) * 2).to(dtype) for shape in shapes]
    return [*(each.requires_grad_(gradient) for each in made[:2]), made[2]]


def results(block: nn.Module, run: Block, given: list[Tensor]) -> list[Tensor | None]:
    """Outputs, and gradients of inputs and weights."""
    given = [each.detach().clone().requires_grad_(each.requires_grad) for each in given]
    text, image = run(*given)
    generator = torch.Generator().manual_seed(2)
    outputs = [each for each in (image, text) if each is not None]
    loss = sum((each.float() * torch.randn(each.shape, generator=generator)).sum() for each in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*outputs, *(each.grad for each in given), *(each.grad for each in block.parameters())]


def assert_same_bits(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None and b is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), number


CASES = [
    pytest.param(
        kind, trained, dtype, id=f"{kind}-{trained}-{name}",
        marks=[] if (kind == "dual" or name == "bf16") and trained == "all" else [pytest.mark.slow],
    )
    for kind in KINDS for trained in TRAINED for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
]  # fmt: skip


@pytest.mark.parametrize(("kind", "trained", "dtype"), CASES)
def test_a_block_has_diffusers_bits_on_the_cpu(kind: str, trained: str, dtype: torch.dtype) -> None:
    theirs, ours = blocks(kind, trained, dtype)
    assert isinstance(ours, JointBlock)
    for gradient, autocast in ((True, False), (True, True), (False, False)):
        given = inputs(dtype, gradient)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same_bits(results(ours, ours, given), results(theirs, theirs, given))
    with torch.no_grad():
        assert_same_bits(list(ours(*given)), list(theirs(*given)))


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names[op._schema.name.partition("::")[2]] += 1
        return op(*args, **(kwargs or {}))


def test_a_block_runs_each_step_once_and_recomputes_no_last_sum() -> None:
    _, block = blocks("plain", "attention", torch.float32)
    set_passes([block], 1)
    with Counted() as forward:
        text, image = block(*inputs(torch.float32, True, samples=1))
    assert text is not None
    ours = {"modulate", "add_gated", "modulate_backward", "gate_backward"}
    assert {name: count for name, count in forward.names.items() if name in ours} == {"modulate": 4, "add_gated": 2}
    with Counted() as backward:
        (text.sum() + image.sum()).backward()
    expected = {"modulate": 4, "modulate_backward": 4, "gate_backward": 2}
    assert {name: count for name, count in backward.names.items() if name in ours} == expected
    assert backward.names["cat"] == 3 + 1 and not backward.names["clone"]  # q, k, v; the gradient of the output


def test_a_saved_tensor_is_the_input_and_nothing_wide() -> None:
    """Without gradients of the modulations a block saves its norm's input, and two numbers a token."""
    x = torch.randn(2, 6, 32, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.randn(2, 96, dtype=torch.bfloat16).chunk(3, dim=1)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        normalise_and_modulate(x, GatedTokens(x * 2, rows[0]), [ScaleShift(*rows[1:])], 1e-6)
    sides = sorted((tuple(each.shape), each.dtype) for each in saved if each.dim() == 3 or each.dtype == torch.float32)
    assert sides == [((2, 6), torch.float32), ((2, 6), torch.float32), ((2, 6, 32), torch.bfloat16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_sums_and_gradients_are_those_of_the_papers(dtype: torch.dtype) -> None:
    """On the CPU in fp32 to its precision; in bf16 within the roundings between its operators."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 7, 24), (2, 7, 24), *((2, 24),) * 3)
    given = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    exact = [each.detach().double().requires_grad_() for each in given]
    weights = [torch.randn(2, 7, 24, generator=generator) for _ in range(3)]

    x, y, gate, scale, shift = given
    total, (out,) = normalise_and_modulate(x, GatedTokens(y, gate), [ScaleShift(scale, shift)], 1e-6)
    (last,) = add_gated((total, GatedTokens(out, gate)))
    found = [total, out, last]
    wide = gated_sum(*exact[:3])
    normed_ = modulated_norm(wide, *exact[3:], 1e-6)
    expected = [wide, normed_, gated_sum(wide, normed_, exact[2])]
    for results_ in (found, expected):
        sum((each * weight.to(each.dtype)).sum() for each, weight in zip(results_, weights, strict=True)).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    for a, b in zip([*found, *(t.grad for t in given)], [*expected, *(t.grad for t in exact)], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


def test_unlike_types_take_torchs_operators() -> None:
    x, rows = torch.randn(1, 3, 8), torch.randn(2, 1, 8, dtype=torch.bfloat16)
    with Counted() as counted:
        _, (out,) = normalise_and_modulate(x, None, [ScaleShift(*rows)], 1e-6)
        (total,) = add_gated((x, GatedTokens(x, rows[0])))
    assert out.dtype == total.dtype == torch.float32
    assert not counted.names["modulate"] and not counted.names["add_gated"]
    exact = modulated_norm(x.double(), rows[0].double(), rows[1].double(), 1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.05)


def test_the_operations_are_what_fake_tensors_take_them_for() -> None:
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.simpletune
    for dtype in (torch.float32, torch.bfloat16):
        x, y, grad, grad_2 = torch.randn(4, 2, 5, 16).to(dtype)
        rows = torch.randn(5, 2, 16).to(dtype).unbind()
        statistics = [torch.zeros(2, 5), torch.ones(2, 5)]
        for added in ((None, None), (y, rows[0])):
            given = (x, *added, list(rows[1:3]), list(rows[3:]), 1e-6)
            torch.library.opcheck(ops.modulate.default, given, test_utils=checks)
            for trains in (True, False):
                back = ([grad, grad_2], x, *added, y, list(rows[1:3]), statistics, 1e-6, trains)
                torch.library.opcheck(ops.modulate_backward.default, back, test_utils=checks)
        torch.library.opcheck(ops.add_gated.default, (x, y, rows[0]), test_utils=checks)
        torch.library.opcheck(ops.gate_backward.default, (x, y, rows[0]), test_utils=checks)
        torch.library.opcheck(ops.gate_backward.default, (x, None, rows[0]), test_utils=checks)
        heads, weight = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(8).to(dtype)
        torch.library.opcheck(ops.rms_norm.default, (heads, weight, 1e-6), test_utils=checks)
        torch.library.opcheck(ops.rms_norm_backward.default, (heads, heads, weight, 1e-6, True), test_utils=checks)
        (parts, weights), (cos, sin) = ([heads, heads[:, :2]], [weight] * 2), torch.randn(2, 1, 7, 4)
        for early in (True, False):
            given = (parts, weights, cos, sin, 1e-6, early)
            torch.library.opcheck(ops.rms_norm_rotary.default, given, test_utils=checks)
            turned = torch.randn(2, 7, 3, 8).to(dtype)
            torch.library.opcheck(ops.rms_norm_rotary_backward.default, (turned, *given, early), test_utils=checks)
        gate, value = grad.chunk(2, dim=-1)
        torch.library.opcheck(ops.swiglu.default, (gate, value), test_utils=checks)
        for joined in (True, False):
            torch.library.opcheck(ops.swiglu_backward.default, (value, gate, value, joined), test_utils=checks)


def test_the_prediction_counts_what_the_kernels_move_and_hold() -> None:
    """Every number once, and the partial sums of gradients of modulations, written and read: one row for 32 tokens."""
    b, n, d = 2, 70, 64
    x, y, total, grad = torch.randn(4, b, n, d).bfloat16().unbind()
    gate, scale, shift = torch.randn(3, b, d).bfloat16().unbind()
    whole, row = 2 * b * n * d, 2 * b * d
    ops, statistics = torch.ops.simpletune, [torch.zeros(b, n)] * 2

    def moved(op, *args):  # type: ignore[no-untyped-def]
        return list(works_of(op.default, args, {}, op(*args)))

    assert moved(ops.modulate, x, y, gate, [scale], [shift], 1e-6) == [
        KernelWork("norm", "bf16", (4 * whole + 3 * row + 2 * 4 * b * n,))
    ]
    back = ([grad], x, None, gate, total, [scale], statistics, 1e-6, False)
    assert moved(ops.modulate_backward, *back) == [
        KernelWork("norm_backward", "bf16", (5 * whole + 2 * row + 8 * b * n,))
    ]
    trained = ([grad], x, y, gate, total, [scale], statistics, 1e-6, True)
    parts = 4 * 3 * b * 3 * d  # fp32, of gate, scale and shift, 3 programs a sample
    assert moved(ops.modulate_backward, *trained) == [
        KernelWork("norm_backward", "bf16", (6 * whole + (2 + 3) * row + 8 * b * n + 2 * parts,))
    ]
    assert moved(ops.add_gated, x, y, gate) == [KernelWork("add", "bf16", (3 * whole + row,))]
    assert moved(ops.gate_backward, x, None, gate) == [KernelWork("add", "bf16", (2 * whole + row,))]
    terms = temporaries()
    assert terms[ops.modulate_backward.default](*back) == 0 == terms[ops.gate_backward.default](x, None, gate)
    assert terms[ops.modulate_backward.default](*trained) == parts + 4 * 3 * b * d
    assert terms[ops.gate_backward.default](x, y, gate) == parts // 3 + 4 * b * d
    heads, weight = x.view(b, n, 4, 16), scale[0, :16]
    assert moved(ops.rms_norm, heads, weight, 1e-6) == [KernelWork("norm", "bf16", (2 * whole + 32,))]
    assert terms[ops.rms_norm_backward.default](heads, heads, weight, 1e-6, True) == 4 * 16 * 3 + 4 * 16
    assert terms[ops.rms_norm_backward.default](heads, heads, weight, 1e-6, False) == 0
    tables = torch.zeros(2, 1, 2 * n, 8)
    parts = ([heads, heads], [weight] * 2, *tables)
    both = 2 * 2 * whole + 2 * 32 + 2 * 4 * 2 * n * 8
    assert moved(ops.rms_norm_rotary, *parts, 1e-6, False) == [KernelWork("norm", "bf16", (both,))]
    turned = torch.cat([heads, heads], dim=1), *parts, 1e-6, True
    assert moved(ops.rms_norm_rotary_backward, *turned, False) == [
        KernelWork("norm_backward", "bf16", (both + 2 * whole,))
    ]
    assert terms[ops.rms_norm_rotary_backward.default](*turned, True) == 4 * 16 * 3 + 4 * 16
    halves = x.chunk(2, dim=-1)
    assert moved(ops.swiglu, *halves) == [KernelWork("add", "bf16", (whole + whole // 2,))]
    assert moved(ops.swiglu_backward, halves[1], *halves, True) == [
        KernelWork("add", "bf16", (2 * whole + whole // 2,))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("joined", [True, False], ids=["halves", "two tensors"])
def test_swiglu_has_diffusers_bits_and_saves_its_inputs_alone(joined: bool, dtype: torch.dtype) -> None:
    """Of halves of a wider tensor, as a parallel block has them, and of outputs of two layers."""
    generator = torch.Generator().manual_seed(4)
    wide = (torch.randn(2, 7, 45, generator=generator) * 3).to(dtype)
    grad = torch.randn(2, 7, 25, generator=generator).to(dtype)[..., 5:]
    found: list[list[Tensor]] = []
    saved: list[Tensor] = []
    for ours in (True, False):
        x = wide.clone().requires_grad_()
        part, own = x[..., 5:], []
        gate, value = part.chunk(2, dim=-1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, own=own: own.append(t) or t, lambda t: t):
            if ours:
                out = swiglu.swiglu(part) if joined else swiglu.swiglu(gate, value)
                saved = own
            else:
                out = Flux2SwiGLU()(part) if joined else torch.nn.functional.silu(gate) * value
        out.backward(grad)
        assert x.grad is not None
        found.append([out, x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert [each.shape[-1] for each in saved] == ([40] if joined else [20, 20])
    with torch.no_grad(), Counted() as counted:
        assert torch.equal(swiglu.swiglu(wide[..., 5:]), found[0][0]) and counted.names["swiglu"] == 1


def test_a_gradient_of_halves_is_written_once() -> None:
    x = torch.randn(1, 3, 16, requires_grad=True)
    out = swiglu.swiglu(x)
    with Counted() as counted:
        out.sum().backward()
    assert counted.names["swiglu_backward"] == 1
    assert not any(counted.names[each] for each in ("silu_backward", "slice_backward", "add", "mul"))


WIDE = torch.linspace(-2, 2, 20 * 32).view(20, 32)
NOISE = torch.zeros(20, 32, dtype=torch.int16)
FALLBACKS: list[tuple[str, Any, str, tuple[Any, ...], str]] = [
    ("add_gated", adaln, "kernels.adaln_kernels.add_gated", (WIDE[None], WIDE[None], WIDE[:1]), "residuals by torch's"),
    ("rms_norm", rms_norm, "kernels.rms_kernels.rms_norm", (WIDE, WIDE[0], 1e-6), "norms without means by torch's"),
    (
        "rms_norm_rotary", rotary, "kernels.rotary_kernels.rms_norm_rotary",
        ([WIDE.view(1, 4, 5, 32)], [WIDE[0]], WIDE[None, :4, :16], WIDE[None, 4:8, :16], 1e-6, False),
        "rotary positions by torch's",
    ),
    ("swiglu", swiglu, "kernels.swiglu_kernels.swiglu", (WIDE, WIDE + 1), "SwiGLU by torch's operators on cpu"),
    (
        "round_into", bf16_updates, "optim.bf16_kernels.round_into", (WIDE.bfloat16() * 0, WIDE, NOISE),
        "updates of bf16 numbers by torch's operators on cpu",
    ),
    ("int8_rows", int8_products, "quant.int8_rows_kernel.rows", (WIDE, None), "NO LONGER in int8 on cpu"),
    ("int8_rotated_rows", int8_products, "quant.int8_rows_kernel.rotated_rows", (WIDE, 16), "NO LONGER in int8"),
    ("int8_gelu_rows", int8_gelu, "quant.int8_rows_kernel.gelu_rows", (WIDE, 16), "NO LONGER quantised in one launch"),
    (
        "int8_gelu_gradient_rows", int8_gelu, "quant.int8_rows_kernel.gelu_rows", (WIDE, 1 - WIDE, WIDE[1].abs()),
        "NO LONGER quantised in one launch on cpu, but in two: RuntimeError: no compiler",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "owner", "kernel", "given", "words"), FALLBACKS, ids=lambda value: str(value)[:24]
)
def test_a_kernel_that_fails_is_replaced_once_for_all(
    operator: str, owner: Any, kernel: str, given: tuple[Any, ...], words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """The operators of CUDA, given the CPU's tensors and a module of kernels that fail; not where memory is full."""
    calls: list[Exception] = []

    def fail(*_: Any) -> None:
        calls.append(fails)
        raise fails

    module, _, name = f"simpletune.engine.{kernel}".rpartition(".")
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: fail}))
    monkeypatch.setattr(module, sys.modules[module], raising=False)
    monkeypatch.setattr(owner.FALLBACK, "failed", {})
    fails: Exception = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        on_cuda(operator, *given)
    fails = RuntimeError("Triton Error [CUDA]: out of memory")  # tried once more
    with pytest.raises(torch.OutOfMemoryError, match="Triton Error"):
        on_cuda(operator, *given)
    assert len(calls) == 3 and not owner.FALLBACK.failed
    fails = RuntimeError("no compiler\nmore")
    first = copy.deepcopy(given[0])
    expected = getattr(torch.ops.simpletune, operator)(first, *given[1:]), first
    for _ in range(2):
        changed = copy.deepcopy(given[0])
        found = on_cuda(operator, changed, *given[1:]), changed
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(calls) == 4
    out = capsys.readouterr().out
    assert out.count(words) == out.count("RuntimeError: no compiler") == 1


FEW = [Row(89, "modulate_backward", "trained", "Medium", "bf16"), Row(75, "modulate", "added", "Medium", "fp16")]
TABLE = json.loads(elementwise.COMMITTED.read_text())["rows"]
GOOD = {"registers": 64, "stack": 0, "shared": 16, "warps": 4, "wide": 4, "flushed": 0}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("row", FEW, ids=lambda row: row.name)
def test_the_kernels_compile_for_cards_that_are_not_here(row: Row) -> None:
    found = elementwise.measure(row)
    assert elementwise.problems(row, found) == []
    kept = [TABLE[name] for name in TABLE if name.endswith(f": {row.name}")]
    assert found in [{key: value for key, value in each.items() if key != "source"} for each in kept]


def test_the_committed_table_is_that_of_the_kernels() -> None:
    for name, row_ in TABLE.items():
        source = elementwise.source_hash(elementwise.kernel_of(name))
        assert row_["source"] == source, "simpletune/engine/kernels has changed: make kernels"
    versions = {name.partition(":")[0] for name in TABLE}
    minors = {version.rpartition(".")[0] for version in versions}
    assert minors == {"Triton 3.6", "Triton 3.7", "Triton 3.8", "Triton 3.9"}  # pyproject.toml's
    for version in versions:
        for row in elementwise.rows_of_table():
            assert elementwise.problems(row, TABLE[f"{version}: {row.name}"]) == [], row.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared": 101377}, "101,377 bytes of shared memory.*101,376"), ({"registers": 513}, "513 registers in 4"),
        ({"stack": 24}, "24 bytes spilled"), ({"wide": 0}, "not vectors"), ({"flushed": 1}, "ftz"),
        ({"fails": "PassManager::run failed"}, "does not compile: PassManager"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(change: dict, message: str) -> None:
    assert elementwise.problems(FEW[0], GOOD) == []
    (told,) = elementwise.problems(FEW[0], GOOD | change)
    assert re.search(message, told)


def test_the_grid_compiles_what_is_missing_and_fails_for_a_broken_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    compiled: list[str] = []
    found = dict(GOOD)
    monkeypatch.setattr(elementwise, "rows_of_table", lambda: iter(FEW))
    monkeypatch.setattr(elementwise, "measure", lambda row: compiled.append(row.name) or dict(found))
    assert "64 x 4 warps, 16 B" in elementwise.run(tmp_path, 60).read_text() and len(compiled) == 2
    elementwise.run(tmp_path, 60)
    assert len(compiled) == 2
    monkeypatch.setattr(elementwise, "source_hash", lambda kernel: "another")
    found["stack"] = 32
    with pytest.raises(UserError, match="sm_75 modulate added Medium fp16: 32 bytes spilled"):
        elementwise.run(tmp_path, 60)
    assert len(compiled) == 4
