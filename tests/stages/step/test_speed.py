"""Fewer passes: what is read late, fetched ahead, or chosen gives the same run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failpoints
import pytest
import torch
from tiny_runs import run_with, saved_weights
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.config.load import read_config
from simpletune.engine.optim.options import AdamW
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.attention import AttentionCall, choose_kernel, settle_attention
from simpletune.stages.step.batch_loader import BatchLoader, Prefetcher
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.console import verbose
from simpletune.system.options import UserError
from simpletune.training import trainer as train_module
from simpletune.training.checkpointer import Checkpointer
from simpletune.training.pending_steps import PendingStep

CPU = torch.device("cpu")
READS = {"item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero"}


class _Calls(TorchFunctionMode):
    """Keeps the names of what reads a tensor's values from Python."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """Keeps the kernels that read a tensor's values."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loop_reads_nothing_but_the_step_before(
    accumulation: int, tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, and from its end until the queue reads, no tensor's value is asked for."""
    found: list[str] = []
    order: list[tuple[str, int]] = []
    honest, read, launch = TrainStep.step, PendingStep.read, train_module.DeviceEvent

    def step(self: TrainStep, *args: Any) -> Any:
        with _Calls(found), _Kernels(found):
            return honest(self, *args)

    def watched(self: PendingStep) -> Any:
        order.append(("read", self.step))
        return read(self)

    monkeypatch.setattr(TrainStep, "step", step)
    monkeypatch.setattr(PendingStep, "read", watched)
    monkeypatch.setattr(
        train_module, "DeviceEvent", lambda device: order.append(("launch", len(order))) or launch(device)
    )
    run_with(tiny_config, train={"steps": 4, "gradient_accumulation": accumulation}, checkpoint={"every": 3})
    assert found == []
    assert [what for what, _ in order] == ["launch", "launch", "read", "launch", "read", "read", "launch", "read"]
    assert [step for what, step in order if what == "read"] == [0, 1, 2, 3]  # all are read before a save


def test_every_step_is_written_down_before_its_checkpoint(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, honest = [], Checkpointer.save

    def save(self: Any, step: int) -> None:
        seen.append((step, [row["step"] for row in read_metrics(self.folder)]))
        honest(self, step)

    monkeypatch.setattr(Checkpointer, "save", save)
    run_with(tiny_config, checkpoint={"every": 2})
    assert seen == [(2, [1, 2]), (4, [1, 2, 3, 4])]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batches are fetched ahead on the CPU too."""
    monkeypatch.setattr(train_module, "Prefetcher", lambda batches, steps, on: Prefetcher(batches, steps, True))
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.usefixtures("ahead")
def test_a_run_with_batches_fetched_ahead_is_the_same_run(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, honest = set(), BatchLoader.fetch

    def fetch(self: BatchLoader, step: int) -> Any:
        threads.add(threading.current_thread().name)
        return honest(self, step)

    monkeypatch.setattr(BatchLoader, "fetch", fetch)
    settings: dict = {"train": {"batch_size": 2}, "memory": {"modulation": "plan", "modulation_window": 3}}
    run = run_with(tiny_config, name="ahead", **settings)
    assert len(threads) == 2
    monkeypatch.setattr(train_module, "Prefetcher", lambda batches, steps, on: Prefetcher(batches, steps, False))
    plain = run_with(tiny_config, name="plain", **settings)
    torch.testing.assert_close(saved_weights(run, 4), saved_weights(plain, 4), rtol=0, atol=0)


@pytest.mark.usefixtures("ahead")
def test_what_fetching_raises_is_raised_at_its_own_step(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, begun = BatchLoader.fetch, []

    def fetch(self: BatchLoader, step: int) -> Any:
        if step == 3:
            raise UserError("the file is gone")
        return honest(self, step)

    monkeypatch.setattr(BatchLoader, "fetch", fetch)
    failpoints.watch(begun.append)
    with pytest.raises(UserError, match="the file is gone"):
        run_with(tiny_config)
    assert begun.count("step.begun") == 4 and begun.count("step.updated") == 3


def test_the_fused_update_is_the_plain_one_and_takes_its_state() -> None:
    torch.manual_seed(0)
    values, results = torch.randn(33, 7), []
    for fused in (False, True):
        weight = torch.nn.Parameter(values.clone())
        optimizer = AdamW(lr=0.01, weight_decay=0.1).build([weight])
        optimizer.param_groups[0]["fused"] = fused or None
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0]["fused"] = True  # as a checkpoint of an older version goes on
            weight.grad = torch.sin(values * (step + 1))
            optimizer.step()
        results.append({"weight": weight.detach(), **optimizer.state[weight]})
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)


def test_the_kernel_of_attention_is_found_out_said_or_refused(
    tiny_config: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tiny_config, speed={"attention": "math"})
    assert json.loads((run / "summary.json").read_text())["attention"] == "math"
    shape = AttentionCall(1, 2, 20, 20, 64, True, "training")
    assert choose_kernel("auto", shape, CPU, torch.bfloat16) == "flash"
    with pytest.raises(UserError, match="speed.attention: cudnn cannot compute 2 heads of 20 x 64 .*Use auto or math"):
        choose_kernel("cudnn", shape, CPU, torch.float32)
    config, _ = read_config(Path("configs/more/sd3_medium_lora_r16_int8.json"), ["data.path=demo:pictures"])
    assert config.precision.product_dtype() == torch.bfloat16
    with verbose():
        assert settle_attention(config, [(256, 256)], CPU) == "flash"
    assert "with the flash kernel (speed.attention auto)" in capsys.readouterr().out


def test_the_queue_reads_at_once_what_the_guard_has_read(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    left, honest = [], train_module.Trainer._log

    def log(self: train_module.Trainer, *rest: Any, **named: Any) -> Any:
        signal = honest(self, *rest, **named)
        left.append(len(self.metrics._pending))
        return signal

    monkeypatch.setattr(train_module.Trainer, "_log", log)
    run_with(tiny_config, name="stop")
    run_with(tiny_config, name="skip", train={"on_nonfinite": "skip"})
    assert left == [1, 1, 1, 0, 0, 0, 0, 0]
