"""On an NVIDIA GPU (``make gpu``): the same runs as on the CPU, and what only a GPU can show."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import (
    PRECISIONS,
    STEPS,
    Setting,
    UpdateInBackward,
    load,
    lora_run,
    loss_of,
    predict_velocity,
    prepare,
    transformer,
    write_pipeline,
)  # fmt: skip
from optimizers import NAMES, alone, option_of, start_of, stepped
from safetensors.torch import load_file
from tiny_runs import run_on
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.lora_layers import add_update
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.memory.copy_stream import CopyEvent, CudaCopies, host_bytes
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.quant.precision import BF16, Int8, Int8Quanto, WeightPrecision
from simpletune.engine.tensors import own_tensors
from simpletune.models.sd3.sd3_architecture import SD3Architecture
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.stages.modulation_plan import detach_modulation, replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def on_host(values: Any) -> Any:
    """Tensors as the host has them, in lists, tuples and dicts."""
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, values)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def test_fp32_is_compared_without_tf32() -> None:
    assert not (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)


PRODUCTS = {"weights": "int8", "products": "int8"}


@pytest.mark.values
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ({"weights": "fp32"}, 2e-3),
        ({"weights": "int8"}, 2e-3),
        ({"weights": "int8-quanto"}, 2e-3),
        (PRODUCTS | {"input_gradient": "dequantised"}, 2e-2),
        (PRODUCTS | {"input_gradient": "int8"}, 2e-2),
    ],
    ids=["fp32", "int8", "int8-quanto", "int8 products", "int8 products and gradients"],
)
def test_losses_equal_those_of_the_cpu(precision: dict[str, str], tolerance: float, tiny_config: dict) -> None:
    precision = precision | {"compute": "fp32"}
    cpu, cuda = (losses(run_on(tiny_config, device, name=device, precision=precision)) for device in ("cpu", "cuda"))
    assert cuda == pytest.approx(cpu, rel=tolerance)


SHAPES = [(1536, 1536), (6144, 1536), (1536, 6144)]  # [o, i] of SD3 Medium's layers


@pytest.mark.values
@pytest.mark.parametrize("rows", [17, 333, 1024, 4096 + 333, 4 * 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_those_of_the_cpu_and_of_float64(shape: tuple[int, int], rows: int) -> None:
    from simpletune.engine.quant.int8_products import int8_problem, int8_product, int8_rows

    assert int8_problem(torch.device("cuda")) is None
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    scale, bias = torch.rand(shape[0], generator=generator), torch.randn(shape[0], generator=generator).bfloat16()
    x = torch.randn(rows, shape[1], generator=generator).bfloat16()
    x[0], x[1, 0], x[2, 3] = 0, 3e4, torch.nan
    grad = torch.randn(rows, shape[0], generator=generator).bfloat16()
    found = []
    for device in ("cuda", "cpu"):
        q, row_scale = int8_rows(x.to(device))
        y = int8_product(q, row_scale, weight.to(device), scale.to(device), bias.to(device), torch.bfloat16)
        grad_q, grad_scale = int8_rows(grad.to(device), scale.to(device))
        grad_x = int8_product(grad_q, grad_scale, weight.to(device).t(), None, None, torch.float32)
        found.append([tensor.cpu() for tensor in (q, row_scale, y, grad_q, grad_scale, grad_x)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    q, row_scale, y = found[0][:3]
    some = [0, 1, *range(3, min(rows, 300))]
    product = (q[some].double() @ weight.double().t()) * row_scale[some].double()[:, None]
    exact = product * scale.double() + bias.double()
    torch.testing.assert_close(y[some].double(), exact, rtol=2**-8, atol=1e-4)
    assert y[2].isnan().all()


@pytest.mark.timing
@pytest.mark.parametrize("shape", SHAPES)
def test_speed_of_int8_products_is_printed(shape: tuple[int, int]) -> None:
    """Not asserted: rows to int8 and the product, against the bf16 product."""
    from triton.testing import do_bench

    from simpletune.engine.quant.int8_products import int8_product, int8_rows

    weight = torch.randn(shape, device="cuda").bfloat16()
    q, scale = int8_rows(weight)
    for rows in (333, 1024, 4096 + 333, 4 * 4096):
        x = torch.randn(rows, shape[1], device="cuda").bfloat16()
        grad = torch.randn(rows, shape[0], device="cuda").bfloat16()
        x_q, x_scale = int8_rows(x)
        calls = {
            "bf16": lambda x=x: x @ weight.t(),
            "dequantised": lambda x=x: x @ q.to(x.dtype).t(),
            "rows": lambda x=x: int8_rows(x),
            "int8": lambda a=x_q, b=x_scale: int8_product(a, b, q, scale, None, torch.bfloat16),
            "gradient bf16": lambda g=grad: g @ weight,
            "gradient int8": lambda g=grad: int8_product(*int8_rows(g, scale), q.t(), None, None, torch.bfloat16),
        }
        times = {name: do_bench(call) for name, call in calls.items()}
        print(f"{list(shape)} x {rows}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()))
        assert all(ms > 0 for ms in times.values())


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_trains_and_resumes(method: str, optimizer: str, tiny_config: dict) -> None:
    config = copy.deepcopy(tiny_config)
    config["adapter"] = {"method": method}
    config["optimizer"] = {"name": optimizer} | ({"d0": 1e-3} if optimizer == "prodigy" else {"lr": 1e-3})
    config["precision"] = {"weights": "bf16"} if method == "full" else {"weights": "int8", "compute": "bf16"}
    whole = run_on(config, "cuda", name="whole")
    halves = run_on(config, "cuda", name="halves", train={"steps": 2})
    run_on(config, "cuda", "latest", name="halves", train={"steps": 4})
    ours, theirs = (load_file(checkpoint.checkpoint_folder(run, 4) / checkpoint.TRAINABLE) for run in (halves, whole))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), rtol=2e-2, atol=2e-3)


def test_peaks_are_reported_by_stage(tiny_config: dict) -> None:
    run = run_on(tiny_config, "cuda", precision={"weights": "int8"})
    summary = json.loads((run / "summary.json").read_text())
    stages = summary["stages"]
    assert all(stage["peak_allocated_gib"] is not None for stage in stages.values())
    assert summary["peak_allocated_gib"] == max(stage["peak_allocated_gib"] for stage in stages.values())
    assert summary["peak_reserved_gib"] >= summary["peak_allocated_gib"] > 0


@pytest.mark.timing
def test_the_trace_holds_device_time_under_names_that_tensorboard_knows(tiny_config: dict, tmp_path: Path) -> None:
    import gzip

    run = run_on(tiny_config, "cuda", profile={"max_traces": 1, "memory": True, "snapshot": True})
    assert json.loads((run / "summary.json").read_text())["warnings"] == []
    folder = tmp_path / "profiles" / "tiny" / "epoch-000"
    trace = next(folder.glob("*.gz"))
    categories = {event.get("cat") for event in json.loads(gzip.open(trace).read())["traceEvents"]}
    assert "kernel" in categories and "Runtime" in categories
    assert "cuda_runtime" not in categories
    values = json.loads((folder / "summary.json").read_text())
    assert values["kernels"] and values["kernels"][0]["self_ms"] > 0
    assert sum(values["phases"].values()) == pytest.approx(values["seconds_per_step"], rel=1e-6)
    assert {"forward", "backward", "optimizer"} <= {name for name, seconds in values["phases"].items() if seconds > 0}
    assert 0 < sum(values["idle"].values()) < values["seconds_per_step"]
    assert any(note.startswith("memory: measured") for note in values["notes"])
    snapshot = pickle.loads((folder / "memory_snapshot.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])


@pytest.mark.parametrize("weights", ["fp32", "int8", "int8-quanto"])
def test_the_modulation_plan_gives_the_losses_of_the_resident_path(weights: str, tiny_config: dict) -> None:
    changes = {"precision": {"weights": weights, "compute": "fp32"}, "train": {"steps": 6, "batch_size": 2}}
    resident, plan = (
        losses(run_on(tiny_config, "cuda", name=kind, memory={"modulation": kind, "modulation_window": 4}, **changes))
        for kind in ("resident", "plan")
    )
    assert plan == pytest.approx(resident, rel=1e-5)


@pytest.mark.parametrize("precision", [BF16(), Int8(), Int8Quanto()], ids=lambda p: p.weights)
def test_the_modulation_plan_frees_the_device_of_its_weights(precision: WeightPrecision, tiny_pipeline: Path) -> None:
    """Wide enough layers that the allocator's rounding to 512 bytes does not count."""
    device = torch.device("cuda")
    config = SD3(pretrained=str(tiny_pipeline)).files.denoiser_config() | {"num_layers": 2, "num_attention_heads": 8}
    config |= {"caption_projection_dim": 512}
    allocated, parts = [], []
    for on_host in (lambda name: False, SD3Architecture.modulation.serves):
        before = torch.cuda.memory_allocated()
        model = load(config, SD3().architecture.random_tensors(config, 0), precision, device, on_host=on_host)
        allocated.append(torch.cuda.memory_allocated() - before)
        parts.append(model)
    resident, planned = parts
    detached = (module for name, module in resident.named_modules() if SD3Architecture.modulation.serves(name))
    own = [tensor for module in detached for _, tensor in own_tensors(module)]
    expected = sum(t.untyped_storage().nbytes() for t in own if type(t.data) is torch.Tensor)
    if precision.weights != "int8-quanto":
        assert allocated[0] - allocated[1] == pytest.approx(expected, rel=0.02)
    assert allocated[1] < 0.8 * allocated[0]

    modulation = detach_modulation(planned, SD3Architecture.modulation, precision, device, 4)
    own = [tensor for layer in modulation.layers for _, tensor in own_tensors(layer)]
    assert all(t.device.type == "cpu" and t.is_pinned() for t in own if type(t.data) is torch.Tensor)
    sigma, pooled = torch.rand(8), torch.randn(8, config["pooled_projection_dim"])
    modulation(1000 * sigma, pooled)  # the first product makes cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    rows = modulation(1000 * sigma, pooled)
    assert torch.cuda.memory_allocated() - before == pytest.approx(rows.nbytes, abs=4096)
    given = {"z_t": torch.randn(8, 16, 4, 4, device=device), "sigma": sigma.to(device),
             "prompt_embeds": torch.randn(8, 5, config["joint_attention_dim"], device=device)}  # fmt: skip
    dtype = precision.compute_dtype()
    with torch.no_grad():
        theirs = predict_velocity(resident, **given, pooled=pooled.to(device), dtype=dtype)
        replay(planned, rows)
        ours = predict_velocity(planned, **given, pooled=None, dtype=dtype)
    assert torch.equal(ours, theirs)


