"""Predict memory over one training step by kind, for the summaries beside a run's traces."""

from __future__ import annotations

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.estimate.simulate.simulate import CPU, accounting_like_cuda, take_steps
from simpletune.models.shared.buckets import Size
from simpletune.stages.load import empty_base
from simpletune.system.startup import without_collection


def snapshots_of_step(
    config: TrainConfig, size: Size, capability: tuple[int, int] | None = None
) -> list[MemorySnapshot]:
    """Record device memory after every allocation of a step with optimizer states.

    Counting every allocation would slow a real step many times over, so the step runs on fake tensors, as in
    ``simulate``. Excludes the CUDA libraries' workspaces.

    Args:
        config: the run's configuration, demo names and ``checkpointing: auto`` resolved.
        size: (width, height) in pixels.
        capability: the CUDA device's compute capability, for its attention; None: an L4's.
    """
    with fake_tensors(), without_collection():
        denoiser = empty_base(config.model, config.memory, config.precision, CPU, [size, config.picture_size()])
        with accounting_like_cuda(config, capability, keep=True) as accounting:
            take_steps(accounting, config, denoiser, size)
    return accounting.snapshots or []
