"""Products in int8: the kernel in Triton's interpreter, the arithmetic, gradients, sharing, fallback, whole runs."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import PRECISIONS, loss_of, transformer
from fresh_caches import uncalled
from hypothesis import given, settings
from hypothesis import strategies as st
from products import Counted, losses, with_products
from simulated import LEVERS, assert_same_bytes
from slow_cases import slow_but
from torch import Tensor, nn

from simpletune.adapters.methods.lora import Lora
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.engine.kernels import fallback
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.engine.quant import int8_linear, int8_products, int8_tuning
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.int8_tuning import RowsOf, Tuning, tunings
from simpletune.engine.quant.precision import Int8
from simpletune.models.sd3.sd3_shapes import OF_TEXT
from simpletune.models.shared.buckets import Framing
from simpletune.system.options import ConfigError, UserError
from simpletune.system.shell import install_command
from simpletune.training import load_job

LAYER = "transformer_blocks.0.attn.to_q"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def layer(
    inputs: int, outputs: int, bias: bool = True, gradient: str = "int8", dtype: torch.dtype = torch.float32
) -> Int8Linear:
    option = Int8(products="int8", input_gradient=gradient, compute="fp32" if dtype == torch.float32 else "bf16")
    return option.convert(nn.Linear(inputs, outputs, bias=bias))


@pytest.mark.parametrize("shape", [(1, 7), (33, 64)])
def test_the_operations_are_what_fake_tensors_and_the_compiler_take_them_for(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    torch.library.opcheck(torch.ops.simpletune.int8_rows.default, (x, None))
    q, scale = int8_products.int8_rows(x)
    torch.library.opcheck(torch.ops.simpletune.int8_product.default, (q, scale, q, scale, None, torch.bfloat16))


@settings(max_examples=50, deadline=None)
@given(m=st.integers(1, 60), k=st.integers(1, 90), seed=st.integers(0, 2**31))
def test_rounding_error_is_at_most_half_a_scale(m: int, k: int, seed: int) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) * 10 ** (seed % 9 - 4)
    q, scale = int8_products.int8_rows(x)
    assert q.abs().max() <= 127 and (q.abs().amax(dim=1) == 127).all()
    assert ((x - q * scale[:, None]).abs() <= scale[:, None] * 0.50001).all()


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x = torch.randn(20, 8)
    x[3, 2] = bad
    x[4] = 0
    y = layer(8, 5)(x)
    assert torch.equal(y.isfinite().all(dim=1), torch.arange(20) != 3)
    assert torch.equal(y.isnan().any(dim=1), torch.arange(20) == 3)


def test_a_sum_that_could_leave_int32_is_refused() -> None:
    q, scale = int8_products.int8_rows(torch.ones(1, int8_products.LONGEST_SUM))
    total = int8_products.int8_product(q, torch.ones(1), q, None, None, torch.float32)
    assert total.item() == pytest.approx(133_144 * 127**2)
    longer = torch.zeros(1, int8_products.LONGEST_SUM + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="133145 int8 products may overflow int32.*133144"):
        int8_products.int8_product(longer, scale, longer, None, None, torch.float32)


@pytest.mark.parametrize("gradient", ["dequantised", "int8"])
@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_outputs_and_input_gradients_against_float64(bias: bool, dtype: torch.dtype, gradient: str) -> None:
    """It keeps no activation and no copy of the weight."""
    torch.manual_seed(0)
    int8, kept = layer(256, 384, bias, gradient, dtype), []
    x = torch.randn(2, 40, 256).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = int8(x)
    assert sorted(tensor.data_ptr() for tensor in kept) == sorted([int8.weight.data_ptr(), int8.scale.data_ptr()])
    grad_y = torch.randn_like(y)
    y.backward(grad_y)
    weight, offset = int8.dequantise().double(), int8.bias.double() if bias else 0
    rows, scale = int8_products.int8_rows(x.detach())

    def error(ours: Tensor, exact: Tensor) -> float:
        return ((ours.detach().double() - exact).norm() / exact.norm()).item()

    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    assert 0.002 < error(y, x.detach().double() @ weight.t() + offset) < 0.01
    exact_gradient = 1e-6 if dtype == torch.float32 else 0.005
    assert error(x.grad, grad_y.double() @ weight) < (0.01 if gradient == "int8" else exact_gradient)
    of_rows = (rows.double() * scale.double()[:, None]).view(x.shape) @ weight.t() + offset
    assert error(y, of_rows) < (1e-6 if dtype == torch.float32 else 0.003)


def test_rows_are_shared_by_identity_and_freed_with_their_tensor() -> None:
    x = torch.randn(40, 16)
    with Counted() as counted:
        first = int8_linear.shared_rows(x)
        assert int8_linear.shared_rows(x) is first and counted.quantised == 1
        assert int8_linear.shared_rows(x.clone()) is not first and counted.quantised == 2
        int8_linear.shared_rows(x)
        x[0, 0] = 100.0
        assert int8_linear.shared_rows(x)[1][0] == pytest.approx(100 / 127) and counted.quantised == 4
    del x, first
    gc.collect()
    assert int8_linear._last is None
    with torch.inference_mode():
        x = torch.randn(40, 16)
        assert int8_linear.shared_rows(x) is not int8_linear.shared_rows(x)


def test_query_key_and_value_share_their_rows() -> None:
    """A block quantises: the input of q, k, v, attention's output, and the two inputs of the feed-forward layers."""
    precision = PRECISIONS["int8-products"]
    model = transformer(precision)
    Lora(rank=2, targets="all_linear").attach(model, 7)
    with Counted() as counted:
        loss = loss_of(model, precision, 0)
        forward = counted.quantised
        loss.backward()
    blocks = len(model.transformer_blocks)
    image = [m for m in model.transformer_blocks[0].modules() if isinstance(m, Int8Linear) and m.int8_products]
    assert len(image) == 12  # with the text's, which has 12 rows here: dequantised
    assert (
        forward == 4 * blocks and counted.calls["simpletune::int8_product"] - 6 * blocks == counted.quantised - forward
    )


