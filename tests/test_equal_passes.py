"""Micro-batches after a step's second are counted as that one: every figure stays that of the whole simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletune.estimate.estimate_command import read_for_estimate
from simpletune.estimate.simulate import simulate
from simpletune.estimate.timing.recorder import Recorder
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.options import Json

MIXED = ("precision.weights=bf16", "precision.compute=bf16")
RUNS = {
    "plain": (),
    "streamed": (*MIXED, "memory.checkpointing=all", "memory.resident_blocks=1"),
    "inputs on the host": (*MIXED, "memory.checkpointing=all", "memory.offload_checkpoint_inputs=true"),
    "int8": ("precision.weights=int8", "precision.compute=bf16"),
    "plan": (*MIXED, "adapter.targets=attention", "memory.modulation=plan", "memory.modulation_window=2"),
    "full": (*MIXED, "adapter.method=full", "train.clip=per_parameter"),
    "fp16": ("precision.weights=bf16", "precision.compute=fp16"),
    "prior": ("prior.method=base_prediction", "prior.trigger=glim picture", "prior.prompt=flat picture"),
    "embeddings": ("text.embeddings.token=glim", "text.embeddings.place=input", "text.embeddings.initial=flat"),
}
FAST = ("streamed", "inputs on the host")


def simulated(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, *, whole: bool = False) -> tuple[Json, int]:
    """Everything that a simulation of four micro-batches says but how long it took, and how many of them ran."""
    words = ["adapter.method=lora", "train.gradient_accumulation=4", "device=cpu", *overrides]
    config = read_for_estimate(Path("configs/demo.json"), words)
    ran, compute = [], TrainStep.compute
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute", lambda core, batch: (ran.append(1), compute(core, batch))[1])
        if whole:
            patch.setattr(simulate, "count_equal_passes", lambda core, recorder: None)
        report = simulate.simulate(config, recorder=Recorder(cuda=True))
    sections = [section.as_json() for section in report.sections]
    return {**vars(report), "sections": sections, "seconds": 0}, len(ran)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_two_micro_batches_run_and_all_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, ran = simulated(RUNS[name], monkeypatch)
    whole, all_ran = simulated(RUNS[name], monkeypatch, whole=True)
    assert (ran, all_ran) == (2, 8 if name == "prior" else 4)  # a class prompt is a pass of its own
    assert composed == whole


def test_micro_batches_that_are_summed_as_a_tree_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated(("train.reduce=exact", "train.gradient_accumulation=4"), monkeypatch)[1] == 4
