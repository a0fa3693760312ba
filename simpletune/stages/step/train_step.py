"""The step core (noise, predict, loss, backward, clip, update) and its assembly.

It never reads from the device, so that it runs without synchronisation, under fake tensors and under compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from simpletune.adapters.methods.adapter import TrainingMethod
from simpletune.adapters.text.update import TextUpdate, text_disabled, trained_text, without_text
from simpletune.config.schema import TrainConfig
from simpletune.engine.fsdp.fsdp_model import fsdp_model, held_parameters
from simpletune.engine.optim.ema import Average
from simpletune.engine.optim.in_backward import clip_each
from simpletune.engine.optim.loss_scale import LossScale
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.optim.state import begin_step
from simpletune.engine.tensors import trained_parameters
from simpletune.models.shared.denoiser import Denoiser
from simpletune.models.shared.fp16_blocks import fp16_blocks_of
from simpletune.stages.load import modulation_of
from simpletune.stages.modulation_plan import DetachedModulation
from simpletune.stages.sample import autocast_of
from simpletune.stages.step.attach import attach
from simpletune.stages.step.attention import attention_by
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.fp16 import Fp16
from simpletune.stages.step.reduction import TreeSum
from simpletune.system.phases import phase
from simpletune.system.rng import reseed_global


class TrainStep:
    """Runs a training step on the device without reading from it: noise, predict, loss, backward, clip, update.

    Args:
        config: the run's configuration.
        model: the transformer, wrapped in DDP if there are several processes, unless ``train.reduce`` is ``exact`` or
            the weights are sharded.
        optimizer: updates the trained parameters.
        accelerator: synchronises processes.
        modulation: the detached modulation of the transformer; batches then carry modulations.
        fp16: with products in fp16, the loss scale and the blocks to watch.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        modulation: DetachedModulation | None = None,
        fp16: Fp16 | None = None,
    ):
        self.text = trained_text(unwrapped(model))
        self.config, self.model, self.optimizer, self.accelerator = config, model, optimizer, accelerator
        self.modulation, self.fp16 = modulation, fp16
        self.process = config.objective.process(config.model.scheduler_config)
        self.device = accelerator.device
        self.parameters = list(held_parameters(model).values())
        self.named, self.fsdp = trained_parameters(model), fsdp_model(model)
        # Figures of the last step, on the device; read only to explain a failure.
        self.losses: list[Tensor] = []  # one per pass
        self.normed: list[nn.Parameter] = []  # parameters with a gradient
        self.norms = torch.empty(0)  # norms of their gradients
        self.tree: TreeSum | None = None
        if config.train.reduce == "exact":
            passes = 2 if config.prior.second_pass else 1
            self.tree = TreeSum(self.parameters, accelerator.num_processes, passes)
            self.tree.share_weights()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The network's prediction for one micro-batch: [b, c, h, w] in the type of its products."""
        precision = self.config.precision
        with phase("noise"):
            z_t = self.process.noised(batch.z_0, batch.noise, batch.level)
        prompt_embeds, pooled = batch.prompt_embeds, batch.pooled
        if self.text is not None and batch.text is not None:
            with phase("text"):
                prompt_embeds, pooled = self.text(prompt_embeds, pooled, batch.text)
        with autocast_of(precision, z_t.device), attention_by(self.config.speed.attention):
            time, dtype = self.process.time(batch.level), precision.compute_dtype()
            return self.config.model.predict(model, z_t, time, prompt_embeds, pooled, dtype)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of one micro-batch: an fp32 scalar.

        It is the mean over the samples, or over the fillers if the micro-batch has nothing else. With ``prior``, the
        weighted loss against the base's prediction is added.
        """
        kept = None if batch.prior is None else self._predicted_by_base(batch)
        prediction = self.predict(model, batch)
        loss = self.loss_of(prediction, batch)
        if kept is None:
            return loss
        with phase("loss"):
            return loss + self._compared(prediction, kept, batch, batch.prior)

    def loss_of(self, prediction: Tensor, batch: Batch) -> Tensor:
        """The loss of a prediction [b, c, h, w]."""
        with phase("loss"):
            target = self.process.target(batch.z_0, batch.noise, batch.level)
            return self._compared(prediction, target, batch, batch.weight)

    @torch.no_grad()
    def _predicted_by_base(self, batch: Batch) -> Tensor:  # [b, c, h, w]
        """The base's prediction for a micro-batch: the model with its adapter off, without DDP's bookkeeping."""
        base = unwrapped(self.model)
        with phase("prior"), untrained(self.config.adapter, base):
            return self.predict(base, batch)

    def _compared(self, prediction: Tensor, target: Tensor, batch: Batch, weight: Tensor | None) -> Tensor:
        """The loss against a target, without fillers unless the micro-batch has nothing else."""
        level = batch.level
        if 0 < batch.fillers < len(target):
            rows = slice(-batch.fillers)
            prediction, target, level = prediction[rows], target[rows], level[rows]
            weight = None if weight is None else weight[rows]
        return self.process.loss(prediction, target, level, weight)

    def step(
        self, batches: list[Batch], allows_update: Callable[[Tensor, Tensor], bool] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one optimizer step. With products in fp16, it is undone on the device if its gradients overflow.

        Args:
            batches: its micro-batches.
            allows_update: decides, from the returned loss and norm, whether to update the weights; None always does.

        Returns:
            The loss, whose mean over processes is the mean over the step's samples (with ``train.reduce`` ``exact``,
            already that mean), and the global norm of the gradients before clipping; both on the device.
        """
        self.losses = []
        begin_step(self.optimizer)
        if self.fp16 is not None:
            self.fp16.begin()
        total = self._accumulated(batches) if self.tree is None else self.tree.over(batches, self.compute)
        with phase("clip"):
            norm = self.norm()
            if self.fp16 is not None:
                self.fp16.note(norm)
            updates = allows_update is None or allows_update(total, norm)
            if updates:
                self.clip(norm)
        with phase("optimizer"):  # does nothing with memory.optimizer_in_backward, which leaves no gradients
            if updates and self.fp16 is not None:
                self.fp16.scale.step(self.optimizer)
            elif updates:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if updates:
                self.constrain()
        if self.fp16 is not None:
            self.fp16.scale.update()
        return total, norm

    def _accumulated(self, batches: list[Batch]) -> Tensor:
        """Compute a step's passes one after the other, each adding to the gradients; DDP exchanges them in the last."""
        total = torch.zeros((), device=batches[0].z_0.device)
        for number, batch in enumerate(batches, 1):
            with self.accelerator.no_sync(self.model) if number < len(batches) else nullcontext():
                total += self.compute(batch)
        return total

    def compute(self, batch: Batch) -> Tensor:
        """Run the forward and backward pass of one batch; returns its part of the step's loss."""
        if batch.key is not None:
            reseed_global(*batch.key)
        with phase("forward"):
            loss = self.loss(self.model, batch) / batch.parts
        with phase("backward"), attention_by(self.config.speed.attention):  # it may recompute blocks
            self.accelerator.backward(loss if self.fp16 is None else self.fp16.scale.scaled(loss))
        self.losses.append(loss.detach())
        return self.losses[-1]

    def constrain(self) -> None:
        """Bring the trained parameters back within their bounds."""
        model = unwrapped(self.model)
        with without_text(model):
            self.config.adapter.constrain(model)
        if self.text is not None:
            self.text.constrain()

    def norm(self) -> Tensor:
        """Unscale the gradients and return their global norm, which is not finite if any gradient is not."""
        if self.config.memory.optimizer_in_backward:  # the gradients are freed, but their norms were recorded
            assert isinstance(self.optimizer, RoundedOptimizer)
            norms, self.optimizer.norms = self.optimizer.norms, {}
        elif self.fsdp is not None:
            whole = self.fsdp.take_gradients()
            norms = dict(zip(whole, self.fsdp.norms(whole), strict=True))
        else:
            gradients = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
            if self.fp16 is not None:
                self.fp16.scale.unscale(gradients.values())
            norms = dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True))
        self.normed, self.norms = list(norms), torch.stack(list(norms.values()))
        return torch.linalg.vector_norm(self.norms)

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients by ``train.clip``.

        A NaN norm does not scale them, so that NaN stays in the parameters that caused it and these can be reported.
        """
        option = self.config.train
        if option.clip_norm is None:
            return
        if option.clip == "global":
            torch.nn.utils.clip_grads_with_norm_(self.parameters, option.clip_norm, norm.nan_to_num(nan=0.0))
        elif self.fsdp is not None:
            self.fsdp.clip_each(self.normed, list(self.norms), option.clip_norm)
        else:
            clip_each(self.parameters, option.clip_norm)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DDP around it."""
    found: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return found


