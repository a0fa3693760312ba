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
from blocks import DENOISERS, PRECISIONS, loss_of, transformer, unet
from fresh_caches import uncalled
from frozen_layers import QUANTILES
from hypothesis import given, settings
from hypothesis import strategies as st
from products import Counted, losses, with_products
from reference.rotation import block_rotation, rounded_rows, rounded_to_quantiles
from simulated import LEVERS, assert_same_bytes
from slow_cases import slow_but
from torch import Tensor, nn

import simpletune.engine.quant
from simpletune.adapters.methods.lora import Lora
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.engine.quant import int8_linear, int8_products
from simpletune.engine.quant.int8_conv import Int8Conv2d
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import Nf4Linear
from simpletune.engine.quant.precision import Int8, Nf4
from simpletune.engine.quant.rotation import hadamard, rotate_rows, rotates_weight, rotation_block
from simpletune.engine.tensors import row_blocks
from simpletune.estimate.timing.sections import KernelWork
from simpletune.estimate.timing.work import works_of
from simpletune.system.options import ConfigError

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


@pytest.mark.parametrize("width", [48, 320, 256, 768])
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


@pytest.mark.parametrize("rows", [20, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROTATED)
def test_outputs_and_input_gradients_are_the_references(name: str, dtype: torch.dtype, rows: int) -> None:
    """With 20 rows the inputs are rotated and with 90, more than outputs, the weight is rotated back. No activation
    and no copy of the weight is kept, and what reads the weight gets it unrotated."""
    plain = linear(192, 80)
    layer, kept = ROTATED[name].convert(plain), []
    x = torch.randn(2, rows // 2, 192, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    assert layer.block == 64 and rotates_weight(x, 80) == (rows == 90)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    own = {tensor.data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    assert kept and {tensor.data_ptr() for tensor in kept} <= own
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(grad_y)

    h, weight = block_rotation(192), plain.weight.detach().double().numpy()
    turned = rounded_to_quantiles(weight @ h, np.array(QUANTILES)) if name == "nf4" else None
    given_rows = x.detach().double().numpy().reshape(-1, 192)
    if turned is None:  # scales are rounded up to bf16 numbers: the layer's own levels
        turned = layer.weight.double().numpy() * layer.scale.double().numpy()[:, None]
        assert error(torch.from_numpy(turned), weight @ h) < 0.01
    whole = layer.dequantise()
    assert error(whole, turned @ h) < 1e-6
    torch.testing.assert_close(torch.cat([*row_blocks(layer, 80, 33)]), whole, rtol=0, atol=0)
    right = given_rows @ h
    expected = (rounded_rows(right) if name in ("products", "gradients") else right) @ turned.T
    expected += plain.bias.detach().double().numpy()
    rounding = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert error(y.detach().flatten(0, 1), expected) < rounding + (1e-4 if name in ("products", "gradients") else 0)
    back = grad_y.double().numpy().reshape(-1, 80) @ turned @ h
    assert error(x.grad.flatten(0, 1), back) < (0.012 if name == "gradients" else rounding)
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)


def test_outliers_lose_three_quarters_of_the_error_and_heavy_tails_a_seventh() -> None:
    plain, generator = linear(1536, 256, bias=False), torch.Generator().manual_seed(3)
    x = torch.randn(100, 1536, generator=generator)
    x[:, torch.randperm(1536, generator=generator)[:8]] *= 30
    exact = x.double() @ plain.weight.detach().double().t()
    outliers = [
        error(Int8(compute="fp32", products="int8", rotation=rotation).convert(plain)(x).detach(), exact)
        for rotation in ("none", "hadamard")
    ]
    assert 0.045 < outliers[0] < 0.065 and outliers[1] < outliers[0] / 4
    plain.weight.data = heavy_tailed(256, 1536)
    tails = [
        error(Nf4(rotation=rotation).convert(plain).dequantise(), plain.weight.detach())
        for rotation in ("none", "hadamard")
    ]
    assert 0.105 < tails[0] < 0.12 and tails[1] < tails[0] * 6 / 7


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
        layer = precision.convert(linear(32, 24), per_sample=True)
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


@pytest.mark.parametrize("case", slow_but(["products"], ["products", "dequantised", "plan-streamed"]))
def test_real_and_fake_tensors_take_the_same_bytes(case: str, tiny_config: dict, three_blocks: Path) -> None:  # noqa: F811 the fixture
    data = rotating(tiny_config, **copy.deepcopy(LEVERS.get(case, {})))
    if case == "dequantised":
        data["precision"] |= {"products": "dequantised", "input_gradient": "dequantised"}
    if case == "plan-streamed":
        data["memory"]["checkpointing"] = "all"
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


def test_fake_tensors_the_compiler_and_predicted_time_know_the_operations() -> None:
    rotated, rotated_rows = torch.ops.simpletune.rotated.default, torch.ops.simpletune.int8_rotated_rows.default
    for shape, block in (((2, 5, 128), 64), ((33, 768), 256)):
        torch.library.opcheck(rotated, (torch.randn(shape), block))
        torch.library.opcheck(rotated_rows, (torch.randn(shape), block))
    x = torch.ones(8, 512)
    product = KernelWork("product_nn", "fp32", (16, 256, 256))
    assert [*works_of(rotated, (x, 256), {}, rotate_rows(x, 256))] == [product]
    (work,) = works_of(rotated_rows, (x, 256), {}, int8_products.int8_rotated_rows(x, 256))
    assert work == KernelWork("int8_rows", "fp32", (x.nbytes + 8 * 512 + 8 * 4,))


def rotating(tiny_config: dict, **changes: Any) -> dict:
    data = with_products(tiny_config, **changes)
    data["precision"]["rotation"] = "hadamard"
    return data


def test_whole_runs(tiny_config: dict) -> None:
    """Rotation really happens, and checkpointing changes no bit."""
    tiny_config["train"]["steps"] = 2
    with Counted() as counted:
        whole = losses(rotating(tiny_config, name="whole"))
    assert counted.calls["simpletune::int8_rotated_rows"] > 0
    assert losses(rotating(tiny_config, name="checkpointed", memory={"checkpointing": "all"})) == whole


@pytest.mark.parametrize("option", [Int8, Nf4])
def test_check_says_that_layers_are_rotated_and_cached_bases_without_a_rotation_keep_their_key(
    option: Any, tiny_config: dict
) -> None:
    precision = {"weights": option().weights}
    told = explain(validate(tiny_config | {"precision": precision | {"rotation": "hadamard"}}, "told"))
    assert re.search(r"weights and inputs rotated \(hadamard\)", told)
    assert "rotated" not in explain(validate(tiny_config | {"precision": precision}, "told"))
    assert "rotation" not in option().cache_key()
    assert option(rotation="hadamard").cache_key() == option().cache_key() | {"rotation": "hadamard"}


@pytest.mark.parametrize("weights", ["bf16", "fp32", "int8-quanto"])
def test_other_precisions_have_no_rotation(weights: str, tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=r"precision\.rotation"):
        validate(tiny_config | {"precision": {"weights": weights, "rotation": "hadamard"}}, "refused")


def test_a_kernel_that_rotates_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer then rotates by torch and multiplies with the dequantised weight."""
    layer, x = ROTATED["products"].convert(linear(32, 64)), torch.randn(40, 32)
    monkeypatch.setattr(int8_linear, "rotation_problem", lambda device: "it errs")
    with Counted() as counted:
        y = layer(x)
    assert counted.calls == {"simpletune::rotated": 1}
    torch.testing.assert_close(y, nn.functional.linear(x, layer.dequantise(), layer.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("fails", "told"), [(False, "differ from the CPU's"), (True, "Failed to find C compiler")])
def test_the_trial_of_the_kernel(fails: bool, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(x: Tensor, block: int, least: float) -> tuple[Tensor, Tensor]:
        if fails:
            raise RuntimeError("Failed to find C compiler.\nmore")
        q, scale = int8_products.rounded_rows(hadamard(x.cpu(), block))
        return -q, scale

    said: list[str] = []
    monkeypatch.setattr(int8_products, "find_failure", uncalled(int8_products.find_failure))
    monkeypatch.setattr(int8_products, "say", said.append)
    monkeypatch.setattr(simpletune.engine.quant, "int8_rows_kernel", SimpleNamespace(rotated_rows=rows), raising=False)
    monkeypatch.setattr(Tensor, "to", lambda self, device: self)
    assert told in str(int8_products.rotation_problem(torch.device("cuda")))
    assert len(said) == 1 and "where inputs are rotated" in said[0]
