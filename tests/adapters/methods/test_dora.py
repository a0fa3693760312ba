"""DoRA: its outputs, gradients and weights against the definition, over every frozen precision, and what it builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import BLOCKS, LateCopies, Setting, loss_of, prepare, transformer
from frozen_layers import IN, OUT, RANK, SCALE, frozen, weight_of, weighted
from reference import dora_oft
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.adapters.methods.dora import Dora, dora_layers
from simpletune.adapters.methods.dora_layers import DoraLayer, rescaled, squared_norms
from simpletune.adapters.methods.layers import innermost_layer
from simpletune.engine.quant.precision import FP32


def shaken(layer: DoraLayer, size: float = 0.3) -> DoraLayer:
    """Give an update that counts to a layer that starts without one."""
    with torch.no_grad():
        layer.lora_B.weight.normal_().mul_(size)
        layer.magnitude.mul_(1 + size * torch.randn_like(layer.magnitude))
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv", "int8", "nf4", "nf4-double", "quanto"])
def test_output_gradients_and_weight_are_those_of_the_definition(kind: str, bias: bool) -> None:
    """Gradients of A, B, m and x, for the sum of the output times a fixed weighting."""
    layer = shaken(DoraLayer(frozen(kind, bias), RANK, SCALE))
    base: Any = innermost_layer(layer)
    w, offset = weight_of(base), None if base.bias is None else base.bias.double()
    x = torch.randn(2, IN, 3, 4) if kind == "conv" else torch.randn(2, 5, IN)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w[..., None, None], offset) if kind == "conv" else F.linear(x, w, offset)

    ours = [layer.lora_A.weight, layer.lora_B.weight, layer.magnitude, x.requires_grad_()]
    a, b, m, wide = theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    changed = dora_oft.dora(w, a, b, SCALE, m)
    y = product(wide, changed)
    weighted(y).backward()
    found = layer(x * 1)
    weighted(found).backward()
    torch.testing.assert_close(found.double(), y, rtol=1e-5, atol=1e-5)
    for tensor, wanted in zip(ours, theirs, strict=True):
        assert tensor.grad is not None and wanted.grad is not None
        torch.testing.assert_close(tensor.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5 * wanted.grad.abs().max())
    layer.scaling["default"] = 0.4
    shape = (OUT, IN, 1, 1) if kind == "conv" else (OUT, IN)
    half = layer.merge(w.float().view(shape)).double().view(OUT, IN)
    torch.testing.assert_close(half, w + 0.4 * (changed - w), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(x.detach()).double(), product(wide, half), rtol=1e-5, atol=1e-5)


def test_gradients_of_the_product_in_place_are_those_of_the_expression() -> None:
    torch.manual_seed(0)
    shapes = (2, 5, 6), (8, 6), (3, 6), (8, 3), (8,), (8,)
    x, w, a, b, delta, bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    trained = [tensor.requires_grad_() for tensor in (x, a, b, delta)]
    for offset in (bias, None):
        torch.autograd.gradcheck(lambda x, *t, o=offset: rescaled(F.linear(x, w, o), x, *t, o), trained)  # type: ignore
    y = F.linear(x, w, bias)
    place = y.data_ptr()
    plain = y + delta * (y - bias) + F.linear(F.linear(x, a), b)
    found = rescaled(y, x, a, b, delta, bias)
    assert found.data_ptr() == place
    torch.testing.assert_close(found, plain)
    strided = torch.empty(2, 8, 5, dtype=torch.float64).transpose(1, 2).copy_(F.linear(x, w, bias))
    torch.testing.assert_close(rescaled(strided, x, a, b, delta, bias), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_starts_as_the_frozen_layer_bit_for_bit(dtype: torch.dtype) -> None:
    base = frozen("linear").to(dtype)
    x = torch.randn(4, IN).to(dtype)
    torch.testing.assert_close(DoraLayer(base, RANK, SCALE, dtype)(x), base(x), rtol=0, atol=0)


def test_a_gain_in_bf16_is_finer_than_bf16_s_steps_near_1() -> None:
    """Only what it adds is rounded to bf16, to 8 bits of its own: 1.01 itself would become 1.0078."""
    layer = DoraLayer(frozen("linear", bias=False).bfloat16(), RANK)
    x = torch.randn(4096, IN).bfloat16()
    before = layer(x).float()
    layer.magnitude.data *= 1.01
    gained = (layer(x).float() * before).sum() / before.square().sum()
    assert gained.item() == pytest.approx(1.01, abs=1e-3)


def test_a_row_of_zeros_stays_zero_with_finite_gradients() -> None:
    base: Any = frozen("linear")
    base.weight[3] = 0
    layer = DoraLayer(base, RANK)
    x = torch.randn(2, IN)
    y = layer(x)
    y.square().sum().backward()
    torch.testing.assert_close(y[:, 3], base.bias[3].expand(2))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters() if p.requires_grad)
    assert layer.lora_B.weight.grad is not None and layer.lora_B.weight.grad[4].abs().sum() > 0


class _Made(TorchDispatchMode):
    """Keeps the sizes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.sizes.add(result.numel())
        return result