@contextmanager
def untrained(adapter: TrainingMethod, model: nn.Module) -> Iterator[None]:
    """Restore the exact base model within this context, on the text side too."""
    with text_disabled(model), adapter.disabled(model):
        yield


def assemble(
    config: TrainConfig,
    denoiser: Denoiser,
    accelerator: Accelerator,
    sizes: int = 1,
    text: TextUpdate | None = None,
) -> TrainStep:
    """Assemble a step core from a loaded model, for the trainer and for the memory simulation.

    Args:
        config: the run's configuration.
        denoiser: the loaded, quantised, frozen transformer.
        accelerator: synchronises processes.
        sizes: how many picture sizes the run has.
        text: what trains on the text side, on the device; None: nothing.
    """
    modulation = modulation_of(denoiser, config.memory, config.precision, accelerator.device)
    blocks = fp16_blocks_of(denoiser)
    fp16 = None if blocks is None else Fp16(LossScale(accelerator.device), blocks)
    divided = config.train.uses_fsdp(accelerator.num_processes)
    place = accelerator.device if divided else None
    optimizer = attach(config, denoiser, sizes, None if fp16 is None else fp16.scale, text, place)
    model: nn.Module = denoiser
    if config.train.reduce == "fast" and not divided:
        if accelerator.num_processes > 1:
            ignore_frozen_in_ddp(denoiser)
        model = accelerator.prepare_model(denoiser, device_placement=False)
    return TrainStep(config, model, optimizer, accelerator, modulation, fp16)


def ignore_frozen_in_ddp(denoiser: nn.Module) -> None:
    """Make DDP synchronise only trained parameters: each process has loaded the same base, possibly into host memory.

    PyTorch would broadcast every frozen weight once, and quantised ones, being buffers, again in each forward pass.
    """
    tensors = [*denoiser.named_parameters(), *denoiser.named_buffers()]
    frozen = [name for name, tensor in tensors if not tensor.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(denoiser, frozen)


def average_of(config: TrainConfig, denoiser: nn.Module, optimizer: torch.optim.Optimizer) -> Average | None:
    """Start the average of the weights to draw, evaluate and export: the EMA, the optimizer's, or None."""
    parameters = held_parameters(denoiser)
    return config.ema.build(parameters) if config.ema else config.optimizer.average(optimizer, parameters)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr
