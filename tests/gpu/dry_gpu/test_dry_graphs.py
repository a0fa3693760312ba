"""CUDA graphs under the stub of CUDA: what a card refuses in a capture, and which passes are replayed."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dry import count, counted, process, used
from optimizers import NAMES as OPTIMIZERS
from tiny_runs import run_on
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks import graphs as script
from benchmarks.tiny_models import tiny_zimage
from simpletune.commands.doctor.bench_steps import TINY
from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_model_folder
from simpletune.engine import graphs as engine
from simpletune.runs.folder import read_metrics, read_summary
from simpletune.stages.load import empty_base
from simpletune.stages.step import replay
from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import TrainStep, assemble

pytestmark = pytest.mark.dry
CUDA = torch.device("cuda", 0)
NODE = 10240  # bytes (graphs.c)
CAPTURES = "cudaGraphInstantiateWithFlags"
NAMES = ("replayed_nodes", "cudaLaunchKernel", "misuses", "synchronisations", "graph_bytes", CAPTURES)

CAPTURE = """
import sys, torch
sys.path.insert(0, "tests/support")
from dry import count

def capture(work, mode="thread_local", stream=None):
    graph, stream = torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    said = []
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        for step in (work, graph.capture_end):
            try:
                step()
            except RuntimeError as error:
                said.append(str(error).splitlines()[0].removeprefix("CUDA error: "))
    return graph, said

x, side = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()

def fork(join):
    def work():
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            x.add_(1)
        if join:
            here.wait_stream(side)
    return work

event = torch.cuda.Event()
event.record()
inner = torch.cuda.Event()
"""
REFUSED = {  # the work, what is said during it and at the end
    "x.sum().item()": ["operation not permitted when stream is capturing", "operation failed due to a previous error"],
    "torch.cuda.synchronize()": ["operation not permitted when stream is capturing", "operation failed"],
    "torch.cuda.current_stream().query()": ["operation not permitted when stream is capturing", "operation failed"],
    "torch.cuda.current_stream().wait_event(event)": ["dependency created on uncaptured work", "operation failed"],
    "(inner.record(), inner.query())": [
        "operation not permitted on an event last recorded in a capturing",
        "operation",
    ],
    "(inner.record(), inner.synchronize())": ["operation not permitted on an event last recorded", "operation failed"],
    "fork(False)()": ["capturing stream has unjoined work"],
}


def test_what_a_card_refuses_in_a_capture_is_refused_and_counted() -> None:
    code = f"{CAPTURE}\nwords = {list(REFUSED)!r}\n"
    code += """
for word in words:
    before = count("misuses")
    said = capture(lambda: eval(word))[1]
    torch.empty(1 << 22, device="cuda")  # work goes on
    print([word, said, count("misuses") - before])
"""
    done = process(code, DRY_STRICT=0)
    assert done.returncode == 0, done.stderr
    told = [eval(line) for line in done.stdout.splitlines()]
    for (word, said, misuses), expected in zip(told, REFUSED.values(), strict=True):
        assert misuses == 1, word
        assert len(said) == len(expected) and all(map(str.startswith, said, expected)), (word, said)


def test_a_capture_counts_its_work_and_a_replay_repeats_it() -> None:
    code = f"""{CAPTURE}
import ctypes
graph, said = capture(fork(True))
bytes_of = count("graph_bytes")
graph.replay()
graph.replay()
nodes = count("replayed_nodes")
del graph
print(said, bytes_of, nodes, count("graph_bytes"), count("misuses"))
"""
    done = process(code)
    assert done.stdout.split() == ["[]", str(NODE), "2", "0", "0"], done.stderr


def test_work_beside_a_capture_is_found_where_a_graph_would_lack_it() -> None:
    code = f"""{CAPTURE}
def work():
    x.add_(1)
    with torch.cuda.stream(torch.cuda.default_stream()):
        x.add_(1)

