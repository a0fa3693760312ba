"""LoKr and LoHa in training: products and gradients against their definitions, what they keep, and what files hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import lycoris
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import TrainOnce
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.adapters.methods.layers import UpdateLayer, detach, outer_layers, updates_disabled
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lokr_layer import add_kronecker, sides
from simpletune.adapters.methods.targets import LayerMethod
from simpletune.config.load import validate
from simpletune.engine.quant.precision import BF16, Int8, Nf4
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.training.train import train

METHODS = {
    "lokr": Lokr(factor=4, rank=2),
    "lokr, whole": Lokr(factor=4, rank=None),
    "lokr, both decomposed": Lokr(factor=8, rank=1, decompose_both=True),
    "lokr, square": Lokr(factor=-1, rank=None),
    "loha": Loha(rank=3),
}
FILE = "pytorch_lora_weights.safetensors"
SIDES = {"to_q": (24, 40), "to_k": (64, 24), "to_v": (7, 30)}


class Attention(nn.Module):
    """Three linear layers of one input's names, of different widths, and a pointwise convolution."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (outputs, inputs) in SIDES.items():
            setattr(self, name, nn.Linear(inputs, outputs, dtype=dtype))
        self.pointwise = nn.Conv2d(12, 20, 1, dtype=dtype)


def attached(method: LayerMethod, dtype: torch.dtype = torch.float32) -> Attention:
    """The layers with updates that are not zero."""
    model = Attention(dtype)
    method = method.model_copy(update={"targets": [*SIDES, "pointwise"]})
    method.attach(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    for _, layer in updated(model):
        for factor in layer.factors.values():
            factor.data = torch.randn(factor.shape, generator=generator).to(dtype)
    return model


def updated(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in outer_layers(model) if isinstance(layer, UpdateLayer))


def reference(layer: Any) -> Tensor:  # fp64 [o, i]
    factors = {name: factor.detach().double() for name, factor in layer.factors.items()}
    return lycoris.loha(factors) if "hada_w1_a" in factors else lycoris.lokr(factors)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """fp32, 1e-5 of the largest value."""
    expected = expected.float()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * max(expected.abs().max().item(), 1e-3))


@pytest.mark.parametrize("method", METHODS)
def test_outputs_gradients_and_merged_weights_are_those_of_the_definition(method: str) -> None:
    model = attached(METHODS[method])
    for name, layer in updated(model):
        frozen = layer.base_layer
        sample = (2, 5, layer.shape[1]) if name in SIDES else (2, layer.shape[1], 3, 5)
        x = torch.randn(sample, generator=torch.Generator().manual_seed(3)).requires_grad_()
        factors = {n: f.detach().double().requires_grad_() for n, f in layer.factors.items()}
        x64 = x.detach().double().requires_grad_()
        delta = lycoris.loha(factors) if "hada_w1_a" in factors else lycoris.lokr(factors)
        whole = frozen.weight.double() + delta.view_as(frozen.weight)
        product = nn.functional.linear if name in SIDES else nn.functional.conv2d
        expected = product(x64, whole, frozen.bias.double())
        y = layer(x)
        assert_close(y, expected)
        pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
        y.backward(pull)
        expected.backward(pull.double())
        assert_close(x.grad, x64.grad)
        for factor, tensor in layer.factors.items():
            assert_close(tensor.grad, factors[factor].grad)
        assert_close(layer.merge(frozen.weight.detach()), whole.detach())


