"""OFT: its outputs, gradients and weights against the definition, over every frozen precision and with the levers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import BLOCKS, LateCopies, Setting, loss_of, prepare, transformer
from frozen_layers import IN, OUT, frozen, weight_of, weighted
from reference import dora_oft
from torch import Tensor

from simpletune.adapters.methods.formulas import block_rotations, triangle_of, upper
from simpletune.adapters.methods.layers import all_layers, innermost_layer
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.oft_layer import OftLayer
from simpletune.engine.quant.precision import FP32
from simpletune.system.options import Problem

SIDE = 8


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv", "int8", "nf4", "quanto"])
def test_output_gradients_and_weight_are_those_of_the_definition(kind: str, bias: bool) -> None:
    base: Any = frozen(kind, bias)
    triangle = torch.randn(OUT // SIDE, SIDE * (SIDE - 1) // 2) * 0.2
    layer = OftLayer(base, {"oft_triangle": triangle})
    w, offset = weight_of(base), None if base.bias is None else base.bias.double()
    x = torch.randn(2, IN, 3, 4) if kind == "conv" else torch.randn(2, 5, IN)
    wide, blocks = x.double().requires_grad_(), upper(triangle.double(), SIDE).requires_grad_()

    def product(weight: Tensor) -> Tensor:
        return F.conv2d(wide, weight[..., None, None], offset) if kind == "conv" else F.linear(wide, weight, offset)

    turned = dora_oft.oft(w, blocks)
    y = product(turned)
    weighted(y).backward()
    x.requires_grad_()
    found = layer(x * 1)
    weighted(found).backward()
    torch.testing.assert_close(found.double(), y, rtol=1e-5, atol=1e-5)
    assert layer.oft_triangle.grad is not None and x.grad is not None and blocks.grad is not None
    rows, columns = torch.triu_indices(SIDE, SIDE, 1)
    expected = blocks.grad[:, rows, columns]
    torch.testing.assert_close(layer.oft_triangle.grad.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    shape = (OUT, IN, 1, 1) if kind == "conv" else (OUT, IN)
    layer.scaling["default"] = 0.3
    merged = layer.merge(w.float().view(shape)).double().view(OUT, IN)
    torch.testing.assert_close(merged, w + 0.3 * (turned - w), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(x.detach()).double(), product(merged), rtol=1e-5, atol=1e-5)


def test_a_rotation_is_orthogonal_and_a_zero_one_changes_nothing() -> None:
    torch.manual_seed(0)
    rotation = block_rotations(torch.randn(3, 28), SIDE) + torch.eye(SIDE)
    torch.testing.assert_close(rotation @ rotation.transpose(1, 2), torch.eye(SIDE).expand(3, -1, -1))
    base, x = frozen("linear"), torch.randn(4, IN)
    still = OftLayer(base, {"oft_triangle": torch.zeros(OUT // SIDE, 28)})
    torch.testing.assert_close(still(x), base(x), rtol=0, atol=0)
    w = frozen("linear").get_parameter("weight")
    turned = OftLayer(base, {"oft_triangle": torch.randn(OUT // SIDE, 28)}).merge(w)
    torch.testing.assert_close(torch.linalg.svdvals(turned), torch.linalg.svdvals(w))  # the paper's point
    triangle = torch.randn(2, 28)
    torch.testing.assert_close(triangle_of(upper(triangle, SIDE)), triangle, rtol=0, atol=0)


def test_blocks_divide_half_the_outputs() -> None:
    oft = Oft(block_size=32)
    assert [oft.side(outputs) for outputs in (1536, 320, 96, 40, 35, 6)] == [32, 32, 24, 20, 7, 3]
    assert oft.trainable({"transformer_blocks.0.attn.to_q.weight": (1536, 64)}) == 48 * 32 * 31 // 2
    odd = {"transformer_blocks.0.attn.to_q.weight": (2 * 37, 64)}
    (problem,) = oft.problems(odd)
    assert isinstance(problem, Problem) and problem.path == "adapter.block_size" and "74 outputs" in problem.message
    assert list(Oft(block_size=37).problems(odd)) == []


def gradients(setting: Setting) -> tuple[list[float], dict[str, Tensor]]:
    model = transformer(FP32())
    Oft(block_size=8).attach(model, 7)
    torch.manual_seed(5)
    for _, layer in all_layers(model):
        assert isinstance(layer, OftLayer) and innermost_layer(layer) is layer.base_layer
        layer.oft_triangle.data.normal_().mul_(0.1)
    prepare(model.train(), setting)
    losses = []
    for micro in range(2):
        loss = loss_of(model, FP32(), micro)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_checkpointing_and_streaming_give_the_same_bits() -> None:
    plain = gradients(Setting(checkpointed=0))
    streamed = Setting(queue=LateCopies, host=True, streamed=tuple(range(BLOCKS)), poison=True)
    for setting in (Setting(checkpointed=2), streamed):
        torch.testing.assert_close(gradients(setting), plain, rtol=0, atol=0)


def test_disabled_it_is_the_base() -> None:
    model = transformer(FP32())
    base = loss_of(model, FP32(), 0).item()
    adapter = Oft(block_size=8)
    adapter.attach(model, 7)
    for _, layer in all_layers(model):
        assert isinstance(layer, OftLayer)
        layer.oft_triangle.data.normal_()
    with adapter.disabled(model):
        assert loss_of(model, FP32(), 0).item() == base
    assert loss_of(model, FP32(), 0).item() != base


def test_compiled_without_a_break_it_computes_the_same() -> None:
    layer = OftLayer(frozen("linear"), {"oft_triangle": torch.randn(OUT // SIDE, 28) * 0.2})
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, IN, requires_grad=True)
    results = []
    for call in (layer, compiled):
        y = call(x)
        results.append((y, *torch.autograd.grad(weighted(y), [x, layer.oft_triangle])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