print(capture(work)[1], count("misuses"))
"""
    done = process(code, DRY_STRICT=0)
    assert done.stdout.split() == ["[]", "1"] and "default stream while this thread captures" in done.stderr


class Step:
    """The step of the tiny SD3 with some settings, on the stub."""

    def __init__(self, *overrides: str):
        base = ("schedule.warmup_steps=0", "data.path=demo:pictures", "precision.compute=auto", "speed.graphs=true")
        tiny = () if any(text.startswith("model.") for text in overrides) else TINY
        config, _ = read_config(Path("sd3_medium_lora_r16_int8"), [*base, *tiny, *overrides])
        self.config = resolve_model_folder(settle_compute(config, torch.cuda.get_device_capability()))
        given = self.config
        model = empty_base(given.model, given.memory, given.precision, CUDA, [(64, 64)])
        self.core: TrainStep = assemble(given, model, SingleProcess(CUDA))  # type: ignore[arg-type]
        self.core.graphs = replay.graphs_of(self.core)
        self.count, self._before = 0, count("graph_bytes")
        model.train()

    @property
    def graph_bytes(self) -> int:
        """Of the driver, for the graphs that are there now."""
        return count("graph_bytes") - self._before

    def take(self, size: tuple[int, int] = (64, 64)) -> dict[str, int]:
        """Take a step; what it did."""
        batches = SyntheticBatches(self.config, self.core, size=size, device=CUDA).step(self.count)
        self.count += 1
        with counted(*NAMES) as counts:
            self.core.step(batches)
        return counts


@pytest.fixture(autouse=True)
def inputs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay checks that all tensors live that its capture read from outside."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def checked(graph: torch.cuda.CUDAGraph, **options: Any) -> None:
        begin(graph, **options, check_input_liveness=True)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", checked)
    gc.collect()


FULL = ("adapter.method=full", "precision.weights=bf16")
KLEIN = (
    "model.family=klein", "model.pretrained=demo:tiny-klein", "model.text_length=32", "validation.prompts=[]",
    "data.resolution=64",
)  # fmt: skip
SETTINGS: dict[str, Sequence[str]] = {
    "int8": (),
    "bf16": ("precision.weights=bf16",),
    "nf4": ("precision.weights=nf4",),
    "plan": ("memory.modulation=plan",),
    "not checkpointed": ("memory.checkpointing=none",),
    "feed-forward networks alone": ("memory.checkpointing=feed_forward",),
    "kept attention": ("memory.keep_attention=all", "memory.feed_forward=alone"),
    "accumulation": ("train.gradient_accumulation=3",),
    "full, 8-bit": (*FULL, "optimizer.name=adamw8bit"),
    "full, fp32": ("adapter.method=full", "precision.weights=fp32"),
    "part": ("adapter.method=partial", "precision.weights=bf16"),
    "LoKr": ("adapter.method=lokr",),
    "LoHa": ("adapter.method=loha",),
    "DoRA": ("adapter.method=dora",),
    "prior": ("prior.method=base_prediction", "prior.prompt=a disc"),
    "max_norm": ("adapter.max_norm=1.0",),
    "EMA": ("ema.decay=0.99",),
    "deterministic": ("speed.deterministic=true",),
    "efficient attention": ("speed.attention=efficient",),
    "math attention": ("speed.attention=math",),
    "OFT": ("adapter.method=oft",),
    "klein": KLEIN,
    "klein, plan": (*KLEIN, "memory.modulation=plan"),
    **{name: (f"optimizer.name={name}", f"optimizer.lr={1 if name == 'prodigy' else 1e-4}") for name in OPTIMIZERS},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_replayed(name: str) -> None:
    step = Step(*SETTINGS[name])
    first, plain, captured, *replayed = [step.take() for _ in range(5)]
    passes = SyntheticBatches(step.config, step.core).accumulation
    assert first["replayed_nodes"] == 0
    assert (
        plain["replayed_nodes"] == 0 or passes > 1
    )  # two passes of a step are enough, and none in the first is a graph
    nodes = captured["replayed_nodes"]
    assert nodes > 300 * passes
    for each in replayed:
        assert each["replayed_nodes"] == nodes and each["misuses"] == each["synchronisations"] == 0
        assert each["graph_bytes"] == 0 and each["cudaLaunchKernel"] < first["cudaLaunchKernel"] / 1.3
    assert step.core.graphs is not None and step.core.graphs.off is None


def test_z_image_with_its_kernels_is_replayed(tmp_path: Path) -> None:
    model = f"model.pretrained={tiny_zimage.build(tmp_path / 'zimage')}"
    step = Step("model.family=zimage", model, "model.text_length=64", "validation.prompts=[]", "data.resolution=64")
    first, _, captured, replayed = [step.take() for _ in range(4)]
    assert replayed["replayed_nodes"] == captured["replayed_nodes"] > 300 and replayed["misuses"] == 0
    assert replayed["cudaLaunchKernel"] < first["cudaLaunchKernel"] / 1.3


def test_outside_of_a_lora_s_graph_few_kernels_are_launched() -> None:
    step = Step("precision.weights=bf16")
    assert [step.take() for _ in range(4)][-1]["cudaLaunchKernel"] <= 40


def test_buckets_share_a_pool_and_the_oldest_graph_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST", 2)
    step = Step("precision.weights=bf16", "memory.crop_positions=false")
    sizes = [(64, 64), (128, 64), (64, 128)]
    for size in sizes:
        for _ in range(2):
            step.take(size)
    assert step.take(sizes[0])[CAPTURES] == 1
    one = torch.cuda.memory_reserved()
    assert step.take(sizes[1])[CAPTURES] == 1
    assert torch.cuda.memory_reserved() - one < 0.3 * one
    both = step.graph_bytes
    assert step.take(sizes[0])[CAPTURES] == 0
    assert step.take(sizes[2])[CAPTURES] == 1 and step.graph_bytes < 1.2 * both  # in place of (128, 64)
    assert step.take(sizes[0])[CAPTURES] == 0
    assert step.take(sizes[1])[CAPTURES] == 1


def test_a_new_size_s_plain_passes_find_the_memory_of_the_graphs_free() -> None:
    step = Step("precision.weights=bf16", "memory.crop_positions=false")
    for _ in range(3):
        step.take()
    held = used()
    assert step.graph_bytes > 0
    step.take((128, 64))
    assert step.graph_bytes == 0 and used() < held
    step.take((128, 64))
    assert step.take()["replayed_nodes"] > 0, "captured again without another plain pass"


def test_dropped_graphs_leave_what_a_plain_run_holds() -> None:
    step = Step("precision.weights=bf16")
    for _ in range(2):
        step.take()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        step.take()
    graphs = step.core.graphs
    assert graphs is not None and torch.cuda.memory_reserved() > before
    graphs.drop()
    assert torch.cuda.memory_reserved() <= before and step.graph_bytes == 0
    assert all(parameter.grad is None for parameter in step.core.parameters)
    assert step.take()["replayed_nodes"] > 0


def failing(step: Step, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Let a capture fail, or the making of its graph."""
    if at == "instantiation":
        monkeypatch.setenv("DRY_FAIL", "cudaGraphInstantiateWithFlags=2")
        return
    honest = step.core.variant.backward

    def backward(loss: torch.Tensor) -> None:
        honest(loss)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("something of the host")

    monkeypatch.setattr(step.core.variant, "backward", backward)


