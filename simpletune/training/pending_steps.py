"""Queue the steps that were launched on the device but not yet read by the host.

Reading a value makes the host wait until the device has computed it, and meanwhile the device gets no new work. So a
step's metrics are copied to host memory at the end of the step, and read after the next step is launched.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from simpletune.system.processes import progressed

if TYPE_CHECKING:
    from simpletune.stages.step.train_step import TrainStep


class DeviceEvent:
    """Mark a point in the device's work queue, which is reached when all earlier work is done.

    Uses an event on the current stream on CUDA, and the clock on the CPU, where work is synchronous.

    Args:
        device: device of the work.
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
        """Return the device seconds from an earlier event to this one; both must have been reached."""
        if self._event is None or earlier._event is None:
            return self.clock - earlier.clock
        return earlier._event.elapsed_time(self._event) / 1000


def copy_to_host_async(values: Tensor) -> Tensor:
    """Start copying a tensor to host memory; the copy is complete once a later event is reached."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values, non_blocking=True)


class InterruptFlags(NamedTuple):
    """What is asked of one process, or of any process, so that all of them do it after the same step.

    Args:
        stop: whether to stop, by a signal or a request.
        answer: whether to answer requests in the control file.
    """

    stop: bool = False
    answer: bool = False


NOTHING = InterruptFlags()


def global_figures(
    loss: Tensor, norm: Tensor, core: TrainStep, asked: InterruptFlags = NOTHING
) -> Tensor:  # fp32 [4 + n]
    """Combine a step's metrics over all processes, on the device.

    Args:
        loss: loss returned by ``TrainStep.step``.
        norm: norm of all gradients, equal in all processes.
        core: the step core that ran the step.
        asked: what is asked of this process.

    Returns:
        Mean loss, gradient norm, the fractions of processes that are asked to stop and to answer, and with products in
        fp16 the means of ``Fp16.figures`` [n]. For a single process, which knows what it is asked, the fractions are 0.
    """
    accelerator, fp16 = core.accelerator, None if core.fp16 is None else core.fp16.figures
    if accelerator.num_processes == 1:
        none = torch.zeros_like(loss)
        figures = torch.stack([loss.float(), norm.float(), none, none])
        return figures if fp16 is None else torch.cat([figures, fp16])
    own = torch.stack([loss, *(torch.full_like(loss, float(each)) for each in asked)])
    mean, *more = accelerator.reduce(own if fp16 is None else torch.cat([own, fp16]), "mean")
    return torch.stack([mean if core.tree is None else loss, norm.float(), *more])


@dataclass(frozen=True)
class PendingStep:
    """Hold a launched step.

    Args:
        step: number of steps before it.
        lr: learning rate of the step.
        began: event before the step's data.
        ended: event after the copy of the metrics.
        figures: ``global_figures`` in host memory, complete once ``ended`` is reached.
        losses: losses of the micro-batches, on the device.
        normed: parameters that had a gradient.
        norms: [len(normed)] norms of their gradients, on the device.
        waited: seconds that the step waited for a remote cache; None if there is none.
    """

    step: int
    lr: float
    began: DeviceEvent
    ended: DeviceEvent
    figures: Tensor
    losses: Sequence[Tensor]
    normed: Sequence[nn.Parameter]
    norms: Tensor
    waited: float | None = None

    @classmethod
    def launched(cls, step: int, lr: float, began: DeviceEvent, core: TrainStep, figures: Tensor) -> PendingStep:
        """Wrap the last launched step and start copying its metrics to the host, without waiting.

        Args:
            step: number of steps before it.
            lr: learning rate of the step.
            began: event before the step's data.
            core: step core that launched the step.
            figures: ``global_figures`` on the device.
        """
        sent = copy_to_host_async(figures)
        return cls(step, lr, began, DeviceEvent(figures.device), sent, core.losses, core.normed, core.norms)

    def read(self) -> tuple[float, float, InterruptFlags]:
        """Wait for the step; return its mean loss, gradient norm and what the processes are asked."""
        self.ended.wait()
        progressed(trains=True)
        loss, norm, stop, answer = self.figures[:4].tolist()
        return loss, norm, InterruptFlags(stop > 0, answer > 0)

    @property
    def fp16(self) -> list[float]:
        """Return the loss scale and the blocks' flags (``Fp16.figures``). Call ``read`` first."""
        return self.figures[4:].tolist()

    @property
    def seconds(self) -> float:
        """Return the device seconds of this step, from the end of the previous one. Call ``read`` first."""
        return self.ended.since(self.began)

    @property
    def finished(self) -> float:
        """Return the ``time.perf_counter`` at the step's end if the device was idle before it. Call ``read`` first."""
        return self.began.clock + self.seconds


class MetricsQueue:
    """Queue launched steps, to be read after the next ones are launched.

    Args:
        ahead: number of steps that may stay unread; 1 lets the host launch a step while the device runs the previous.
    """

    def __init__(self, ahead: int):
        self._ahead = ahead
        self._pending: deque[PendingStep] = deque()

    def push(self, step: PendingStep) -> None:
        """Add a step that was just launched."""
        self._pending.append(step)

    def pop(self, everything: bool) -> Iterator[PendingStep]:
        """Yield the steps to read now, oldest first.

        Args:
            everything: include steps that may stay unread.
        """
        while len(self._pending) > (0 if everything else self._ahead):
            yield self._pending.popleft()
