"""Set up a run's profiler traces, and add the predicted memory to their summaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from simpletune.config.schema import Profile, profile_folder
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.engine.profiling.traces import EpochTraces, Facts
from simpletune.engine.tensors import trained_parameters
from simpletune.estimate.simulate.simulate import snapshots_of_step
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.denoiser import model_units
from simpletune.models.shared.flops import trained_of
from simpletune.system.devices import capability_of

if TYPE_CHECKING:
    from simpletune.training.run import Run


def traces_of(run: Run, interrupted: Callable[[int], bool]) -> EpochTraces:
    """Create the traces of a run; only the first process records any.

    Args:
        run: current run.
        interrupted: returns whether validation or saving follows a step.
    """
    option = run.config.profile if run.main else Profile(max_traces=0)
    blocks = model_units(run.denoiser)
    cuda = run.stages.cuda
    device = torch.cuda.get_device_name() if cuda else ""
    facts = Facts(cuda, device, flops_of_steps(run), blocks, interrupted)
    folder, per_epoch = profile_folder(run.config), run.prepared.plan.steps_per_epoch
    traces = EpochTraces(option, folder, run.steps, per_epoch, facts, run.trackers.warn)
    traces.announce(run.start)
    return traces


def flops_of_steps(run: Run) -> Callable[[int], float]:
    """Return a function that counts a step's FLOPs, which depend on its pictures' shapes."""
    known: dict[Size, int] = {}

    def of_size(size: Size) -> int:
        if size not in known:
            parameters = {name: tuple(value.shape) for name, value in trained_parameters(run.denoiser).items()}
            model = run.core.config.model
            known[size] = model.flops(trained_of(parameters), size, run.prepared.plan.batch_size).model
        return known[size]

    def of_step(step: int) -> float:
        micros = run.batches.passes.micro_batches(step)
        return float(sum(of_size(draws[0].view.bucket) for draws in micros))

    return of_step


def add_memory(run: Run, traces: EpochTraces) -> None:
    """Add a step's predicted memory to the trace summaries, if any; takes a few seconds."""

    def predicted() -> list[MemorySnapshot]:
        device = run.accelerator.device
        return snapshots_of_step(run.core.config, run.prepared.plan.largest(), capability_of(device))

    traces.add_memory(predicted)
