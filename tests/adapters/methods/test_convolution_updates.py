"""Updates of convolutions with larger kernels: products, gradients and weights against the built difference, what they
keep, and which layers get them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from reference import dora_oft
from slow_cases import slow_but
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.dora_layers import DoraLayer
from simpletune.adapters.methods.layers import UpdateLayer, layer_shapes, outer_layers
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.lora_layers import limit_norm
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.engine.quant.int8_conv import Int8Conv2d
from simpletune.engine.tensors import row_blocks
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared.flops import count_flops, trained_of

IN, OUT = 8, 12
GEOMETRIES = {"3x3": (3, 1, 1), "down": (3, 2, 1), "down-unpadded": (3, 2, 0), "5x3": ((5, 3), (1, 2), (2, 1))}
"""Kernel, stride and padding."""
METHODS: dict[str, Any] = {
    "lora": Lora(rank=2, conv_rank=3, conv_alpha=4.5, targets=["conv1"]),
    "dora": Dora(rank=2, conv_rank=3, conv_alpha=2.0, targets=["conv1"]),
    "loha": Loha(rank=1, conv_rank=2, targets=["conv1"]),
    "lokr": Lokr(factor=2, conv_rank=1, targets=["conv1"]),
    "lokr, whole": Lokr(factor=2, conv_rank=1024, targets=["conv1"]),
    "lokr, both decomposed": Lokr(factor=4, conv_rank=1, decompose_both=True, targets=["conv1"]),
}


def attached(method: TargetedMethod, geometry: str = "3x3", base: str = "fp32", bias: bool = True) -> nn.ModuleDict:
    """A convolution with an update that is not zero."""
    torch.manual_seed(0)
    kernel, stride, padding = GEOMETRIES[geometry]
    layer: nn.Conv2d = nn.Conv2d(IN, OUT, kernel, stride, padding, bias=bias)  # type: ignore[arg-type]
    if base == "int8":
        layer = Int8Conv2d.from_conv(layer, torch.float32)
    model = nn.ModuleDict({"conv1": layer.to(torch.bfloat16 if base == "bf16" else torch.float32)})
    method.attach(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) / 2
        elif parameter.requires_grad:
            parameter.data *= 1 + torch.rand(parameter.shape, generator=generator) / 2
    return model


def factors_of(layer: Any) -> dict[str, Tensor]:
    return {name.replace(".default", ""): p for name, p in layer.named_parameters() if p.requires_grad}


def changed(method: TargetedMethod, w: Tensor, factors: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """The weight by the formulas of PEFT and LyCORIS, entry by entry, from float64 factors."""
    if "lora_A.weight" in factors:
        a, b = factors["lora_A.weight"].flatten(1), factors["lora_B.weight"].flatten(1)
        scale = method.scale_of("conv1")  # type: ignore[attr-defined]
        if "magnitude" in factors:
            return dora_oft.dora(w.flatten(1), a, b, scale, factors["magnitude"]).view(shape)
        return w + scale * torch.einsum("or,ri->oi", b, a).view(shape)
    if "hada_w1_a" in factors:
        a1, b1, a2, b2 = (factors[f"hada_w{name}"] for name in ("1_a", "1_b", "2_a", "2_b"))
        return w + torch.einsum("or,ri,os,si->oi", a1, b1, a2, b2).view(shape)
    w1 = factors["lokr_w1"] if "lokr_w1" in factors else factors["lokr_w1_a"] @ factors["lokr_w1_b"]
    w2 = factors["lokr_w2"] if "lokr_w2" in factors else factors["lokr_w2_a"] @ factors["lokr_w2_b"]
    w2 = w2.reshape(shape[0] // w1.shape[0], shape[1] // w1.shape[1], *shape[2:])
    return w + torch.einsum("lm,kqhw->lkmqhw", w1, w2).reshape(shape)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=tolerance * max(expected.abs().max().item(), 1e-3)
    )


@pytest.mark.parametrize("base", ["fp32", "int8"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", METHODS)
def test_outputs_gradients_and_weights_are_those_of_the_built_difference(name: str, geometry: str, base: str) -> None:
    method = METHODS[name]
    for bias, contiguous in ((True, True), (False, True), (True, False)):
        model = attached(method, geometry, base, bias)
        layer: Any = model["conv1"]
        frozen = layer.base_layer
        w = torch.cat(list(row_blocks(frozen, OUT))).double().view(OUT, IN, *frozen.kernel_size)
        x = torch.randn(2, IN, 9, 8)
        x = x if contiguous else x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        factors = {n: f.detach().double().requires_grad_() for n, f in factors_of(layer).items()}
        wide = x.detach().double().requires_grad_()
        whole = changed(method, w, factors, w.shape)
        offset = None if frozen.bias is None else frozen.bias.double()
        expected = F.conv2d(wide, whole, offset, frozen.stride, frozen.padding)
        y = layer(x)
        pull = torch.randn(y.shape)
        y.backward(pull)
        expected.backward(pull.double())
        assert_close(y, expected.detach())
        assert x.grad is not None and wide.grad is not None
        assert_close(x.grad, wide.grad)
        for n, factor in factors_of(layer).items():
            assert_close(factor.grad, factors[n].grad, 1e-5 if n == "magnitude" else 2e-6)  # type: ignore[arg-type]
        if isinstance(layer, UpdateLayer):
            assert_close(layer.merge(w.float()), whole.detach())
        with torch.no_grad():  # as in drawing
            assert_close(layer(x.detach()), expected.detach())


@pytest.mark.parametrize("geometry", ["3x3", "down"])
def test_lora_is_pefts(geometry: str) -> None:
    kernel, stride, padding = GEOMETRIES[geometry]
    ours: Any = attached(METHODS["lora"], geometry)
    torch.manual_seed(0)
    plain = nn.ModuleDict({"conv1": nn.Conv2d(IN, OUT, kernel, stride, padding)})  # type: ignore[arg-type]
    theirs: Any = inject_adapter_in_model(LoraConfig(r=3, lora_alpha=4.5, target_modules=["conv1"]), plain)  # type: ignore[arg-type]
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, IN, 9, 8)
    results = []
    for model in (ours, theirs):
        y = model["conv1"](x)
        y.square().mean().backward()
        results.append((y, *(p.grad for p in model.parameters() if p.requires_grad)))
    assert len(results[0]) == 3
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", slow_but(["lora", "lokr"], METHODS))
def test_bf16_autocast_and_the_compiler_compute_the_same(name: str) -> None:
    layer: Any = attached(METHODS[name])["conv1"]
    x = torch.randn(2, IN, 6, 6)
    exact = layer(x).detach()
    half: Any = attached(METHODS[name], base="bf16")["conv1"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layer(x)
    for y in (half(x.bfloat16()), cast):
        assert y.dtype == torch.bfloat16
        assert (y.float() - exact).norm() < 0.03 * exact.norm()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads = []
    for call in (layer, compiled):
        y = call(x)
        grads.append((y, *torch.autograd.grad(y.square().sum(), [*factors_of(layer).values()])))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)
    torch.compiler.reset()


@pytest.mark.parametrize("name", METHODS)
def test_training_builds_no_difference_and_keeps_little(name: str) -> None:
    """Backward keeps the input and the factors; LoRA, DoRA and LoHa also r channels, and DoRA the output."""
    side, pixels = 64, 25
    model = nn.ModuleDict({"conv1": Int8Conv2d.from_conv(nn.Conv2d(side, side, 3, 1, 1), torch.float32)})
    METHODS[name].attach(model, seed=0)
    x = torch.randn(1, side, 5, 5, requires_grad=True)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model["conv1"](x)
    assert x.data_ptr() in kept
    for tensor in (x, y, *model.parameters(), *model.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    extra = sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values())
    assert extra <= (2 * own if name not in ("lora", "dora") else 0) + 4 * pixels + 10 * side
    assert extra < side * side * 9


def test_dropouts_and_the_limit_of_norms() -> None:
    off = METHODS["lora"].model_copy(update={"module_dropout": 0.999999})
    layer: Any = attached(off)["conv1"]
    x = torch.randn(1, IN, 5, 5)
    torch.testing.assert_close(layer(x), layer.base_layer(x))
    layer.eval()
    assert not torch.allclose(layer(x), layer.base_layer(x))
    ranks: Any = attached(METHODS["lora"].model_copy(update={"rank_dropout": 0.5}))["conv1"]
    assert not torch.equal(ranks(x), ranks(x))
    a, b = torch.randn(3, IN, 3, 3), torch.randn(OUT, 3, 1, 1)
    limit_norm(a, b, 1.5, 0.25)
    assert (1.5 * b.flatten(1) @ a.flatten(1)).norm().item() == pytest.approx(0.25, rel=1e-5)


def test_dora_starts_as_the_frozen_layer() -> None:
    for geometry in GEOMETRIES:
        kernel, stride, padding = GEOMETRIES[geometry]
        frozen: Any = nn.Conv2d(IN, OUT, kernel, stride, padding).bfloat16().requires_grad_(False)  # type: ignore[arg-type]
        x = torch.randn(1, IN, 9, 8).bfloat16()
        torch.testing.assert_close(DoraLayer(frozen, 2)(x), frozen(x), rtol=0, atol=0)


def unet(family: str) -> dict[str, tuple[int, ...]]:
    return dict({"sd15": SD15, "sdxl": SDXL}[family]().architecture.known_shapes())


@pytest.mark.parametrize(("family", "convolutions", "others"), [("sd15", 50, 22 + 14), ("sdxl", 38, 17 + 11)])
def test_conv_rank_adds_the_layers_of_kohyas_conv_dim(family: str, convolutions: int, others: int) -> None:
    """All of the residual blocks and samplers, neither conv_in nor conv_out: sd-scripts' ``networks/lora.py``."""
    shapes = unet(family)
    plain, conv = Lora(targets="all_linear"), Lora(targets="all_linear", conv_rank=8, conv_alpha=4.0, rank=16)
    before = plain.modules(shapes)
    added = [name for name in conv.modules(shapes) if name not in before]
    larger = [name for name in added if len(shapes[f"{name}.weight"]) == 4 and shapes[f"{name}.weight"][2] > 1]
    assert (len(larger), len(added) - len(larger)) == (convolutions, others)
    assert {conv.rank_of(name) for name in larger} == {8} and {conv.scale_of(name) for name in larger} == {0.5}
    assert {conv.rank_of(name) for name in added if name not in larger} == {16}
    ends = {name.rpartition(".")[2] for name in added}
    assert ends == {"conv1", "conv2", "conv", "time_emb_proj", "conv_shortcut"}
    sizes = (shapes[f"{name}.weight"] for name in larger)
    without = [{"pattern": end, "rank": 0} for end in ("conv1", "conv2", "conv")]
    less = Lora.model_validate(conv.model_dump() | {"layers": without})
    own = sum(8 * (shape[0] + math.prod(shape[1:])) for shape in sizes)
    assert conv.trainable(shapes) - less.trainable(shapes) == own
    assert f"and of rank 8, scale 0.5, on {convolutions} 3x3 convolutions (all_linear and resnets)" in conv.describe(
        shapes
    )


