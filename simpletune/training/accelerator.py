"""Create accelerate's view of processes and device."""

from __future__ import annotations

import os
from datetime import timedelta

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)

from simpletune.config.schema import TrainConfig
from simpletune.system.console import say
from simpletune.system.devices import choose_device, use_deterministic
from simpletune.system.environment import settle_variables
from simpletune.system.options import UserError
from simpletune.system.processes import process_count, require_launch
from simpletune.system.threads import ASKED, asked_threads
from simpletune.training.heartbeats import MEETING, wait_for_others

# the limit for waiting while one process fills the cache or generates pictures; NCCL's default: 10 minutes
PATIENCE = timedelta(days=2)


def make_accelerator(config: TrainConfig) -> tuple[Accelerator, str]:
    """Create accelerate's ``Accelerator``, and describe the device and why it was chosen. Raises UserError if
    accelerate uses another device, if a setting needs a single process, or if a variable asks for what the
    configuration cannot say."""
    require_launch()
    device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
    use_deterministic(config.speed.deterministic and device.type == "cuda")
    # accelerate keeps the device of a process's first run and would silently train a later one there, so its state is
    # reset; not in one of several processes, which would leave their group.
    known = PartialState._shared_state
    if known and known["device"].type != device.type and known["num_processes"] == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    for line in settle_variables(device.type, config.speed.compile):
        say(f"warning {line}")
    if process_count() > 1 and ASKED in os.environ:
        os.environ[ASKED] = str(asked_threads())  # accelerate reads one number
    wait_for_others()
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # the last block's add_q_proj gets no gradient
    patient = InitProcessGroupKwargs(init_method=MEETING, timeout=PATIENCE)
    accelerator = Accelerator(  # with all that it would take from the environment, or from `accelerate launch`
        cpu=device.type == "cpu",
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_plugin=TorchDynamoPlugin(
            "no", "default", fullgraph=False, dynamic=False, use_regional_compilation=False
        ),
        kwargs_handlers=[unused, patient],
    )
    if accelerator.device.type != device.type:
        raise UserError(
            f"device: the run was to use {device.type}, but accelerate uses {accelerator.device.type}, as an earlier "
            "run of this process did, or as ACCELERATE_USE_CPU says. Unset it, or set device=cpu"
        )
    if config.memory.optimizer_in_backward and accelerator.num_processes > 1:
        raise UserError(
            f"memory.optimizer_in_backward: {accelerator.num_processes} processes would update with their own "
            "gradients before averaging them. Set it to false, or use one process"
        )
    return accelerator, reason
