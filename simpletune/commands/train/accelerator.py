"""Create accelerate's view of processes and device."""

from __future__ import annotations

from datetime import timedelta

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from simpletune.config.schema import TrainConfig
from simpletune.system.devices import choose_device, use_deterministic
from simpletune.system.options import UserError
from simpletune.training.heartbeats import MEETING

PATIENCE = timedelta(days=2)  # limit for waiting while one process fills the cache or draws; NCCL's default: 10 minutes


def make_accelerator(config: TrainConfig) -> tuple[Accelerator, str]:
    """Create accelerate's ``Accelerator``, and describe the device and why it was chosen; a ``UserError`` if accelerate
    uses another device, or if a setting needs a single process."""
    device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
    use_deterministic(config.speed.deterministic and device.type == "cuda")
    # accelerate keeps the device of a process's first run and would silently train a later one there, so its state is
    # reset; not in one of several processes, which would leave their group.
    known = PartialState._shared_state
    if known and known["device"].type != device.type and known["num_processes"] == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # the last block's add_q_proj gets no gradient
    patient = InitProcessGroupKwargs(init_method=MEETING, timeout=PATIENCE)
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[unused, patient])
    if accelerator.device.type != device.type:
        raise UserError(
            f"device: the run was to use {device.type}, but accelerate uses {accelerator.device.type}. "
            "Unset ACCELERATE_USE_CPU, or set device=cpu"
        )
    if config.memory.optimizer_in_backward and accelerator.num_processes > 1:
        raise UserError(
            f"memory.optimizer_in_backward: {accelerator.num_processes} processes would update with their own "
            "gradients before averaging them. Set it to false, or use one process"
        )
    return accelerator, reason
