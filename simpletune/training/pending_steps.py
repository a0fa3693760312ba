"""Steps that the device has been given and the host has not read yet.

Reading a value makes the host wait until the device has computed it, and meanwhile the device is given nothing more to
do. So a step's figures are sent to host memory as the last work of that step, and read when the next one is launched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class DeviceEvent:
    """A moment in the device's own order of work: it passes when all that the device was given before is done.

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
        """The host waits until it has passed."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceEvent) -> float:
        """Seconds on the device from an earlier mark to this one; both have passed."""
        if self._event is None or earlier._event is None:
            return self.clock - earlier.clock
        return earlier._event.elapsed_time(self._event) / 1000


def copy_to_host_async(values: Tensor) -> Tensor:
    """A copy of a tensor in host memory, on its way: whole once a later mark has passed. The host does not wait."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values, non_blocking=True)


@dataclass(frozen=True)
class PendingStep:
    """A step that is launched.

    Args:
        step: how many were done before it.
        lr: its learning rate.
        began: before its data.
        ended: after its figures were sent.
        figures: fp32 [3] in host memory, once ``ended`` has passed: its mean loss, its gradients' norm, and the share
            of the processes that were asked to stop.
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

    def read(self) -> tuple[float, float, float]:
        """Its figures; the host waits until the step is done."""
        self.ended.wait()
        loss, norm, asked = self.figures.tolist()
        return loss, norm, asked

    @property
    def seconds(self) -> float:
        """What it took on the device, which begins it when it is done with the one before; after ``read``."""
        return self.ended.since(self.began)

    @property
    def finished(self) -> float:
        """When the device was done with it, by ``time.perf_counter``, if it was idle before; after ``read``."""
        return self.began.clock + self.seconds
