"""Rotated frozen layers: the matrix, layers and rows against a float64 reference, errors, levers, bytes, whole runs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from blocks import PRECISIONS, loss_of, on_cuda, transformer, unet
from frozen_layers import QUANTILES
from hypothesis import given, settings
from hypothesis import strategies as st
from products import Counted, losses, with_products
from reference.rotation import block_rotation, rounded_rows, rounded_to_quantiles
from simulated import LEVERS, assert_same_bytes
from torch import Tensor, nn

import simpletune.engine.quant
from simpletune.adapters.methods.lora import Lora
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.engine.kernels import fallback
from simpletune.engine.quant import int8_linear, int8_products
from simpletune.engine.quant.int8_conv import Int8Conv2d
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import Nf4Linear
from simpletune.engine.quant.precision import Int8, Nf4
from simpletune.engine.quant.rotation import hadamard, rotate_rows, rotates_weight, rotation_block
from simpletune.engine.tensors import row_blocks
from simpletune.estimate.timing.work import KernelWork, works_of
from simpletune.system.options import ConfigError

LAYER, MODULATION = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.norm1.linear"
ROTATED = {
    "int8": Int8(compute="fp32", rotation="hadamard"),
    "products": Int8(compute="fp32", products="int8", rotation="hadamard"),
    "gradients": Int8(compute="fp32", products="int8", input_gradient="int8", rotation="hadamard"),
    "nf4": Nf4(compute="fp32", rotation="hadamard", double_quantisation=False),
}


def linear(inputs: int, outputs: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.weight.data = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    if bias:
        layer.bias.data = torch.randn(outputs, generator=generator)
    return layer


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """Student's t of four degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    squares = torch.randn(4, *shape, generator=generator).square().mean(0)
    return torch.randn(shape, generator=generator) / squares.sqrt()


def error(ours: Tensor, exact: Tensor | np.ndarray) -> float:
    exact = torch.as_tensor(exact).double()
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("width", [16, 48, 64, 320, 256, 1536])
def test_the_matrix_is_regular_orthogonal_and_its_own_inverse(width: int) -> None:
    h = block_rotation(width)
    assert (h == h.T).all() and np.allclose(h @ h, np.eye(width), atol=1e-12) and np.ptp(h.sum(axis=0)) < 1e-12
    block = rotation_block("hadamard", nn.Linear(width, 1, device="meta"))
    assert torch.equal(hadamard(torch.eye(width), block).double(), torch.from_numpy(h))


def test_the_largest_block_that_divides_the_inputs_is_used() -> None:
    widths = {1536: 256, 6144: 256, 2432: 64, 9728: 256, 320: 64, 640: 64, 768: 256, 384: 64, 48: 16, 40: 0, 24: 0}
    layers = {width: nn.Linear(width, 1, device="meta") for width in widths}
    assert {width: rotation_block("hadamard", layer) for width, layer in layers.items()} == widths
    assert {rotation_block("none", layer) for layer in layers.values()} == {0}


