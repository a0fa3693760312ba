"""GELU quantised in one launch: the network against float64, its bytes, and what it leaves to the plain network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import PRECISIONS, transformer
from diffusers.models.attention import FeedForward
from peft import LoraConfig, inject_adapter_in_model
from products import Counted
from reference import int8_network
from reference.int8_network import Layer
from torch import Tensor, nn

from simpletune.adapters.methods.lora import Lora
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.feed_forward import FeedForwards
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.engine.quant import int8_gelu, int8_products
from simpletune.engine.quant.int8_gelu import fuse_feed_forwards
from simpletune.engine.quant.precision import Int8
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.sections import KernelWork
from simpletune.estimate.timing.work import works_of
from simpletune.system.gpus import find_card

WIDTH, ROWS = 16, 40


def network(gradient: str = "int8", compute: str = "fp32", rotation: str = "none", dropout: float = 0.0) -> FeedForward:
    """A feed-forward network of SD3 with int8 layers, not fused."""
    torch.manual_seed(3)
    plain = FeedForward(WIDTH, activation_fn="gelu-approximate", dropout=dropout)
    option = Int8(products="int8", input_gradient=gradient, compute=compute, rotation=rotation)
    plain.net[0].proj = option.convert(plain.net[0].proj)
    plain.net[2] = option.convert(plain.net[2])
    return plain


def passes(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The output and the input's gradient of a pass."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS // 2, WIDTH, generator=generator).to(dtype).requires_grad_()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return y.detach(), x.grad


def fused(module: FeedForward) -> FeedForward:
    fuse_feed_forwards([module])
    return module


class Block(nn.Module):
    """A block that ends with its network."""

    def __init__(self, fuses: bool = True) -> None:
        super().__init__()
        self.ff = fused(network()) if fuses else network()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(x)


@pytest.mark.parametrize("gradient", ["dequantised", "int8"])
def test_outputs_and_gradients_against_float64(gradient: str) -> None:
    module = fused(network(gradient))
    with Counted() as counted:
        y, grad = passes(module)
    assert counted.calls["simpletune::int8_gelu_rows"] == 1
    assert counted.calls["simpletune::int8_gelu_gradient_rows"] == (gradient == "int8")
    generator = torch.Generator().manual_seed(1)
    x, grad_y = (torch.randn(ROWS, WIDTH, generator=generator).double().numpy() for _ in range(2))
    layers = [
        Layer(*(part.detach().double().numpy() for part in (layer.weight, layer.scale, layer.bias)))
        for layer in (module.net[0].proj, module.net[2])
    ]
    exact = int8_network.network(x, *layers)
    exact_grad = int8_network.gradient(x, grad_y, *layers, gradient == "int8")
    for found, expected in ((y, exact), (grad, exact_grad)):
        error = np.linalg.norm(found.view(ROWS, WIDTH).double().numpy() - expected) / np.linalg.norm(expected)
        assert error < 1e-5


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("gradient", ["dequantised", "int8"])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_the_fused_network_is_the_plain_one_bit_for_bit(compute: str, gradient: str, rotation: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    plain, ours = (passes(make(network(gradient, compute, rotation)), dtype) for make in (lambda n: n, fused))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("which", ["up", "down", "both"])
def test_layers_with_an_update_keep_it(which: str) -> None:
    """An updated first layer computes itself; behind an updated second one GELU's output is needed."""
    targets = {"up": "ff.net.0.proj", "down": "ff.net.2", "both": "ff.net.(0.proj|2)"}[which]
    results, counts = [], []
    for make in (lambda n: n, fused):
        block = Block(fuses=False)
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=f".*{targets}", init_lora_weights=False), block)
        make(block.ff)
        with Counted() as counted:
            found = passes(block)
        results.append([*found, *(p.grad for p in block.parameters() if p.grad is not None)])
        counts.append(counted.calls["simpletune::int8_gelu_rows"])
    assert len(results[0]) == (6 if which == "both" else 4)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counts == [0, int(which == "up")]


def test_gelus_output_takes_no_memory() -> None:
    """Of the hidden features only h and the int8 rows of GELU(h) are held; of h's gradient only its int8 rows."""
    module, size = fused(network()), ROWS * 4 * WIDTH
    x = torch.randn(ROWS, WIDTH)
    with Accounting() as accounting, torch.no_grad():
        module(x)
    small = sum(round_to_block(part) for part in (ROWS * WIDTH, 4 * ROWS, 4 * ROWS, 4 * ROWS * WIDTH))
    assert 5 * size <= accounting.peak.bytes <= 5 * size + small + 2048
    x.requires_grad_()
    y = module(x)
    with Accounting() as accounting:
        y.backward(torch.ones_like(y))
    assert 5 * size <= accounting.peak.bytes <= 5 * size + 3 * 4 * ROWS * WIDTH + 2 * small  # grad of GELU(h), rows


