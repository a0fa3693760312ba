"""The parts of a training step, and the variants of the step that change some of them.

Two variants have files of their own: ``exact_sums.py`` and ``fp16.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from simpletune.adapters.methods.adapter import TrainingMethod
from simpletune.adapters.text.update import TextUpdate, text_disabled, without_text
from simpletune.config.schema import TrainConfig
from simpletune.engine.fsdp.fsdp_model import FsdpModel, local_parameters
from simpletune.engine.optim.in_backward import clip_each
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.models.objectives.objective import NoisingProcess
from simpletune.stages.modulation_plan import replay
from simpletune.stages.step.attention import use_attention
from simpletune.stages.step.batch_loader import Batch
from simpletune.system.phases import phase


class GradientNorms(NamedTuple):
    """Norms of a step's unscaled gradients before clipping, fp32, on the device."""

    parameters: list[nn.Parameter]
    """The parameters that have a gradient."""
    each: Tensor  # [len(parameters)]
    whole: Tensor  # []
    """The norm of all of them; not finite if any gradient is not."""

    @classmethod
    def compute(cls, norms: dict[nn.Parameter, Tensor]) -> GradientNorms:
        each = torch.stack(list(norms.values()))
        return cls(list(norms), each, torch.linalg.vector_norm(each))


class StepVariant:
    """A change of some parts of a training step; the others are those of the step inside.

    No part reads from the device: only so does a step run without synchronisation, under fake tensors and under
    compile. ``TrainStep.step`` calls the parts in the order in which they stand here.

    Args:
        inner: the step to change.
    """

    def __init__(self, inner: StepVariant):
        self.inner = inner

    def follow_schedule(self, step: int, steps: int) -> None:
        """Follow a schedule, before step number ``step`` (from 0) of a run of ``steps``."""
        self.inner.follow_schedule(step, steps)

    def accumulate(self, batches: Sequence[Batch], compute: Callable[[Batch], Tensor]) -> Tensor:
        """Add the micro-batches' gradients into ``grad``, and return the step's loss [], of this process or of all
        (``train.reduce``). ``compute`` runs a forward and backward pass, and returns its part of the loss []."""
        return self.inner.accumulate(batches, compute)

    def passes(self, batch: Batch) -> Iterator[Batch]:
        """Yield what to run of a micro-batch, one forward and backward pass each. What a pass needs of the model holds
        until the next is asked for."""
        yield from self.inner.passes(batch)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predict for one micro-batch: [b, c, h, w] in the type of its products."""
        return self.inner.predict(model, batch)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        """Compute the loss of a prediction, fp32 []: the mean over the samples, or of nothing but fillers."""
        return self.inner.loss(prediction, batch)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss []."""
        self.inner.backward(loss)

    def norms(self) -> GradientNorms:
        """Make the gradients those of the loss, and measure them."""
        return self.inner.norms()

    def clip(self, norms: GradientNorms) -> None:
        """Clip the gradients by ``train.clip``."""
        self.inner.clip(norms)

    def update(self) -> None:
        """Let the optimizer update the trained parameters."""
        self.inner.update()

    def constrain(self) -> None:
        """Bring the trained parameters back within their bounds after an update."""
        self.inner.constrain()