@pytest.mark.parametrize("name", ["lora", "dora", "loha", "lokr"])
def test_trainable_counts_are_those_of_the_attached_layers(name: str) -> None:
    model = attached(METHODS[name])
    shapes = {f"{n}.weight": s for n, s in layer_shapes(nn.ModuleDict({"conv1": nn.Conv2d(IN, OUT, 3)})).items()}
    assert METHODS[name].trainable(shapes) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert len(outer_layers(model)) == 1


IN_PLACE = {torch.ops.aten.baddbmm_: lambda y, a, b, **more: 2 * a[0] * a[1] * a[2] * b[2]}


@pytest.mark.parametrize("geometry", ["3x3", "down"])
@pytest.mark.parametrize("name", METHODS)
def test_operations_are_those_that_torch_counts(name: str, geometry: str) -> None:
    model = attached(METHODS[name], geometry)
    trained = trained_of(
        {n.replace(".default", ""): tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    )
    kernel, stride, padding = GEOMETRIES[geometry]
    x = torch.randn(2, IN, 8, 8, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as forward:  # type: ignore[arg-type]
        y = model["conv1"](x)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as backward:  # type: ignore[arg-type]
        y.sum().backward()
    with torch.device("meta"):
        empty = nn.ModuleDict({"conv1": nn.Conv2d(IN, OUT, kernel, stride, padding)})  # type: ignore[arg-type]
        given = torch.zeros(2, IN, 8, 8, requires_grad=True)
    flops = count_flops(empty, lambda: empty["conv1"](given), trained)
    between = 0  # products of factors alone, which are not counted
    if name == "lokr, both decomposed":
        shapes = {n: tuple(f.shape) for n, f in factors_of(model["conv1"]).items()}
        (tall, rank), (_, wide) = shapes["lokr_w1_a"], shapes["lokr_w1_b"]
        between = 2 * tall * rank * wide
    assert forward.get_total_flops() == flops.forward + between
    assert backward.get_total_flops() == flops.backward + flops.recomputed + 2 * between


def problems(method: TargetedMethod, shapes: Any) -> str:
    return " ".join(f"{each.path}: {each.message}" for each in method.problems(shapes))


def test_what_cannot_be_is_refused_with_the_remedy() -> None:
    shapes = unet("sd15")
    assert "'conv1' matches only convolutions with a kernel larger than 1x1. Give them a rank by adapter.conv_rank" in (
        problems(Lora(targets=["conv1"]), shapes)
    )
    assert "OFT does not update them. Use other adapter.targets, or adapter.method lora" in (
        problems(Oft(targets=["conv1"]), shapes)
    )
    assert "adapter.conv_rank: 4 is for a U-Net's convolutions, and this model has none" in (
        problems(Lora(conv_rank=4), SD3().architecture.known_shapes())
    )
    assert "adapter.targets names none. Add endings such as conv1" in problems(
        Lora(conv_rank=4, targets=["to_q"]), shapes
    )
    assert "adapter.conv_alpha: 2 has no effect without adapter.conv_rank" in problems(Lora(conv_alpha=2.0), shapes)
    pattern = Lora.model_validate({"layers": [{"pattern": "conv2", "rank": 2}]})
    assert "Give them a rank by adapter.conv_rank" in problems(pattern, shapes)
    assert not problems(pattern.model_copy(update={"conv_rank": 4}), shapes)
    assert not problems(Lora(conv_rank=4, targets=["conv1", "conv_in"]), shapes)
