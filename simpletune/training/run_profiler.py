"""A run's profiler windows: what they have to know of the run, and the predicted memory in their summaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simpletune.config.schema import Profile, profile_folder
from simpletune.estimate.step_memory import snapshots_of_step
from simpletune.memory.snapshot import MemorySnapshot
from simpletune.models.buckets import Size
from simpletune.models.flops import sd3_flops, trained_of
from simpletune.profiling import EpochTraces, Facts
from simpletune.tensors import trained_parameters

if TYPE_CHECKING:
    from simpletune.training.run import Run


def traces_of(run: Run, interrupted: Callable[[int], bool]) -> EpochTraces:
    """The windows of a run; only the first process has any.

    Args:
        run: set up.
        interrupted: whether validation or saving stands between a step and the next.
    """
    option = run.config.profile if run.main else Profile(max_traces=0)
    blocks = run.transformer.transformer_blocks
    cuda = run.stages.cuda
    facts = Facts(cuda, device_name() if cuda else "", flops_of_steps(run), blocks, interrupted)
    folder, per_epoch = profile_folder(run.config), run.prepared.plan.steps_per_epoch
    traces = EpochTraces(option, folder, run.steps, per_epoch, facts, run.trackers.warn)
    traces.announce(run.start)
    return traces


def device_name() -> str:
    """What CUDA calls the device."""
    import torch

    return torch.cuda.get_device_name()


def flops_of_steps(run: Run) -> Callable[[int], float]:
    """The operations of a step by its number: they depend on the shapes of its pictures."""
    known: dict[Size, int] = {}

    def of_size(size: Size) -> int:
        if size not in known:
            parameters = {name: tuple(value.shape) for name, value in trained_parameters(run.transformer).items()}
            model = run.core.config.model
            batch = run.prepared.plan.batch_size
            known[size] = sd3_flops(model.known_config(), trained_of(parameters), size, batch, model.text_tokens).model
        return known[size]

    def of_step(step: int) -> float:
        plan, process = run.prepared.plan, run.accelerator.process_index
        draws = [plan.micro_batch(step, micro, process)[0] for micro in range(plan.micros(step))]
        return float(sum(of_size(draw.view.bucket) for draw in draws))

    return of_step


def add_memory(run: Run, traces: EpochTraces) -> None:
    """Put the predicted memory of a step into the summaries, if there are any. It takes a second or a few."""

    def predicted() -> list[MemorySnapshot]:
        return snapshots_of_step(run.core.config, run.prepared.plan.largest())

    traces.add_memory(predicted)