@pytest.mark.parametrize(("rows", "why_not", "products"), [(16, None, 0), (17, None, 1), (40, "it cannot", 0)])
def test_few_rows_and_a_device_that_cannot_take_the_dequantised_weight(
    rows: int, why_not: str | None, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8, x = layer(24, 8), torch.randn(rows, 24)
    monkeypatch.setattr(int8_products, "int8_problem", lambda device: why_not)
    with Counted() as counted:
        y = int8(x)
    assert counted.calls["simpletune::int8_product"] == products
    exact = torch.nn.functional.linear(x, int8.dequantise(), int8.bias)
    assert torch.allclose(y, exact, atol=1e-5) == (not products)
    # A plan's window, which has many rows, would give other modulations than the model itself.
    assert not Int8(products="int8").convert(nn.Linear(4, 4), per_sample=True).int8_products


def test_a_device_that_cannot_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(int8_products, "find_failure", uncalled(int8_products.find_failure))
    monkeypatch.setattr(int8_products, "say", said.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    device = torch.device("cuda", 63)
    for _ in range(2):
        assert int8_products.int8_problem(device) is not None
    assert len(said) == 1 and re.match("products NOT in int8 on cuda:63, .*sm_75.*sm_80", said[0])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("Failed to find C compiler.\nmore"),
            "Failed to find C compiler. (Triton needs a C compiler, gcc or CC)",
        ),
        (None, "the kernel's sums are not exact"),
        (
            ModuleNotFoundError("No module named 'triton'"),
            f"No module named 'triton'. Triton comes with torch's CUDA builds for Linux ({install_command('triton')})",
        ),
    ],
)
def test_a_kernel_that_fails_or_errs_is_not_used(
    error: Exception | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(x: Tensor, *_: object) -> Tensor:
        if error is not None:
            raise error
        return torch.zeros(len(x), 40)

    monkeypatch.setattr(int8_products, "int8_product", product)
    trial = int8_products.find_failure.__wrapped__  # without the cache
    assert trial(int8_products._try_products, torch.device("cpu"), "{reason}") == told


NOT_LOWERED = RuntimeError("PassManager::run failed")


class FakeKernel:
    """Stands for a kernel of Triton without a GPU; notes the tiles that run, raises ``error`` for tiles of some
    numbers of rows, and spills ``spills[rows]`` bytes, which is known once it is loaded."""

    def __init__(self, fails: set[int], error: Exception):
        self.fails, self.error, self.ran = fails, error, Counter[int]()
        self.spills: dict[int, int] = {}

    def run(self, *_: Any, grid: Any, warmup: bool, BLOCK_M: int, **named: Any) -> Any:
        if BLOCK_M in self.fails:
            raise self.error
        if not warmup:
            self.ran[BLOCK_M] += 1
        kernel = SimpleNamespace()
        kernel._init_handles = lambda: setattr(kernel, "n_spills", self.spills.get(BLOCK_M, 0) // 4)
        return kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **named: self.run(*given, grid=grid, warmup=False, **named)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the kernels that are tuned by a fake that fails for some tiles; return it and what is printed."""
    from simpletune.engine.quant import int8_gradient_kernel, int8_kernel

    def use(fails: set[int], error: Exception) -> tuple[FakeKernel, list[str]]:
        fake, said = FakeKernel(fails, error), []

        def seconds(call: Any, quantiles: Any) -> list[float]:
            call()
            return [float(sum(fake.ran.values()))] * 3  # the first tile that runs is the fastest

        for tuner in (int8_kernel._tuned, int8_gradient_kernel._tuned):
            for name, value in {"fn": fake, "do_bench": seconds, "cache_results": False, "cache": {}}.items():
                monkeypatch.setattr(tuner, name, value)
        monkeypatch.setattr(int8_kernel, "_product", fake)
        monkeypatch.setattr(int8_gradient_kernel, "_gradient", fake)
        monkeypatch.setattr(int8_kernel, "_untunable", set())
        monkeypatch.setattr(int8_kernel, "detail", said.append)
        monkeypatch.setattr(fallback, "say", said.append)
        monkeypatch.setattr(int8_products.FALLBACK, "failed", {})
        monkeypatch.setattr(int8_kernel, "_say_left_out", uncalled(int8_kernel._say_left_out))
        return fake, said

    return use


@pytest.mark.parametrize("version", slow_but(["sdxl"], ["sd15", "sdxl"]))
def test_the_rows_of_a_u_nets_layers_are_known(
    version: str, tiny_config: dict, small_unet: Callable[[str], dict]
) -> None:
    """Of every layer that may multiply in int8: levels have their own, the text's layers and the time's too."""
    config = validate(with_products(tiny_config) | {"model": small_unet(version)}, "rows")
    model, seen = config.model.load_denoiser(config.precision, torch.device("cpu")), dict[str, int]()

    def note(name: str, args: tuple[Tensor, ...]) -> None:
        seen[name] = args[0].numel() // args[0].shape[-1]

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Int8Linear)}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
    text = config.model.text.framed(config.model.text.blank(torch.float32, 1), [Framing.whole((64, 128))])
    noise, text = torch.randn(1, 4, 16, 8), replace(text, embeds=torch.randn_like(text.embeds))
    config.model.predict(model, noise, torch.tensor([5.0]), text, config.precision.compute_dtype())
    rows = config.model.architecture.layer_rows((64, 128))
    assert seen == {name: rows(name) for name in layers} and set(seen.values()) >= {1, 32, 77}


def test_tunings_are_announced_before_the_first_step_and_multiply_every_shape_once(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each shape of a layer, for the powers of two of image rows (256 and 512) and of text rows (128)."""
    model = transformer(PRECISIONS["int8-products"])
    Lora(rank=2, targets="all_linear").attach(model, 7)
    shapes = {tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, Int8Linear)}
    wide = {(32, 32), (128, 32), (32, 128)}  # q, k, v and out; the feed-forward layers
    assert shapes > wide  # adaLN's are dequantised
    expected = {(rows, *shape, back, not back) for rows in (128, 256, 512) for shape in wide for back in (False, True)}

    def rows_of(image: list[int], text: int) -> RowsOf:
        return lambda layer: [text] if any(part in layer for part in OF_TEXT) else image

    wanted = tunings(model, rows_of([200, 300, 301], 100))
    assert wanted == expected and len(wanted) == 18
    assert tunings(model, rows_of([200], 10)) == {shape for shape in expected if shape[0] == 256}  # few rows of text
    seen: list[tuple[object, ...]] = []

    def product(x: Tensor, x_scale: Tensor, weight: Tensor, *rest: Any) -> None:
        """As CUDA would, with the layout and the operands that the run's products have."""
        scale, bias, dtype = rest
        assert x.abs().max() > 100 and x_scale.shape == (len(x),) and dtype == torch.bfloat16
        seen.append((len(x), *weight.shape, not weight.is_contiguous(), bias is not None))
        assert (scale is None) == (not weight.is_contiguous()) and (bias is None or bias.dtype == dtype)

    monkeypatch.setattr(int8_tuning, "int8_product", product)
    int8_tuning.tune(wanted, torch.device("cpu"), torch.bfloat16)
    assert sorted(seen) == sorted(wanted)

    pytest.importorskip("triton")
    config = validate(with_products(tiny_config), "announced")
    plan = SimpleNamespace(sizes=lambda: [(256, 256)])  # 256 image tokens, 84 of text; a batch of 2
    asked: list[torch.device] = []
    monkeypatch.setattr(int8_tuning, "int8_problem", asked.append)
    load_job.announce_kernel(config, model, torch.device("cuda"), plan)
    assert "the int8 kernel: 12 shapes x 10 tiles" in capsys.readouterr().out
    load_job.announce_kernel(config, model, torch.device("cpu"), plan)
    load_job.announce_kernel(config, transformer(PRECISIONS["int8"]), torch.device("cuda"), plan)
    assert capsys.readouterr().out == "" and len(asked) == 1  # trying the kernel takes seconds


def test_a_run_is_tuned_ahead_for_its_own_products(tiny_config: dict, tmp_path: Path, monkeypatch: Any) -> None:
    from simpletune.estimate import tune_ahead

    file, tuned = tmp_path / "run.json", []
    file.write_text(json.dumps(with_products(tiny_config)))
    with pytest.raises(UserError, match="tuned on the card that will run them, and torch finds no CUDA device"):
        tune_ahead.tune_ahead(file, [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(tune_ahead, "int8_problem", lambda device: None)
    monkeypatch.setattr(int8_tuning, "tune", lambda *given: tuned.append(given))
    tune_ahead.tune_ahead(file, [])
    ((shapes, device, dtype),) = tuned
    assert (device, dtype) == (torch.device("cuda", 0), torch.bfloat16)
    rows = {shape.rows for shape in shapes}  # 2 pictures of 16 tokens; twice the text's tokens
    assert rows == {32, 256} and Tuning(32, 64, 64, True, False) in shapes
    nothing = "does not multiply in int8.*Use precision.weights=int8 precision.products=int8"
    with pytest.raises(UserError, match=nothing):
        tune_ahead.tune_ahead(file, ["precision.products=dequantised", "precision.input_gradient=dequantised"])
    monkeypatch.setattr(tune_ahead, "int8_problem", lambda device: "it is broken")
    with pytest.raises(UserError, match="do not run here: it is broken. Use precision.products=dequantised"):
        tune_ahead.tune_ahead(file, [])


def product_on_cuda(rows: int = 40) -> Tensor:
    """A product as CUDA dispatches it, over tensors of the CPU."""
    q, scale = int8_products.int8_rows(torch.ones(rows, 32))
    return int8_products._product_on_cuda(q, scale, q[:8], None, None, torch.float32)


@needs_triton
def test_a_tile_that_does_not_compile_is_left_out_and_named_once(kernel: Any) -> None:
    fake, said = kernel({128}, NOT_LOWERED)
    for rows in (40, 1000):  # two tunings
        product_on_cuda(rows)
    assert set(fake.ran) == {256, 64, 32} and fake.ran[256] == 4
    tiles = [line for line in said if "leave out a tile" in line]
    assert len(tiles) == len(said) == 6 and all("BLOCK_M: 128" in t and "PassManager::run failed" in t for t in tiles)


@needs_triton
def test_a_tile_that_spills_is_not_timed_and_chosen_only_where_all_do(kernel: Any) -> None:
    """A stack of 64 bytes is none: the tuning times such tiles."""
    fake, said = kernel(set(), NOT_LOWERED)
    fake.spills = {256: 512, 128: 512, 64: 64}
    product_on_cuda()
    assert set(fake.ran) == {64, 32}
    fake.spills = {256: 528, 128: 512, 64: 520, 32: 520}
    fake.ran.clear()
    product_on_cuda(1000)
    assert fake.ran == {128: 1} and said == []


@needs_triton
def test_where_no_tile_of_the_tuning_runs_the_safe_one_does(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from simpletune.engine.quant import int8_kernel

    monkeypatch.setattr(int8_kernel, "SAFE_TILE", (16, 64, 64, 4, 2))
    fake, said = kernel({256, 128, 64, 32}, NOT_LOWERED)
    for _ in range(3):
        product_on_cuda()
    assert fake.ran == {16: 3} and sum("use the smallest tile" in line for line in said) == 1


@needs_triton
@pytest.mark.parametrize("gradient", [False, True])
def test_where_no_tile_runs_at_all_the_product_is_dequantised(gradient: bool, kernel: Any) -> None:
    fake, said = kernel({256, 128, 64, 32}, NOT_LOWERED)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 64), torch.randn(32, 64), torch.randn(32)
    (q, scale), (w, w_scale) = int8_products.int8_rows(x), int8_products.int8_rows(weight)
    given = (q, scale, w.t().contiguous().t(), None, None) if gradient else (q, scale, w, w_scale, bias)
    for _ in range(2):
        y = int8_products._product_on_cuda(*given, torch.float32)
        torch.testing.assert_close(y, int8_products.int8_product(*given, torch.float32), rtol=1e-3, atol=1e-3)
    assert not fake.ran and sum("NO LONGER in int8 on cpu" in line for line in said) == 1
    assert "PassManager::run failed" in str(int8_products.int8_problem(torch.device("cpu")))  # layers then dequantise
    # In fp16 sums of x q, before q's small scale, would exceed 65504.
    (q, scale), (w, w_scale) = (int8_products.int8_rows(torch.ones(rows, 1024)) for rows in (40, 8))
    y = int8_products._product_on_cuda(q, scale, w, w_scale / 100, None, torch.float16)
    torch.testing.assert_close(y, torch.full((40, 8), 10.24, dtype=torch.float16), rtol=1e-3, atol=0)


@needs_triton
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), torch.AcceleratorError("illegal address", 1)])
def test_a_full_or_broken_device_is_no_fault_of_a_tile(error: Exception, kernel: Any) -> None:
    _, said = kernel({128}, error)
    with pytest.raises(type(error), match="full|illegal"):
        product_on_cuda()
    assert said == []