def test_training_builds_nothing_of_the_weight_s_size() -> None:
    layer = shaken(DoraLayer(frozen("linear"), RANK, SCALE))
    with _Made() as made:
        layer(torch.randn(5, IN)).square().sum().backward()
    assert max(made.sizes) < OUT * IN / 4
    large = nn.Linear(IN, 4096)
    with _Made() as made:
        squared_norms(large)
    assert max(made.sizes) <= 256 * IN


def gradients(setting: Setting, adapter: Dora) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some micro-batches and the gradients that add up."""
    model = transformer(FP32())
    adapter.attach(model, 7)
    torch.manual_seed(5)
    for _, layer in dora_layers(model):
        shaken(layer)
    streaming = prepare(model.train(), setting)
    assert (streaming is None) == (not setting.streamed)
    torch.manual_seed(0)
    losses = []
    for micro in range(2):
        loss = loss_of(model, FP32(), micro)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapter", [Dora(rank=2), Dora(rank=2, dropout=0.3, rank_dropout=0.4, module_dropout=0.2)])
def test_checkpointing_and_streaming_give_the_same_bits(adapter: Dora) -> None:
    plain = gradients(Setting(checkpointed=0), adapter)
    assert any("magnitude" in name for name in plain[1])
    streamed = Setting(queue=LateCopies, host=True, streamed=tuple(range(BLOCKS)), poison=True)
    for setting in (Setting(checkpointed=2), streamed):
        torch.testing.assert_close(gradients(setting, adapter), plain, rtol=0, atol=0)


def test_disabled_it_is_the_base() -> None:
    model = transformer(FP32())
    base = loss_of(model, FP32(), 0)
    adapter = Dora(rank=2)
    adapter.attach(model, 7)
    for _, layer in dora_layers(model):
        shaken(layer)
    with adapter.disabled(model):
        assert loss_of(model, FP32(), 0).item() == base.item()
    assert loss_of(model, FP32(), 0).item() != base.item()


def test_compiled_without_a_break_it_computes_the_same() -> None:
    layers = [shaken(DoraLayer(frozen(kind), RANK, SCALE)) for kind in ("linear", "int8", "conv")]
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((3, IN), (3, IN), (2, IN, 3, 4))]
    trained = [*inputs, *(f for layer in layers for f in (layer.lora_A.weight, layer.lora_B.weight, layer.magnitude))]

    def call() -> list[Tensor]:
        return [layer(x * 1) for layer, x in zip(layers, inputs, strict=True)]

    results = []
    for way in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        ys = way()
        results.append((*ys, *torch.autograd.grad([weighted(y) for y in ys], trained)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