@pytest.mark.parametrize("at", ["capture", "instantiation"])
def test_a_capture_that_fails_leaves_the_gradients_and_the_run_goes_on(
    at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Step("precision.weights=bf16", "train.gradient_accumulation=2")
    step.take()
    failing(step, monkeypatch, at)
    seen: list[list[Any]] = []
    graphs = step.core.graphs
    assert graphs is not None
    honest = graphs._capture

    def capture(*arguments: Any) -> Any:
        before = [parameter.grad for parameter in step.core.parameters]
        found = honest(*arguments)
        seen.append([a is b for a, b in zip(before, [p.grad for p in step.core.parameters], strict=True)])
        return found

    monkeypatch.setattr(graphs, "_capture", capture)
    for _ in range(3):
        assert step.take()["replayed_nodes"] == 0
    said = capsys.readouterr().out
    assert len(seen) == 1 and all(seen[0])
    assert said.count("graphs  not captured, the run continues step by step:") == 1
    assert ("something of the host" if at == "capture" else "out of memory") in said


@pytest.mark.parametrize("setting", ["adapter.dropout=0.1", "adapter.rank_dropout=0.1", "adapter.module_dropout=0.1"])
def test_random_numbers_are_found_in_the_first_pass(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = Step(setting, "memory.checkpointing=all")
    assert [step.take()["replayed_nodes"] for _ in range(4)] == [0] * 4
    assert capsys.readouterr().out.count("draws random numbers (dropout)") == 1


def test_too_little_room_beside_the_pool_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Step("precision.weights=bf16")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 2**30))
    assert [step.take()["replayed_nodes"] for _ in range(4)] == [0] * 4
    assert "0 MiB are free beside it, and the update may take" in capsys.readouterr().out
    assert step.graph_bytes == 0


