"""A step that was launched on the device but not yet read by the host.

Reading a value makes the host wait until the device has computed it, and meanwhile the device gets no new work. So a
step's metrics are copied to host memory at the end of the step, and read after the next step is launched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from simpletune.engine.memory.copy_stream import copy_to_pinned
from simpletune.system.processes import progressed

if TYPE_CHECKING:
    from simpletune.stages.step.train_step import TrainStep


class DeviceEvent:
    """A point in the device's work queue, which is reached when all earlier work is done: an event on CUDA's current
    stream, or the clock on the CPU, where work is synchronous."""

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


class InterruptFlags(NamedTuple):
    """What is asked of one process, or of any process, so that all of them do it after the same step."""

    stop: bool = False  # by a signal or a request
    answer: bool = False  # requests in the control file


NOTHING = InterruptFlags()


def global_figures(
    loss: Tensor, norm: Tensor, core: TrainStep, asked: InterruptFlags = NOTHING
) -> Tensor:  # fp32 [4 + n]
    """Combine a step's metrics over all processes, on the device: loss and norm returned by ``TrainStep.step`` of
    ``core``, and what is asked of this process.

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
    return torch.stack([loss if core.config.train.reduce == "exact" else mean, norm.float(), *more])


@dataclass(frozen=True)
class PendingStep:
    """A launched step."""

    step: int  # number of steps before it
    lr: float
    began: DeviceEvent  # before the step's data
    ended: DeviceEvent  # after the copy of the figures
    figures: Tensor  # global_figures in host memory, complete once ended is reached
    losses: Sequence[Tensor]  # of the micro-batches, on the device
    normed: Sequence[nn.Parameter]  # the parameters that had a gradient
    norms: Tensor  # [len(normed)] of their gradients, on the device
    waited: float | None = None  # seconds that the step waited for a remote cache; None if there is none
    shapes: tuple[torch.Size, ...] = ()  # of the micro-batches' latents
    fetched: float = 0.0  # seconds of the host until it had the step's data

    @classmethod
    def launch(
        cls,
        step: int,
        began: DeviceEvent,
        core: TrainStep,
        figures: Tensor,
        waited: float | None = None,
        shapes: tuple[torch.Size, ...] = (),
        fetched: float = 0.0,
    ) -> PendingStep:
        """Wrap the last step that ``core`` launched, and start copying its figures (``global_figures``, on the device)
        to the host, without waiting."""
        host = torch.empty(figures.shape, dtype=figures.dtype)
        host = copy_to_pinned(host) if figures.device.type == "cuda" else host
        host.copy_(figures, non_blocking=True)  # complete once the next event is reached
        ended = DeviceEvent(figures.device)
        return cls(step, core.lr, began, ended, host, core.losses, core.normed, core.norms, waited, shapes, fetched)

    def read(self) -> tuple[float, float, InterruptFlags, list[float]]:
        """Wait for the step; return its mean loss, its gradient norm, what the processes are asked, and with products
        in fp16 the loss scale and the blocks' flags (``Fp16.figures``)."""
        self.ended.wait()
        progressed.count, progressed.trains = progressed.count + 1, True
        loss, norm, stop, answer, *fp16 = self.figures.tolist()
        return loss, norm, InterruptFlags(stop > 0, answer > 0), fp16
