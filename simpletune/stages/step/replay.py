"""Whether a run's passes are replayed as CUDA graphs (``speed.graphs``)."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from simpletune.config.schema import TrainConfig
from simpletune.engine.graphs import Graphs
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.console import detail, say

OLDEST = "2.11"
"""The oldest torch whose graphs were tried."""
PROVEN: str | None = None
"""The card that has shown gradients of a replayed pass with the plain one's bits (``benchmarks graphs``). None has yet,
so that ``auto`` is off."""


def graphs_of(core: TrainStep) -> Graphs | None:
    """Return what replays the passes of an assembled step, or None with a line that says why."""
    config, asked = core.config, core.config.speed.graphs
    if asked is False:
        return None
    why = why_not(config, core.device, core.accelerator.num_processes)
    if asked == "auto" and PROVEN is None:
        detail("graphs  off (auto): no card has yet shown that replayed passes have the bits of plain ones")
        return None
    if why is not None:
        (say if asked is True else detail)(f"graphs  off: {why}")
        return None
    return Graphs(core.device, core.parameters, measures=asked == "auto")


def why_not(config: TrainConfig, device: torch.device, processes: int = 1) -> str | None:
    """Return why a run's passes cannot be replayed; None if they can. What only a pass shows ends replaying later."""
    memory = config.memory
    if device.type != "cuda":
        return "they are CUDA's, and the run is not on a CUDA device"
    if TorchVersion(torch.__version__) < OLDEST:
        return f"they need torch {OLDEST} or newer, and this is {torch.__version__}"
    if processes > 1:
        return "several processes exchange gradients within a pass"
    if memory.resident_blocks is not None or memory.offload_checkpoint_inputs:
        return "memory.resident_blocks and memory.offload_checkpoint_inputs copy within a pass, which limits the step"
    if memory.optimizer_in_backward:
        return "memory.optimizer_in_backward updates within a pass, by numbers of the host"
    if config.concept is not None:
        return "a concept's passes draw pictures first, of a number of steps that differs"
    if config.precision.settled_compute == "fp16":
        return "products in fp16 change their loss scale, and no card that needs them is limited by its host"
    if config.text.trains:
        return "the text side trains"
    if config.train.reduce == "exact":
        return "train.reduce exact keeps each pass's sums"
    if config.speed.compile:
        return "speed.compile is true"
    return None