@settings(max_examples=30, deadline=None)
@given(
    block=st.sampled_from([16, 64, 256]), count=st.integers(1, 4), rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rotating_is_the_float64_products_and_rounds_once(
    block: int, count: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    x = torch.randn(rows, count * block, generator=torch.Generator().manual_seed(seed)).to(dtype)
    h = np.kron(np.eye(count), block_rotation(block))
    exact = torch.from_numpy(x.double().numpy() @ h)
    size = torch.from_numpy(np.abs(x.double().numpy()) @ np.abs(h))
    assert ((hadamard(x.float(), block).double() - exact).abs() <= 1e-6 * size).all()
    step = torch.finfo(dtype).eps / 2
    assert ((rotate_rows(x, block).double() - exact).abs() <= step * exact.abs() + 1e-6 * size).all()


@pytest.mark.parametrize("shape", [(1, 16), (2, 5, 128), (33, 768)])
def test_the_operations_are_what_fake_tensors_and_the_compiler_take_them_for(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    block = rotation_block("hadamard", nn.Linear(shape[-1], 1, device="meta"))
    torch.library.opcheck(torch.ops.simpletune.rotated.default, (x, block))
    torch.library.opcheck(torch.ops.simpletune.int8_rotated_rows.default, (x, block))


@pytest.mark.parametrize("rows", [20, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROTATED)
def test_outputs_and_input_gradients_are_the_references(name: str, dtype: torch.dtype, rows: int) -> None:
    """With 20 rows the inputs are rotated and with 90, more than outputs, the weight is rotated back."""
    plain = linear(192, 80)
    layer = ROTATED[name].convert(LAYER, plain)
    x = torch.randn(2, rows // 2, 192, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    assert layer.block == 64 and rotates_weight(x, 80) == (rows == 90)
    y = layer(x)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(grad_y)

    h, weight = block_rotation(192), plain.weight.detach().double().numpy()
    turned = rounded_to_quantiles(weight @ h, np.array(QUANTILES)) if name == "nf4" else None
    given_rows = x.detach().double().numpy().reshape(-1, 192)
    if turned is None:  # scales are rounded up to bf16 numbers: the layer's own levels
        turned = layer.weight.double().numpy() * layer.scale.double().numpy()[:, None]
        assert error(torch.from_numpy(turned), weight @ h) < 0.01
    assert error(layer.dequantise(), turned @ h) < 1e-6
    right = given_rows @ h
    expected = (rounded_rows(right) if name in ("products", "gradients") else right) @ turned.T
    expected += plain.bias.detach().double().numpy()
    rounding = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert error(y.detach().flatten(0, 1), expected) < rounding + (1e-4 if name in ("products", "gradients") else 0)
    back = grad_y.double().numpy().reshape(-1, 80) @ turned @ h
    assert error(x.grad.flatten(0, 1), back) < (0.012 if name == "gradients" else rounding)
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize("name", ROTATED)
def test_what_reads_the_weight_gets_it_unrotated(name: str) -> None:
    plain = linear(192, 80)
    layer = ROTATED[name].convert(LAYER, plain)
    whole = layer.dequantise()
    assert error(whole, plain.weight.detach()) < (0.11 if name == "nf4" else 0.01)
    torch.testing.assert_close(torch.cat([*row_blocks(layer, 80, 33)]), whole, rtol=0, atol=0)
    eye = ROTATED["int8" if name != "nf4" else name].convert(LAYER, plain)(torch.eye(192)) - plain.bias.detach()
    torch.testing.assert_close(eye.t(), whole, rtol=1e-5, atol=1e-6)


def test_outliers_lose_three_quarters_of_the_error_and_heavy_tails_a_seventh() -> None:
    plain, generator = linear(1536, 256, bias=False), torch.Generator().manual_seed(3)
    x = torch.randn(100, 1536, generator=generator)
    x[:, torch.randperm(1536, generator=generator)[:8]] *= 30
    exact = x.double() @ plain.weight.detach().double().t()
    outliers = [
        error(Int8(compute="fp32", products="int8", rotation=rotation).convert(LAYER, plain)(x).detach(), exact)
        for rotation in ("none", "hadamard")
    ]
    assert 0.045 < outliers[0] < 0.065 and outliers[1] < outliers[0] / 4
    plain.weight.data = heavy_tailed(256, 1536)
    tails = [
        error(Nf4(rotation=rotation).convert(LAYER, plain).dequantise(), plain.weight.detach())
        for rotation in ("none", "hadamard")
    ]
    assert 0.105 < tails[0] < 0.12 and tails[1] < tails[0] * 6 / 7


@pytest.mark.parametrize("rows", [20, 200])
@pytest.mark.parametrize("name", ROTATED)
def test_keeps_no_activation_and_no_copy_of_the_weight(name: str, rows: int) -> None:
    layer, kept = ROTATED[name].convert(LAYER, linear(32, 64)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(rows, 32, requires_grad=True))
    own = {tensor.data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    assert kept and {tensor.data_ptr() for tensor in kept} <= own


def test_rows_shared_by_layers_are_rotated_once() -> None:
    precision = PRECISIONS["int8-rotated"]
    model = transformer(precision)
    Lora(rank=2, targets="all_linear").attach(model, 7)
    with Counted() as counted:
        loss = loss_of(model, precision, 0)
    blocks = len(model.transformer_blocks)
    assert counted.calls["simpletune::int8_rotated_rows"] == 4 * blocks and counted.quantised == 0
    with Counted() as counted:
        loss.backward()
    assert counted.calls["simpletune::int8_rotated_rows"] == 0 and counted.quantised > 0
    x = torch.randn(40, 16)
    assert int8_linear.shared_rows(x, 16) is not int8_linear.shared_rows(x)


def test_modulation_is_rotated_whatever_its_rows() -> None:
    """Else a plan's window, which has many rows, would round otherwise than the model itself."""
    for precision in (*ROTATED.values(), Nf4(modulation="nf4", rotation="hadamard")):
        layer = precision.convert(MODULATION, linear(32, 24))
        assert layer.block == 16 and not layer.rotates_weight
        with Counted() as counted:
            layer(torch.randn(100, 32))
        assert counted.calls == {"simpletune::rotated": 1}


@pytest.mark.parametrize(("precision", "kind"), [(ROTATED["int8"], Int8Linear), (ROTATED["nf4"], Nf4Linear)])
def test_the_linear_layers_of_every_family_are_rotated_and_convolutions_are_not(precision: Any, kind: type) -> None:
    for model in (transformer(precision), unet("sd15", precision), unet("sd2", precision)):
        found = [m for m in model.modules() if isinstance(m, Int8Linear | Nf4Linear)]
        assert any(isinstance(m, kind) and m.block for m in found)
        assert all(m.block == (16 if m.in_features % 16 == 0 else 0) or m.block == 64 for m in found)
        outside = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert not any(hasattr(m, "block") for m in outside)
        assert any(isinstance(m, Int8Conv2d) for m in outside) == hasattr(model, "conv_in")


@pytest.mark.parametrize("version", ["sd15", "sd2"])
def test_a_unet_predicts_what_its_unrotated_weights_do(version: str) -> None:
    """The same quantised weights in plain fp32 layers give the same losses."""
    from blocks import DENOISERS

    precision = PRECISIONS["nf4-rotated"]
    model = DENOISERS[version].build(precision, "cpu")
    ours = DENOISERS[version].loss(model, precision, 0, "cpu")
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, Int8Linear | Nf4Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight.data, plain.bias = layer.dequantise(), layer.bias
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, plain)
    torch.testing.assert_close(ours, DENOISERS[version].loss(model, precision, 0, "cpu"), rtol=1e-5, atol=0)


CASES: dict[str, dict] = {
    "products": {},
    "dequantised": {"precision": {"products": "dequantised", "input_gradient": "dequantised"}},
    "plan-streamed": LEVERS["plan-streamed"] | {"memory": LEVERS["plan-streamed"]["memory"] | {"checkpointing": "all"}},
}


@pytest.mark.parametrize(
    "case", ["products", *(pytest.param(each, marks=pytest.mark.slow) for each in list(CASES)[1:])]
)
def test_real_and_fake_tensors_take_the_same_bytes(case: str, tiny_config: dict, three_blocks: Path) -> None:  # noqa: F811 the fixture
    data = with_products(tiny_config, **copy.deepcopy(CASES[case]))
    data["precision"]["rotation"] = "hadamard"
    data["model"]["pretrained"] = str(three_blocks)
    with Counted() as counted:
        assert_same_bytes(validate(data, case))
    assert counted.calls["simpletune::rotated"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("version", ["sd15", "sd2"])
def test_a_unet_takes_the_same_bytes_real_and_fake(version: str, tiny_config: dict, small_unet: Any) -> None:  # noqa: F811 the fixture
    data = tiny_config | {"model": small_unet(version), "data": tiny_config["data"] | {"resolution": 64}}
    data["precision"] = {"weights": "nf4", "compute": "bf16", "rotation": "hadamard"}
    assert_same_bytes(validate(data, version))


def test_time_sees_a_product_for_every_rotation() -> None:
    x = torch.ones(8, 512)
    y = rotate_rows(x, 256)
    assert [*works_of(torch.ops.simpletune.rotated.default, (x, 256), {}, y)] == [
        KernelWork("product_nn", "fp32", (16, 256, 256))
    ]
    rows = int8_products.int8_rotated_rows(x, 256)
    (work,) = works_of(torch.ops.simpletune.int8_rotated_rows.default, (x, 256), {}, rows)
    assert work == KernelWork("int8_rows", "fp32", (x.nbytes + 8 * 512 + 8 * 4,))


def rotating(tiny_config: dict, **changes: Any) -> dict:
    data = with_products(tiny_config, **changes)
    data["precision"]["rotation"] = "hadamard"
    return data


def test_whole_runs(tiny_config: dict) -> None:
    """Rotation really happens, checkpointing changes no bit, and a resumed run is the whole one."""
    with Counted() as counted:
        whole = losses(rotating(tiny_config, name="whole"))
    assert counted.calls["simpletune::int8_rotated_rows"] > 0
    assert losses(rotating(tiny_config, name="checkpointed", memory={"checkpointing": "all"})) == whole
    losses(rotating(tiny_config, name="halves", train={"steps": 2}, checkpoint={"every": 2}))
    assert losses(rotating(tiny_config, name="halves"), resume="latest") == whole
    plain = losses(with_products(tiny_config, name="plain"))
    assert plain != whole and plain == pytest.approx(whole, rel=0.02)


def test_cached_bases_without_a_rotation_keep_their_key() -> None:
    assert Int8().cache_key() == {"weights": "int8", "compute": "bf16"}
    assert "rotation" not in Nf4().cache_key()
    assert Int8(rotation="hadamard").cache_key() == {"weights": "int8", "compute": "bf16", "rotation": "hadamard"}
    assert Nf4(rotation="hadamard").cache_key()["rotation"] == "hadamard"


def test_check_says_that_layers_are_rotated(tiny_config: dict) -> None:
    for weights in ("int8", "nf4"):
        precision = {"weights": weights, "rotation": "hadamard"}
        told = explain(validate(tiny_config | {"precision": precision}, "told"))
        assert re.search(r"weights and inputs rotated \(hadamard\)", told)
        assert "rotated" not in explain(validate(tiny_config | {"precision": {"weights": weights}}, "told"))


@pytest.mark.parametrize("weights", ["bf16", "fp32", "int8-quanto"])
def test_other_precisions_have_no_rotation(weights: str, tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=r"precision\.rotation"):
        validate(tiny_config | {"precision": {"weights": weights, "rotation": "hadamard"}}, "refused")


def test_a_kernel_that_rotates_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer then rotates by torch and multiplies with the dequantised weight."""
    layer, x = ROTATED["products"].convert(LAYER, linear(32, 64)), torch.randn(40, 32)
    monkeypatch.setattr(int8_linear, "why_not_rotated", lambda device: "it errs")
    with Counted() as counted:
        y = layer(x)
    assert counted.calls == {"simpletune::rotated": 1}
    torch.testing.assert_close(y, nn.functional.linear(x, layer.dequantise(), layer.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["wrong", "no compiler"])
def test_the_trial_of_the_kernel(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(x: Tensor, block: int, least: float) -> tuple[Tensor, Tensor]:
        if fault == "no compiler":
            raise RuntimeError("Failed to find C compiler.\nmore")
        q, scale = int8_products.rounded_rows(hadamard(x.cpu(), block))
        return -q, scale

    said: list[str] = []
    monkeypatch.setattr(int8_products, "say", said.append)
    monkeypatch.setattr(simpletune.engine.quant, "int8_rows_kernel", SimpleNamespace(rotated_rows=rows), raising=False)
    monkeypatch.setattr(Tensor, "to", lambda self, device: self)
    reason = int8_products.why_not_rotated(torch.device("cuda", 61 if fault == "wrong" else 62))
    assert "differ from the CPU's" in str(reason) if fault == "wrong" else "Failed to find C compiler" in str(reason)
    assert len(said) == 1 and "where inputs are rotated" in said[0]


def test_rows_that_do_not_compile_are_rotated_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    said: list[str] = []
    monkeypatch.setattr(int8_products.FALLBACK, "failed", {})
    monkeypatch.setattr(fallback, "say", said.append)
    monkeypatch.setattr(simpletune.engine.quant, "int8_rows_kernel", SimpleNamespace(rotated_rows=fail), raising=False)
    x = torch.randn(20, 48)
    for _ in range(2):
        found = on_cuda("int8_rotated_rows", x, 16)
        torch.testing.assert_close(found, int8_products.int8_rotated_rows(x, 16), rtol=0, atol=0)
    assert len(said) == 1 and "NO LONGER" in said[0]