@pytest.mark.parametrize("input_trains", [True, False])
@pytest.mark.parametrize("outer", [(4, 6, 5, 3), (3, 2, 7, 5), (2, 3, 3, 9)])
def test_each_side_of_a_whole_second_factor_gives_right_gradients(outer: tuple, input_trains: bool) -> None:
    left, right, below, beyond = outer
    x, w1, w2 = (torch.randn(shape, dtype=torch.float64) for shape in ((3, right * beyond), outer[:2], outer[2:]))
    w1.requires_grad_(), w2.requires_grad_(), x.requires_grad_(input_trains)

    def added(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return add_kronecker(torch.zeros(3, left * below, dtype=torch.float64), x, w1, *sides(w1, w2))

    torch.autograd.gradcheck(lambda *t: added(t[0] if input_trains else x, *t[-2:]), [x, w1, w2][not input_trains :])


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes, views aside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("method", METHODS)
def test_training_never_builds_the_difference(method: str) -> None:
    side = 96
    model = nn.ModuleDict({"to_q": nn.Linear(side, side)})
    METHODS[method].model_copy(update={"targets": ["to_q"]}).attach(model, seed=0)
    x = torch.randn(4, side, requires_grad=True)
    with _Largest() as seen:
        model["to_q"](x).sum().backward()
    assert seen.largest < side * side // 8


@pytest.mark.parametrize("method", ["lokr", "lokr, whole", "loha"])
def test_a_layer_keeps_its_input_and_no_more_than_lora_does(method: str) -> None:
    side, rows = 256, 64
    model = nn.ModuleDict({"to_q": nn.Linear(side, side)}).bfloat16()
    METHODS[method].model_copy(update={"targets": ["to_q"], "dtype": "bf16"}).attach(model, seed=0)
    x = torch.randn(rows, side, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model["to_q"](x)
    own = sum(factor.numel() for _, layer in updated(model) for factor in layer.factors.values())
    extra = sum(kept.values()) - kept.get(x.data_ptr(), 0) - kept.get(model["to_q"].base_layer.weight.data_ptr(), 0)
    assert x.data_ptr() in kept
    assert extra <= (own + 2 * 3**2 * side + rows * 3**2 if method == "loha" else own + side)


@pytest.mark.parametrize("method", METHODS)
def test_an_update_begins_at_zero_and_every_factor_then_moves(method: str) -> None:
    model = Attention()
    before = {name: getattr(model, name) for name in SIDES}
    METHODS[method].model_copy(update={"targets": list(SIDES)}).attach(model, seed=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    first = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for name, (_, inputs) in SIDES.items():
        x = torch.randn(4, inputs)
        assert torch.equal(getattr(model, name)(x), before[name](x))
    for _ in range(2):  # what multiplies the zero factor moves in the second step
        for name, (_, inputs) in SIDES.items():
            getattr(model, name)(torch.randn(4, inputs)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all((p != first[name]).any() for name, p in model.named_parameters() if p.requires_grad)
    with updates_disabled(model):
        for name, (_, inputs) in SIDES.items():
            x = torch.randn(4, inputs)
            assert torch.equal(getattr(model, name)(x), before[name](x))
    detach(model)
    assert all(getattr(model, name) is layer for name, layer in before.items())


@pytest.mark.parametrize("precision", [BF16(), Int8(), Nf4()], ids=lambda precision: precision.weights)
@pytest.mark.parametrize("method", ["lokr", "loha"])
def test_over_frozen_precisions_it_adds_the_same_update(method: str, precision: Any) -> None:
    """The frozen layer's own output differs by precision; what is added to it does not."""
    plain = nn.Linear(128, 64)
    frozen = plain.bfloat16() if precision.weights == "bf16" else precision.convert(plain)
    model = nn.ModuleDict({"to_q": frozen})
    METHODS[method].model_copy(update={"targets": ["to_q"]}).attach(model, seed=0)
    ((_, layer),) = updated(model)
    for factor in layer.factors.values():
        factor.data = torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)) / 4
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad():
        added = layer(x).float() - frozen(x).float()
    expected = x.float() @ reference(layer).float().t()
    assert (added - expected).norm() < 0.02 * expected.norm()


def test_shapes_of_factors() -> None:
    shapes = parameter_shapes(SD3().files.known_config())
    assert Lokr(factor=16).factor_shapes(1536, 1536) == {
        "lokr_w1": (16, 16), "lokr_w2_a": (96, 16), "lokr_w2_b": (16, 96)
    }  # fmt: skip
    assert Lokr(factor=16, rank=48).factor_shapes(1536, 1536) == {"lokr_w1": (16, 16), "lokr_w2": (96, 96)}
    assert Lokr(factor=-1, rank=None).factor_shapes(6144, 1536) == {"lokr_w1": (64, 32), "lokr_w2": (96, 48)}
    assert Lokr(factor=16, rank=None).factor_shapes(7, 30) == {"lokr_w1": (1, 5), "lokr_w2": (7, 6)}
    counts = {f: Lokr(factor=f, rank=None).trainable(shapes) for f in (2, 4, 8, 16, -1)}
    assert counts == {n: 191 * (n * n + 1536**2 // n**2) for n in (2, 4, 8, 16)} | {-1: 191 * (32**2 + 48**2)}
    assert "LoKr of factor 16, rank 16, on 191 linear layers (attention)" == Lokr().describe(shapes)
    assert Loha(rank=4).trainable(shapes) == 191 * 2 * 4 * 3072


@pytest.mark.parametrize("factor", [0, 1, -2, 2000])
def test_a_factor_that_is_none_is_refused(factor: int, tiny_config: dict) -> None:
    with pytest.raises(Exception, match="adapter.factor"):
        validate(tiny_config | {"adapter": {"method": "lokr", "factor": factor}}, "x")


LEVERS: dict[str, dict] = {
    "streamed, in backward": {
        "checkpointing": "all", "resident_blocks": 0, "offload_checkpoint_inputs": True, "optimizer_in_backward": True,
    },
    "plan": {"modulation": "plan", "modulation_window": 2},
}  # fmt: skip


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("method", ["lokr", "loha"])
def test_levers_train_the_same_weights(method: str, lever: str, tiny_config: dict, train_once: TrainOnce) -> None:
    adapter = {"lokr": {"method": "lokr", "factor": 4, "rank": 1}, "loha": {"method": "loha", "rank": 2}}[method]
    data = copy.deepcopy(tiny_config) | {"adapter": adapter, "precision": {"weights": "int8"}}
    data["train"] |= {"clip": "per_parameter", "clip_norm": 0.5}
    with_lever = data | {"name": "lever", "memory": {"checkpointing": "none"} | LEVERS[lever]}
    plain, lever_file = load_file(train_once(data) / FILE), load_file(train(validate(with_lever, "x")) / FILE)
    assert plain.keys() == lever_file.keys() and any("w2_b" in name or "w2_a" in name for name in plain)
    for name, tensor in plain.items():  # the plan computes the modulation in batches of other sizes
        torch.testing.assert_close(lever_file[name], tensor, rtol=0, atol=1e-3 if lever == "plan" else 0)
    assert any(tensor.abs().max() > 0 for name, tensor in plain.items() if name.endswith(("lokr_w2_b", "hada_w2_a")))


def test_compiled_without_a_break_it_computes_the_same() -> None:
    layers = [attached(method).to_q for method in METHODS.values()]
    x = torch.randn(3, SIDES["to_q"][1], requires_grad=True)
    factors = [factor for layer in layers for factor in layer.factors.values()]

    def call(x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in layers]

    results = []
    for way in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        ys = way(x)
        results.append([*ys, *torch.autograd.grad([y.square().sum() for y in ys], [x, *factors])])
    for ours, theirs in zip(*results, strict=True):
        assert_close(theirs, ours)
    torch.compiler.reset()


def test_in_bf16_it_is_nearer_to_the_exact_sum_than_a_built_difference() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w, w1, w2 = (torch.randn(s, generator=generator) for s in ((64, 96), (96, 96), (4, 4), (24, 24)))
    exact = x @ w.t() + x @ torch.kron(w1, w2).t()
    half = [tensor.bfloat16() for tensor in (x, w, w1, w2)]
    y = nn.functional.linear(half[0], half[1])
    built = y + nn.functional.linear(half[0], torch.kron(half[2], half[3]))
    reused = y.clone()
    added = add_kronecker(reused, half[0], w1, *sides(w1, w2))
    assert added.dtype == torch.bfloat16 and added.data_ptr() == reused.data_ptr()
    assert (added.float() - exact).norm() < (built.float() - exact).norm()
