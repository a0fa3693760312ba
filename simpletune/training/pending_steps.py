"""Steps that the device has been given and the host has not read yet.

Reading a value makes the host wait until the device has computed it, and meanwhile the device is given nothing more to
do. So a step's figures are copied to host memory as the last work of that step, and read after the next launch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor, nn

if TYPE_CHECKING:
    from simpletune.step.core import StepCore


class DeviceEvent:
    """A point in the device's queue of work: it is reached when all that was queued before is done.

    On CUDA an event on the current stream; on the CPU, where work is done when it is given, the clock.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device):
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self.clock = time.perf_counter()

    def wait(self) -> None:
        """Block the host until the event is reached."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceEvent) -> float:
        """Seconds on the device from an earlier event to this one; both have been reached."""
        if self._event is None or earlier._event is None:
            return self.clock - earlier.clock
        return earlier._event.elapsed_time(self._event) / 1000


def copy_to_host_async(values: Tensor) -> Tensor:
    """Start copying a tensor to host memory without waiting; it is whole once a later event is reached."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values, non_blocking=True)


def global_figures(loss: Tensor, norm: Tensor, accelerator: Accelerator, stop: bool) -> Tensor:  # fp32 [3]
    """A step's figures over all processes, on the device.

    Args:
        loss: as ``StepCore.step`` returns it.
        norm: of all its gradients, the same in all processes.
        accelerator: knows the processes.
        stop: whether this process was asked to stop.

    Returns:
        Mean loss, gradient norm, and the share of the processes that were asked to stop.
    """
    if accelerator.num_processes == 1:
        return torch.stack([loss.float(), norm.float(), torch.zeros_like(loss)])
    mean, share = accelerator.reduce(torch.stack([loss, torch.full_like(loss, float(stop))]), "mean")
    return torch.stack([mean, norm.float(), share])


@dataclass(frozen=True)
class PendingStep:
    """A launched step.

    Args:
        step: how many were done before it.
        lr: its learning rate.
        began: before its data.
        ended: after its figures were sent.
        figures: ``global_figures`` in host memory, whole once ``ended`` is reached.
        losses: of its micro-batches, on the device.
        normed: the parameters that had a gradient.
        norms: [len(normed)] on the device, of their gradients.
    """

    step: int
    lr: float
    began: DeviceEvent
    ended: DeviceEvent
    figures: Tensor
    losses: Sequence[Tensor]
    normed: Sequence[nn.Parameter]
    norms: Tensor

    @classmethod
    def launched(cls, step: int, lr: float, began: DeviceEvent, core: StepCore, figures: Tensor) -> PendingStep:
        """The step that the device was given last; its figures are on their way to the host, and nothing waits.

        Args:
            step: how many were done before it.
            lr: its learning rate.
            began: before its data.
            core: the step core that launched it.
            figures: ``global_figures``, on the device.
        """
        sent = copy_to_host_async(figures)
        return cls(step, lr, began, DeviceEvent(figures.device), sent, core.losses, core.normed, core.norms)

    def read(self) -> tuple[float, float, bool]:
        """Mean loss, gradient norm, and whether a process was asked to stop; waits until the step is done."""
        self.ended.wait()
        loss, norm, stop = self.figures.tolist()
        return loss, norm, stop > 0

    @property
    def seconds(self) -> float:
        """Device seconds for this step, measured from the end of the previous one. Call ``read`` first."""
        return self.ended.since(self.began)

    @property
    def finished(self) -> float:
        """When the device finished it, by ``time.perf_counter``, if it was idle before. Call ``read`` first."""
        return self.began.clock + self.seconds


class MetricsQueue:
    """Launched steps in their order, to be read when the next ones are launched.

    Args:
        ahead: how many may stay unread: 1 lets the host launch a step while the device computes the one before.
    """

    def __init__(self, ahead: int):
        self._ahead = ahead
        self._pending: deque[PendingStep] = deque()

    def push(self, step: PendingStep) -> None:
        """Add a step that was just launched."""
        self._pending.append(step)

    def pop(self, everything: bool) -> Iterator[PendingStep]:
        """The steps to read now, oldest first.

        Args:
            everything: also those that may stay unread.
        """
        while len(self._pending) > (0 if everything else self._ahead):
            yield self._pending.popleft()