STREAMED = (0, 1, 3)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


PAUSE, LONG_PAUSE = 2_000_000, 40_000_000  # cycles: about 1 ms, and longer than the host takes to queue a step's blocks


def pause_before_attention(monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """Every block pauses on the device before its attention: copies that do not wait for the computation then run ahead
    of it, over weights that are still to be used."""
    build = BlockOffload.__init__

    def with_pauses(self: BlockOffload, blocks: Any, *arguments: Any) -> None:
        build(self, blocks, *arguments)
        for block in blocks:
            block.attn.register_forward_pre_hook(lambda *_: torch.cuda._sleep(cycles))

    monkeypatch.setattr(BlockOffload, "__init__", with_pauses)


def pause_before_copies(monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """Every copy begins late: a computation that does not wait for it then uses what its memory held before."""
    run = CudaCopies.run

    def late(self: CudaCopies, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        return run(self, lambda: (torch.cuda._sleep(cycles), work()), after)

    monkeypatch.setattr(CudaCopies, "run", late)


@pytest.fixture
def slow_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    pause_before_attention(monkeypatch, PAUSE)


@pytest.mark.usefixtures("slow_computation")
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_streamed_losses_and_gradients_are_the_resident_ones(precision: str, poison: bool) -> None:
    option = PRECISIONS[precision]
    with sdpa_kernel(SDPBackend.MATH):
        plain = lora_run(option, Setting(), device="cuda")
        streamed = lora_run(option, Setting(STREAMED, host=True, poison=poison), device="cuda")
    torch.testing.assert_close(on_host(streamed), on_host(plain), **CLOSE)


@pytest.mark.values
@pytest.mark.parametrize(("broken", "pause"), [("mark", pause_before_attention), ("wait", pause_before_copies)])
def test_copies_that_do_not_wait_show(
    broken: str, pause: Callable[[pytest.MonkeyPatch, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pause an H100 finished every copy in time."""
    plain = lora_run(PRECISIONS["int8"], Setting(), device="cuda")
    with monkeypatch.context() as patch:  # undone before the next order: the GPU in software tries several
        pause(patch, LONG_PAUSE)
        streamed = lora_run(PRECISIONS["int8"], Setting(STREAMED, poison=True), device="cuda")
        torch.testing.assert_close(streamed, plain, **CLOSE)
        patch.setattr(CudaCopies, broken, lambda self, *_: None)
        streamed = lora_run(PRECISIONS["int8"], Setting(STREAMED, poison=True), device="cuda")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(streamed, plain, **CLOSE)


@pytest.mark.usefixtures("slow_computation")
@pytest.mark.parametrize("precision", ["fp32", "fp32-autocast", "bf16"])
def test_streamed_full_fine_tuning_is_the_resident_one(precision: str) -> None:
    option, results = PRECISIONS[precision], []
    for streamed in ((), STREAMED):
        model = transformer(option, "cuda")
        Full().attach(model, 0)
        setting = Setting(streamed, host=True, poison=True, trained=True)
        hooks = UpdateInBackward(model, prepare(model, setting, "cuda"), lambda p: torch.optim.AdamW(p, lr=1e-2))
        with sdpa_kernel(SDPBackend.MATH):
            for step in range(STEPS):
                loss_of(model, option, step, "cuda").backward()
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
        results.append((weights, [hooks.state[p]["exp_avg"].cpu() for p in model.parameters() if p in hooks.state]))
        if streamed:
            assert all(p.device.type == "cpu" for p in model.transformer_blocks[0].parameters())
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-3)


def test_streaming_frees_what_it_says() -> None:
    model = transformer(PRECISIONS["fp32"], "cuda")
    Lora(rank=2).attach(model, 0)
    gc.collect()
    before = torch.cuda.memory_allocated()
    streamed = prepare(model, Setting(STREAMED), "cuda")
    gc.collect()
    freed = before - torch.cuda.memory_allocated()
    left, slots = sum(home.nbytes for home in streamed.homes.values()), sum(s.flat.numel() for s in streamed._slots)
    assert freed == pytest.approx(left - slots, abs=64 * 1024)


def test_host_memory_is_pinned_at_its_own_size() -> None:
    buffer = host_bytes(5000, torch.device("cuda"))
    assert buffer.is_pinned() and buffer.numel() == 5000
    view = buffer[512:1024]
    del buffer
    gc.collect()
    assert view.is_pinned()


@pytest.mark.values
def test_what_lies_in_pinned_memory_arrives() -> None:
    view = host_bytes(5000, torch.device("cuda"))[512:1024]
    assert view.fill_(7).to("cuda", non_blocking=True).sum().item() == 7 * 512


@pytest.mark.parametrize("weights", ["bf16", "int8", "int8-quanto"])
def test_whole_streamed_runs(weights: str, tiny_config: dict, tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipeline")
    changes: dict[str, Any] = {
        "model": {"pretrained": str(tmp_path / "pipeline")}, "precision": {"weights": weights},
        "validation": {"prompts": ["a dot"], "steps": 2, "loss_samples": 2},
    }  # fmt: skip
    whole, streamed = (
        losses(run_on(tiny_config, "cuda", name=name, memory={"checkpointing": "all", **memory}, **changes))
        for name, memory in (("whole", {}), ("streamed", {"resident_blocks": 1, "offload_checkpoint_inputs": True}))
    )
    assert streamed == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "paged_adamw8bit", "adamw_bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_optimizer_in_the_backward_pass_gives_the_losses_of_the_normal_one(
    dtype: str, optimizer: str, tiny_config: dict
) -> None:
    """Draws have keys, so rounding is the same; torch's AdamW over several parameters may differ in the last bits."""
    config = tiny_config | {"adapter": {"method": "full"}, "optimizer": {"name": optimizer, "lr": 1e-3}}
    changes = {"precision": {"weights": dtype}, "train": {"clip": "per_parameter"}}
    after, during = (
        losses(run_on(config, "cuda", name=f"lever-{on}", memory={"optimizer_in_backward": on}, **changes))
        for on in (False, True)
    )
    assert during == pytest.approx(after, rel=1e-3)


def test_t5_layer_by_layer_gives_the_whole_encoders_states_and_holds_one_layer(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    from simpletune.models.shared.parts import Part
    from simpletune.models.text.encoder import Tokens
    from simpletune.models.text.layered_t5 import LayeredT5

    torch.manual_seed(0)
    config = T5Config(vocab_size=4000, d_model=512, d_kv=64, d_ff=8192, num_layers=6, num_heads=8,
                      feed_forward_proj="gated-gelu")  # fmt: skip
    model = T5EncoderModel(config).bfloat16().eval()
    model.save_pretrained(tmp_path / "text_encoder_3")
    ids = torch.randint(0, 4000, (4, 32))
    with torch.no_grad():
        expected = model.cuda()(ids.cuda())[0].cpu()
    layer = sum(parameter.nbytes for parameter in model.encoder.block[1].parameters())
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    part, device = Part("text_encoder_3", tmp_path / "text_encoder_3"), torch.device("cuda")
    opened = LayeredT5(part, torch.bfloat16, device)
    rows = torch.stack([output["hidden"] for output in opened.encode(Tokens(ids), 4)])
    torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)
    assert torch.cuda.max_memory_allocated() - before < 3 * layer


@pytest.mark.parametrize("on", [False, True])
def test_no_step_waits_for_the_device(on: bool, tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA itself raises where the host waits, in every step but the first two, which fill caches."""
    from simpletune.stages.step.train_step import TrainStep

    honest, steps = TrainStep.step, []

    def step(self: TrainStep, *args: Any) -> Any:
        steps.append(self)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")
        try:
            return honest(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainStep, "step", step)
    run = run_on(tiny_config, "cuda", speed={"prefetch": on}, train={"steps": 8})
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 9)) and all(row["seconds"] > 0 for row in rows)


def test_seconds_a_step_add_up_to_the_stage(tiny_config: dict) -> None:
    run = run_on(tiny_config, "cuda", train={"steps": 40})
    whole = json.loads((run / "summary.json").read_text())["stages"]["train"]["seconds"]
    assert 0.3 * whole < sum(row["seconds"] for row in read_metrics(run)) <= 1.02 * whole


@pytest.mark.parametrize("kernel", ["flash", "efficient", "math"])
def test_attention_by_the_kernel_that_is_asked_for(kernel: str, tiny_config: dict) -> None:
    run = run_on(tiny_config, "cuda", precision={"weights": "bf16"}, speed={"attention": kernel})
    assert json.loads((run / "summary.json").read_text())["attention"] == kernel


@pytest.mark.parametrize("weights", ["bf16", "int8", "nf4"])
def test_compiled_blocks_give_the_losses_of_those_that_are_not(
    weights: str, tiny_config: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"precision": {"weights": weights}, "memory": {"checkpointing": "all"}}
    runs = [run_on(tiny_config, "cuda", name=f"{on}", speed={"compile": on}, **changes) for on in (False, True)]
    assert "compile the blocks" in capsys.readouterr().out  # Triton is here
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=5e-3)


def update_in_place(dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows of SD3 Medium's width, its output, and the factors of an update."""
    rows, width, rank = 4096 + 333, 1536, 16
    torch.manual_seed(0)
    x, y = (torch.randn(rows, width, device="cuda", dtype=dtype) for _ in range(2))
    a, b = (torch.randn(shape, device="cuda", dtype=dtype) / 40 for shape in ((rank, width), (width, rank)))
    add_update(y.clone(), x, a, b, 0.5)  # cuBLAS takes its workspace once
    return [x, y, a, b]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_in_place_take_no_tensor_of_the_output_s_size(dtype: torch.dtype) -> None:
    x, y, a, b = update_in_place(dtype)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_update(y, x.requires_grad_(), a.requires_grad_(), b.requires_grad_(), 0.5)
    assert torch.cuda.max_memory_allocated() - before < y.nbytes / 4


@pytest.mark.values
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_added_in_place_at_the_real_size(dtype: torch.dtype) -> None:
    """Sums near those of float64, gradients too."""
    x, y, a, b = update_in_place(dtype)
    exact = y.double() + 0.5 * x.double() @ a.double().t() @ b.double().t()
    added = add_update(y, x.requires_grad_(), a.requires_grad_(), b.requires_grad_(), 0.5)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(added.double(), exact, rtol=tolerance, atol=tolerance)
    added.sum().backward()
    assert x.grad is not None
    grad = 0.5 * torch.ones_like(exact) @ b.detach().double() @ a.detach().double()
    torch.testing.assert_close(x.grad.double(), grad, rtol=tolerance, atol=tolerance)


def test_the_fused_updates_of_a_run_and_of_its_resume_agree(tiny_config: dict) -> None:
    """Its counters lie on the device, also those that come from a checkpoint."""
    whole = run_on(tiny_config, "cuda", name="whole")
    run_on(tiny_config, "cuda", name="halves", train={"steps": 2})
    halves = run_on(tiny_config, "cuda", "latest", name="halves")
    assert losses(halves) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.timing
def test_a_row_of_the_speed_grid_at_the_real_size() -> None:
    from benchmarks import speed
    from benchmarks.roofline import rates
    from benchmarks.speed_rows import grid
    from simpletune.engine.profiling.figures import KINDS

    device = torch.device("cuda", torch.cuda.current_device())
    measured = rates(device)
    assert all(rate["rate"] > 0 for rate in measured.values())
    for name in ("diffusers, LoRA, 512 px", "LoRA int8, 512 px"):
        row = speed.measure(name, grid()[name], device, measured)
        assert sum(row[kind] for kind in KINDS) == pytest.approx(1, abs=0.01)
        assert row["linears"] > 0.1 and row["attention"] > 0.01 and 0 < row["of_measured"] < 1
        assert row["times_floor"] > 1 and 2000 < row["peak_mib"] < 20_000


@pytest.mark.parametrize("name", NAMES)
def test_a_group_s_numbers_are_those_of_parameters_that_step_alone(name: str) -> None:
    """With AdamW nothing waits for the device in a group's update, once states are there."""
    steps = []

    def together(optimizer: RoundedOptimizer) -> None:
        steps.append(1)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 4 and name == "adamw" else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    option, start = option_of(name, weight_decay=0.1), [tensor.cuda() for tensor in start_of(40)]
    ours, theirs = (stepped(option, start, how, 6) for how in (together, alone))
    torch.testing.assert_close(on_host(ours), on_host(theirs), rtol=0, atol=0)