class PlainStep(StepVariant):
    """A step without a variant.

    Args:
        config: the run's configuration.
        model: the denoiser with what trains, wrapped in DDP if there are several processes with whole weights.
        optimizer: updates the trained parameters.
        accelerator: synchronises processes.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
    ):
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.accelerator = accelerator
        self.denoiser: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.parameters = list(local_parameters(model).values())
        self.process: NoisingProcess = config.objective.process(config.model.files.scheduler_config, config.model.flow)
        self.dtype = config.precision.compute_dtype()

    def follow_schedule(self, step: int, steps: int) -> None:
        pass

    def accumulate(self, batches: Sequence[Batch], compute: Callable[[Batch], Tensor]) -> Tensor:
        total = torch.zeros((), device=batches[0].z_0.device)
        for number, batch in enumerate(batches, 1):  # DDP exchanges the gradients in the last pass
            with self.accelerator.no_sync(self.model) if number < len(batches) else nullcontext():
                total += compute(batch)
        return total

    def passes(self, batch: Batch) -> Iterator[Batch]:
        yield batch

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        with phase("noise"):
            z_t = self.process.noised(batch.z_0, batch.noise, batch.level)
        with self.config.precision.autocast_on(z_t.device), use_attention(self.config.speed.attention):
            time = self.process.time(batch.level)
            if batch.inpainting is not None:
                z_t = torch.cat([z_t, batch.inpainting], 1)
            if batch.conditioning.modulation is not None:
                replay(model, batch.conditioning.modulation)
            return self.config.model.predict(model, z_t, time, batch.conditioning, self.dtype)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        target = self.process.target(batch.z_0, batch.noise, batch.level)
        return self.loss_against(prediction, target, batch, batch.weight)

    def loss_against(self, prediction: Tensor, target: Tensor, batch: Batch, weight: Tensor | None) -> Tensor:
        """Compute the loss [] against a target, without fillers unless the micro-batch has nothing else."""
        level = batch.level
        if 0 < batch.fillers < len(target):
            rows = slice(-batch.fillers)
            prediction, target, level = prediction[rows], target[rows], level[rows]
            weight = None if weight is None else weight[rows]
        return self.process.loss(prediction, target, level, weight)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def norms(self) -> GradientNorms:
        gradients = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        return GradientNorms.compute(dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True)))

    def clip(self, norms: GradientNorms) -> None:
        option = self.config.train
        if option.clip_norm is None:
            return
        if option.clip == "global":
            # A NaN norm must not scale: NaN then stays in the parameters that caused it, and these can be reported.
            torch.nn.utils.clip_grads_with_norm_(self.parameters, option.clip_norm, norms.whole.nan_to_num(nan=0.0))
        else:
            clip_each(self.parameters, option.clip_norm)

    def update(self) -> None:
        self.optimizer.step()

    def constrain(self) -> None:
        self.config.adapter.constrain(self.denoiser)


class InBackward(PlainStep):
    """Updates each parameter in the backward pass (``memory.optimizer_in_backward``): its gradient is clipped, applied
    and freed as soon as it is complete, so nothing is left to clip or update."""

    def norms(self) -> GradientNorms:
        assert isinstance(self.optimizer, RoundedOptimizer)
        norms, self.optimizer.norms = self.optimizer.norms, {}  # recorded in the backward pass
        return GradientNorms.compute(norms)


class Sharded(PlainStep):
    """Sums, measures and clips the gradients of this process's parts of divided weights (``train.fsdp``)."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        fsdp: FsdpModel,
    ):
        super().__init__(config, model, optimizer, accelerator)
        self.fsdp = fsdp

    def norms(self) -> GradientNorms:
        whole = self.fsdp.take_gradients()
        return GradientNorms.compute(dict(zip(whole, self.fsdp.norms(whole), strict=True)))

    def clip(self, norms: GradientNorms) -> None:
        option = self.config.train
        if option.clip == "per_parameter" and option.clip_norm is not None:
            self.fsdp.clip_each(norms.parameters, list(norms.each), option.clip_norm)
        else:
            super().clip(norms)


class TrainedText(StepVariant):
    """Inserts what trains on the text side (token embeddings, LoRAs of the CLIP encoders) into the cached prompt
    embeddings of each micro-batch.

    Args:
        inner: the step to change.
        text: what trains on the text side, on the device.
        denoiser: the denoiser, of which that is a submodule.
    """

    def __init__(self, inner: StepVariant, text: TextUpdate, denoiser: nn.Module):
        super().__init__(inner)
        self.text, self.denoiser = text, denoiser

    def follow_schedule(self, step: int, steps: int) -> None:
        self.text.follow_schedule(step, steps)
        super().follow_schedule(step, steps)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        if batch.text is not None:
            with phase("text"):
                batch = replace(batch, conditioning=self.text(batch.conditioning, batch.text))
        return super().predict(model, batch)

    def constrain(self) -> None:
        with without_text(self.denoiser):
            super().constrain()
        self.text.constrain()


class Prior(StepVariant):
    """Adds the loss against what the base predicts for the same micro-batch (``prior``), weighted by ``Batch.prior``.

    Args:
        inner: the step to change.
        plain: the innermost step.
    """

    def __init__(self, inner: StepVariant, plain: PlainStep):
        super().__init__(inner)
        self.plain = plain
        self._of_base: Tensor | None = None  # [b, c, h, w]

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        # The base first: nothing of the training pass is in memory yet.
        self._of_base = None
        if batch.prior is not None:
            base = self.plain.denoiser  # without DDP's bookkeeping
            with torch.no_grad(), phase("prior"), restore_base(self.plain.config.adapter, base):
                self._of_base = super().predict(base, batch)
        return super().predict(model, batch)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        loss = super().loss(prediction, batch)
        target, self._of_base = self._of_base, None
        return loss if target is None else loss + self.plain.loss_against(prediction, target, batch, batch.prior)


@contextmanager
def restore_base(adapter: TrainingMethod, model: nn.Module) -> Iterator[None]:
    """Restore the exact base model within this context, on the text side too."""
    with text_disabled(model), adapter.disabled(model):
        yield
