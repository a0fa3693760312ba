"""A simulated training stage, from which a simulation can continue.

Drawing and evaluating run with the training state still allocated. ``plan`` predicts the training stage for many
settings and the whole job for few, so it keeps the stages that it may continue from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory import fake
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.cuda_autocast import autocast_like_cuda
from simpletune.engine.memory.fake import Fake
from simpletune.estimate.simulate.simulate import SimulatedRun, StepReport, accounting_like_cuda, take_steps
from simpletune.estimate.timing.recorder import Recorder
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.denoiser import Denoiser
from simpletune.stages.load import empty_base
from simpletune.stages.step.synthetic import CPU


@dataclass(frozen=True)
class SimulatedTraining:
    """A run after its simulated steps. Continuing changes it, so it can be used only once.

    Args:
        report: the report of its training stage, without the libraries' workspaces.
        run: the run.
        transformer: its model.
        accounting: the accounting that has counted it.
        mode: the mode that makes its tensors fake.
    """

    report: StepReport
    run: SimulatedRun
    denoiser: Denoiser
    accounting: Accounting
    mode: Fake

    @contextmanager
    def counting(self, config: TrainConfig) -> Iterator[Accounting]:
        """Continue counting; call within ``fake_tensors(mode)``."""
        with autocast_like_cuda() if config.precision.autocast else nullcontext(), self.accounting as accounting:
            yield accounting


def train(
    config: TrainConfig,
    size: Size,
    capability: tuple[int, int] | None = None,
    recorder: Recorder | None = None,
    limit: int | None = None,
) -> SimulatedTraining:
    """Simulate the training stage; call within ``fake_tensors``.

    Args:
        config: the run's configuration, demo names resolved.
        size: width and height of the training pictures in pixels.
        capability: see ``simulate``.
        recorder: see ``take_steps``; likewise the next one.
        limit: the limit in bytes.

    Raises:
        OutOfMemory: the step takes more than the limit.
        UserError: the model's configuration cannot be read.
    """
    mode = fake.active()
    assert mode is not None, "train runs within fake_tensors"
    denoiser = empty_base(config.model, config.memory, config.precision, CPU, [size, config.picture_size()])
    with accounting_like_cuda(config, capability) as accounting:
        report, run = take_steps(accounting, config, denoiser, size, recorder, limit)
    return SimulatedTraining(report, run, denoiser, accounting, mode)
