"""Set up a run's profiler traces."""

from __future__ import annotations

from collections.abc import Callable

import torch

from simpletune.config.schema import Profile, TrainConfig, profile_folder
from simpletune.config.validation_schedule import is_due
from simpletune.engine.profiling.traces import EpochTraces, Facts
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.denoiser import model_units
from simpletune.models.shared.flops import trained_of
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import TrainStep


def traces_of(
    config: TrainConfig, core: TrainStep, batches: BatchLoader, steps: int, cuda: bool, warn: Callable[[str], None]
) -> EpochTraces:
    """Create the traces of a run of ``steps`` in all; only the first process records any."""
    plan, option = batches.plan, config.profile if core.accelerator.is_main_process else Profile(max_traces=0)
    known: dict[Size, int] = {}

    def flops(step: int) -> float:  # of a step, which depend on its pictures' shapes
        total = 0
        for draws in batches.passes.micro_batches(step):
            size = draws[0].view.bucket
            if size not in known:
                parameters = {name: tuple(value.shape) for name, value in core.named.items()}
                known[size] = core.config.model.flops(trained_of(parameters), size, plan.batch_size).model
            total += known[size]
        return float(total)

    def interrupted(step: int) -> bool:  # validation or saving follows the step
        return is_due(config.checkpoint.every, step + 1) or is_due(config.validation.every, step + 1)

    facts = Facts(cuda, torch.cuda.get_device_name() if cuda else "", flops, model_units(core.denoiser), interrupted)
    return EpochTraces(option, profile_folder(config), steps, plan.steps_per_epoch, facts, warn)