@needs_triton
@pytest.mark.parametrize("room", [True, False])
def test_a_tuning_that_finds_no_memory_begins_again_once_and_keeps_no_timing(
    room: bool, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simpletune.engine.quant import int8_kernel

    fake, said = kernel({64}, RuntimeError("Triton Error [CUDA]: out of memory"))
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.fails.clear if room else lambda: None)
    if room:
        product_on_cuda()
        assert {256, 128, 64, 32} <= set(fake.ran) and len(int8_kernel._tuned.cache) == 1
    else:
        with pytest.raises(torch.OutOfMemoryError, match="Triton Error"):
            product_on_cuda()
        assert not int8_kernel._tuned.cache
    assert said == [] and not int8_products.FALLBACK.failed and not int8_kernel._untunable


def test_compiled_blocks_have_no_break_and_quantise_once() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(32), layer(32, 32), layer(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return self.q(x) * self.k(x)

    quantised: list[int] = []

    def take(graph: torch.fx.GraphModule, _: Any) -> Any:
        quantised.append(sum("int8_rows" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=take, bw_compiler=take, partition_fn=partition)
    module, x, results = Shared(), torch.randn(2, 30, 32), []
    for run in (module, torch.compile(module, backend=backend, fullgraph=True)):
        y = run(x)
        y.sum().backward()
        results.append((y.detach(), module.norm.weight.grad.clone()))
        module.norm.weight.grad = None
    torch.testing.assert_close(results[1], results[0])
    assert quantised == [1, 2]
    torch._dynamo.reset()


@pytest.mark.parametrize("lever", slow_but(["plan-streamed"], ["kept", "checkpointed", "plan-streamed"]))
def test_real_and_fake_tensors_take_the_same_bytes(lever: str, tiny_config: dict, three_blocks: Path) -> None:  # noqa: F811 the fixture
    data = with_products(tiny_config, **copy.deepcopy(LEVERS.get(lever, {})))
    data["model"]["pretrained"] = str(three_blocks)
    if lever != "kept":
        data["memory"]["checkpointing"] = "all"
    with Counted() as counted:
        assert_same_bytes(validate(data, lever))
    assert counted.quantised > 0


def test_whole_runs(tiny_config: dict) -> None:
    """Products are really in int8, and checkpointing changes no bit."""
    tiny_config["train"]["steps"] = 2
    with Counted() as counted:
        whole = losses(with_products(tiny_config, name="whole"))
    assert counted.quantised > 0
    assert losses(with_products(tiny_config, name="checkpointed", memory={"checkpointing": "all"})) == whole
    plain = losses(with_products(tiny_config, name="plain", precision={"products": "dequantised",
                                                                      "input_gradient": "dequantised"}))  # fmt: skip
    assert plain != whole and plain == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, r"int8, products in bf16 \(fp16 .*\), with dequantised weights"),
        (
            {"products": "int8"},
            r"products in int8 by Triton \(dequantised for 16 rows or fewer\), input gradients in bf16",
        ),
        ({"products": "int8", "input_gradient": "int8"}, "input gradients too, everything else in bf16"),
    ],
)
def test_check_says_which_products_are_used_and_a_kept_base_serves_any(
    changes: dict, told: str, tiny_config: dict
) -> None:
    precision = {"weights": "int8", **changes}
    assert re.search(told, explain(validate(tiny_config | {"precision": precision}, "told")))
    assert Int8(**changes).cache_key() == {"weights": "int8", "compute": "bf16"}
    with pytest.raises(ConfigError, match="precision.input_gradient: int8 needs precision.products int8, which is deq"):
        validate(tiny_config | {"precision": precision | {"products": "dequantised", "input_gradient": "int8"}}, "no")


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, scales and the output, and nothing in int32; the CPU is tried on real tensors, by no one's account."""
    int8, x = layer(96, 1024), torch.randn(256, 96)
    with Accounting() as accounting, torch.no_grad():
        y = int8(x)
    assert accounting.peak.bytes == sum(round_to_block(size) for size in (256 * 96, 4 * 256, y.nbytes))
    monkeypatch.setattr(int8_products, "find_failure", uncalled(int8_products.find_failure))
    with fake_tensors(), Accounting() as accounting:
        assert int8_products.int8_problem(torch.device("cpu")) is None
    assert accounting.peak.bytes == 0