def test_a_network_checkpointed_alone_does_not_compute_its_second_product_again() -> None:
    plain, block = passes(Block()), Block()
    FeedForwards(block, None, True, False)
    with Counted() as counted:
        assert all(torch.equal(a, b) for a, b in zip(plain, passes(block), strict=True))
    calls = counted.calls
    assert calls["simpletune::int8_product"] == 2 + 1 + 2  # forward, up again, two gradients
    assert calls["simpletune::int8_gelu_rows"] == 1


@pytest.mark.parametrize("why", ["few rows", "dropout", "watched", "exact GELU", "no kernel"])
def test_what_cannot_be_fused_is_left_to_the_network(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(int8_products, "say", said.append)
    module = fused(network(dropout=0.5 * (why == "dropout")))
    if why == "watched":
        module.net[2].register_forward_hook(lambda *_: None)
    if why == "exact GELU":
        module.net[0].approximate = "none"
    if why == "no kernel":
        monkeypatch.setattr(int8_gelu, "_try_rows", lambda device: "it is broken")
    with Counted() as counted, torch.no_grad():
        for _ in range(2):
            module(torch.randn(16 if why == "few rows" else 17, WIDTH))
        assert counted.calls["simpletune::int8_gelu_rows"] == 0
        assert len(said) == (why == "no kernel") and all("in two: it is broken" in line for line in said)
        if why == "dropout":
            module.eval()(torch.randn(17, WIDTH))
            assert counted.calls["simpletune::int8_gelu_rows"] == 1


def test_fake_tensors_and_predictions_know_what_one_launch_reads_and_writes() -> None:
    x, grad, columns = torch.randn(17, 16), torch.randn(17, 16), torch.rand(16)
    torch.library.opcheck(torch.ops.simpletune.int8_gelu_rows.default, (x, 16))
    torch.library.opcheck(torch.ops.simpletune.int8_gelu_gradient_rows.default, (grad, x, columns))
    x = torch.randn(100, 64).bfloat16()
    op = torch.ops.simpletune.int8_gelu_rows.default
    (work,) = works_of(op, (x, 0), {}, op(x, 0))
    assert work == KernelWork("int8_rows", "fp32", (x.nbytes + 6400 + 400,))
    op, columns = torch.ops.simpletune.int8_gelu_gradient_rows.default, torch.ones(64)
    (work,) = works_of(op, (x, x, columns), {}, op(x, x, columns))
    assert work == KernelWork("int8_rows", "fp32", (2 * x.nbytes + 6400 + 400 + 256,))
    x, op = torch.randn(100, 64), torch.ops.aten.gelu_backward.grad_input
    (work,) = works_of(op, (x, x), {"approximate": "tanh", "grad_input": x}, op(x, x, grad_input=x))
    assert work == KernelWork("gelu_backward", "fp32", (3 * x.nbytes,)), "a result written in place is not read"


@pytest.mark.parametrize("kind", ["int8_product", "int8_gradient"])
def test_int8_kernels_do_not_split_sums_but_take_smaller_tiles(kind: str) -> None:
    """333 x 1536 numbers: 36 tiles of 128 x 128 would leave 22 of an L4's 58 multiprocessors idle."""
    speeds = DatasheetSpeeds(find_card("L4"))
    for m, k, n, tile, tiles in ((333, 1536, 6144, 64, 6 * 24), (4096, 6144, 1536, 128, 32 * 48)):
        share = m * k / (-(-tiles // 58) * 58 * tile * tile)
        seconds = 2 * m * k * n / (56.6e12 * 1.9) / share
        assert speeds.seconds(kind, "bf16", (m, k, n)) == pytest.approx(2.5e-6 + seconds)


def test_training_fuses_every_network_of_int8_products_and_no_other() -> None:
    for name, fuses in (("int8-products", True), ("int8", False)):
        model = transformer(PRECISIONS[name])
        Lora(rank=2).attach(model, 7)
        PRECISIONS[name].prepare(model.transformer_blocks)
        networks = [module for module in model.modules() if isinstance(module, FeedForward)]
        assert networks and all(("forward" in vars(network)) == fuses for network in networks)
        assert int8_products.int8_problem(torch.device("cpu")) is None