@pytest.mark.parametrize(("device", "on"), [(1e-9, True), (1e9, False)])
def test_auto_replays_where_the_host_limits_the_step(
    device: float, on: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "PROVEN", "a card of this test")
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda self, other: 1000 * device)
    step = Step("precision.weights=bf16", "speed.graphs=auto")
    nodes = [step.take()["replayed_nodes"] for _ in range(5)]
    assert nodes[2] > 0 and (nodes[3] > 0) is (nodes[4] > 0) is on
    assert f"graphs  {'on' if on else 'off'}: the host takes" in capsys.readouterr().out


def test_auto_is_off_until_a_card_has_shown_equal_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.PROVEN is None
    assert Step("speed.graphs=auto").core.graphs is None and Step("speed.graphs=false").core.graphs is None


REFUSED_SETTINGS = {
    "memory.resident_blocks": ("memory.resident_blocks=0", "memory.checkpointing=all"),
    "memory.offload_checkpoint_inputs": ("memory.offload_checkpoint_inputs=true", "memory.checkpointing=all"),
    "memory.optimizer_in_backward": (
        *FULL, "optimizer.name=adamw_bf16", "memory.optimizer_in_backward=true", "train.clip=per_parameter"
    ),
    "fp16": ("precision.compute=fp16",),
    "train.reduce exact": ("train.reduce=exact",),
    "speed.compile": ("speed.compile=true", "precision.weights=bf16"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED_SETTINGS)
def test_what_cannot_be_replayed_is_said(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = read_config(
        Path("sd3_medium_lora_r16_int8"),
        ["data.path=demo:pictures", *TINY, "speed.graphs=true", *REFUSED_SETTINGS[what]],
    )
    assert what in (replay.why_not(settle_compute(config, (9, 0)), CUDA) or "")


def test_processes_and_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Step().config
    assert replay.why_not(config, CUDA) is None
    assert "several processes" in (replay.why_not(config, CUDA, 2) or "")
    assert "not on a CUDA device" in (replay.why_not(config, torch.device("cpu")) or "")
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    assert "torch 2.11 or newer, and this is 2.10.1" in (replay.why_not(config, CUDA) or "")


def test_a_run_with_evaluations_and_pictures_frees_and_captures_again(
    tiny_config: dict, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped, honest = [], engine.Graphs.drop

    def drop(graphs: engine.Graphs) -> None:
        dropped.append(len(graphs._graphs))
        honest(graphs)

    monkeypatch.setattr(engine.Graphs, "drop", drop)
    validation = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 2, "every": 5}
    with counted(*NAMES) as counts:
        run = run_on(
            tiny_config, "cuda", speed={"graphs": True}, train={"steps": 14}, validation=validation,
            checkpoint={"every": 4}, precision={"weights": "bf16"},
        )  # fmt: skip
    assert counts["misuses"] == counts["graph_bytes"] == 0 < counts["replayed_nodes"]
    assert len(dropped) >= 3 and all(dropped) and "replayed as one CUDA graph" in capsys.readouterr().out
    summary = read_summary(run)
    assert summary is not None and summary["complete"] and len(read_metrics(run)) == 14
    assert len(list((run / "samples").rglob("*.png"))) >= 4


def test_the_script_for_a_card_runs_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without values, all bits are equal; a row that fails is a note. Nothing is predicted, for which torch 2.11 lacks
    names."""
    monkeypatch.setattr(FakeTensor, "__new__", None)
    monkeypatch.setattr(script, "LATE_STEPS", 3)
    rows = ";".join([*list(script.ROWS)[:2], "SD3 LoRA int8", script.LATE])
    monkeypatch.setitem(script.ROWS, list(script.ROWS)[1], ("memory.resident_blocks=0", "memory.checkpointing=all"))
    page = script.run(tmp_path / "cpu", 5, rows, TINY)
    assert page == tmp_path / "gpu-l4" / "graphs.md"
    first, refused, int8, late = json.loads(page.with_suffix(".json").read_text())["rows"].values()
    for row in (first, int8):
        assert row["same"] == row["plain_same"] == "yes" and row["replayed"] < row["plain"] and row["driver_mib"] >= 3
    assert "memory.resident_blocks" in refused["note"]
    assert late["same"] == "yes" and late["note"].startswith("12 copies delayed")
