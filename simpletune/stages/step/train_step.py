"""A training step: noise, predict, loss, backward, clip, update.

``variant.py`` has its parts; what changes some of them (fp16, exact sums, sharded weights, updates in the backward
pass, the text side, the prior) is one class each. ``assemble`` attaches what trains to a model, and puts together what
a configuration asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from simpletune.adapters.text.update import NAME, TextUpdate
from simpletune.config.schema import TrainConfig
from simpletune.engine.compile import compile_training
from simpletune.engine.denoiser import Denoiser, model_device, model_units
from simpletune.engine.fp16_blocks import fp16_blocks_of
from simpletune.engine.fsdp.fsdp_model import FsdpModel, fsdp_model, local_parameters
from simpletune.engine.graphs import Graphs
from simpletune.engine.optim.ema import Average
from simpletune.engine.optim.in_backward import step_in_backward
from simpletune.engine.optim.loss_scale import LossScale
from simpletune.engine.optim.rounding import RoundedOptimizer, key_draws
from simpletune.engine.optim.state import begin_step
from simpletune.engine.tensors import trained_parameters
from simpletune.stages.load import modulation_of
from simpletune.stages.modulation_plan import DetachedModulation
from simpletune.stages.step.attention import use_attention
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.concept import ConceptStep
from simpletune.stages.step.exact_sums import ExactSums
from simpletune.stages.step.fp16 import Fp16
from simpletune.stages.step.variant import InBackward, PlainStep, Prior, Sharded, StepVariant, TrainedText
from simpletune.system.console import say
from simpletune.system.options import plural
from simpletune.system.phases import phase
from simpletune.system.rng import reseed_global


class TrainStep:
    """Runs training steps without reading from the device.

    Args:
        plain: the innermost step.
        variant: the same with all that changes it.
        denoiser: the model with what trains, not wrapped.
        modulation: the detached modulation of the denoiser; batches then carry modulations.
        fp16: the variant with products in fp16, if the run has it.
        text: what trains on the text side, if anything does.
    """

    def __init__(
        self,
        plain: PlainStep,
        variant: StepVariant,
        denoiser: Denoiser,
        modulation: DetachedModulation | None = None,
        fp16: Fp16 | None = None,
        text: TextUpdate | None = None,
    ):
        # the step and what changes it
        self.config = plain.config
        self.plain = plain
        self.variant = variant
        self.fp16 = fp16
        self.process = plain.process
        self.optimizer = plain.optimizer

        # the model
        self.model = plain.model
        self.denoiser = denoiser
        self.modulation = modulation
        self.text = text
        self.fsdp = fsdp_model(denoiser)
        self.parameters = plain.parameters
        self.named = trained_parameters(denoiser)

        # where it runs
        self.accelerator = plain.accelerator
        self.device: torch.device = plain.accelerator.device

        # how a pass runs
        self.graphs: Graphs | None = None
        """Replays the passes (``replay.graphs_of``); None: they run plainly."""

        # the state after a step
        self.base_to_draw: Callable[[], AbstractContextManager[object]] = nullcontext
        """Returns a context in which the base is the one that pictures are drawn with."""
        self.average: Average | None = None
        """The average of the trained weights to generate, evaluate and export, which ``run`` updates."""
        self.lr = 0.0
        """The last step's learning rate."""
        self.updated = True
        """Whether the last step updated the weights."""

        # figures of the last step, on the device; read only to explain a failure
        self.losses: list[Tensor] = []  # one per pass
        self.normed: list[nn.Parameter] = []  # parameters with a gradient
        self.norms = torch.empty(0)  # norms of their gradients

    def run(
        self,
        step: int,
        steps: int,
        batches: list[Batch],
        allows_update: Callable[[Tensor, Tensor], bool] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run step number ``step`` (from 0) of a run of ``steps``: what follows a schedule, the step, the average.

        Arguments and results are otherwise those of ``step``.
        """
        self.lr = self.config.optimizer.lr * self.config.schedule.factor(step, steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        key_draws(self.optimizer, self.config.train.seed, step)
        self.variant.follow_schedule(step, steps)
        loss, norm = self.step(batches, allows_update)
        if self.average is not None and self.updated:
            self.average.update(None if self.fp16 is None else self.fp16.scale.overflow)
        return loss, norm

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
        loss = self.variant.accumulate(batches, self.compute)
        with phase("clip"):
            norms = self.variant.norms()
            self.normed, self.norms, norm = norms
            self.updated = allows_update is None or allows_update(loss, norm)
            if self.updated:
                self.variant.clip(norms)
        with phase("optimizer"):
            if self.updated:
                self.variant.update()
            if self.graphs is None:
                self.optimizer.zero_grad(set_to_none=True)
            else:
                self.graphs.end_step()
            if self.updated:
                self.variant.constrain()
        return loss, norm

    def compute(self, batch: Batch) -> Tensor:
        """Run the forward and backward passes of one batch; returns its part of the step's loss."""
        if batch.key is not None:
            reseed_global(*batch.key)

        def run(tensors: Sequence[Tensor]) -> Tensor:
            return self._passes(batch.with_tensors(tensors))

        graphs = self.graphs
        loss = self._passes(batch) if graphs is None else graphs.run(batch.kind(), batch.tensors(), run)
        self.losses.append(loss)
        return loss

    def _passes(self, batch: Batch) -> Tensor:
        losses = []
        for each in self.variant.passes(batch):
            with phase("forward"):
                loss = self.loss(self.model, each) / each.parts
            with phase("backward"), use_attention(self.config.speed.attention):  # it may recompute blocks
                self.variant.backward(loss)
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one micro-batch, fp32 []."""
        prediction = self.variant.predict(model, batch)
        with phase("loss"):
            return self.variant.loss(prediction, batch)


def assemble(
    config: TrainConfig,
    denoiser: Denoiser,
    accelerator: Accelerator,
    sizes: int = 1,
    text: TextUpdate | None = None,
) -> TrainStep:
    """Attach what trains to a loaded model, and assemble its step, for the trainer and for the simulation.

    Args:
        config: the run's configuration.
        denoiser: the loaded, quantised, frozen denoiser.
        accelerator: synchronises processes.
        sizes: how many picture sizes the run has.
        text: what trains on the text side, on the device; None: nothing.
    """
    modulation = modulation_of(denoiser, config, accelerator.device)
    blocks = fp16_blocks_of(denoiser)
    scale = None if blocks is None else LossScale(accelerator.device)
    divided = config.train.uses_fsdp(accelerator.num_processes)
    optimizer = attach(config, denoiser, sizes, scale, text, accelerator.device if divided else None)
    model: nn.Module = denoiser
    if config.train.reduce == "fast" and not divided:
        if accelerator.num_processes > 1:
            ignore_frozen_in_ddp(denoiser)
        model = accelerator.prepare_model(denoiser, device_placement=False)
    fsdp, parts = fsdp_model(denoiser), (config, model, optimizer, accelerator)
    if fsdp is not None:
        plain: PlainStep = Sharded(*parts, fsdp)
    elif config.memory.optimizer_in_backward:
        plain = InBackward(*parts)
    elif config.train.reduce == "exact":
        plain = ExactSums(*parts)
    else:
        plain = PlainStep(*parts)
    variant: StepVariant = plain
    fp16 = None
    if blocks is not None and scale is not None:
        variant = fp16 = Fp16(variant, scale, blocks, plain.parameters, optimizer)
    if text is not None:
        variant = TrainedText(variant, text, denoiser)
    if config.prior.predicts:
        variant = Prior(variant, plain)
    if config.concept is not None:
        variant = ConceptStep(variant, plain, denoiser, config.concept, modulation)
    return TrainStep(plain, variant, denoiser, modulation, fp16, text)


def attach(
    config: TrainConfig,
    denoiser: Denoiser,
    sizes: int = 1,
    scale: LossScale | None = None,
    text: TextUpdate | None = None,
    place: torch.device | None = None,
) -> torch.optim.Optimizer:
    """Attach the adapter to the loaded model, shard or wrap its blocks, and build the optimizer.

    Args:
        config: the run's configuration.
        denoiser: the loaded model.
        sizes: how many picture sizes the run has.
        scale: the loss scale, which updates in the backward pass must remove.
        text: what trains on the text side, which becomes a submodule of the denoiser; None: nothing.
        place: the device on which the processes shard the weights; None: each process has all weights.
    """
    assert config.text.trains == (text is not None)
    config.adapter.attach(denoiser, config.train.seed)
    in_backward, blocks = config.memory.optimizer_in_backward, model_units(denoiser)
    config.precision.prepare(blocks)
    fsdp = None if place is None else FsdpModel(denoiser, blocks, place)
    device = model_device(denoiser)
    if config.speed.compile and compile_training(blocks, device, sizes):
        say(f"compile the blocks for {plural(sizes, 'picture size')}; the first step takes at least 30 s longer")
    trains, last = in_backward and config.adapter.trains_base, config.model.architecture.ends_with_feed_forward
    offloaded = config.memory.attach(blocks, device, trains, last)
    if text is not None:
        text.attach_lora(config.train.seed)
        denoiser.add_module(NAME, text)
    trained = local_parameters(denoiser)
    ratios, places = [lr_ratio(config, name) for name in trained], None if fsdp is None else fsdp.places
    optimizer = config.optimizer.build(trained.values(), in_backward, ratios, places)
    if in_backward:
        assert isinstance(optimizer, RoundedOptimizer)
        step_in_backward(optimizer, config.train.clip_norm, offloaded, scale)
    return optimizer


def lr_ratio(config: TrainConfig, name: str) -> float:
    """Return the factor on a trained parameter's learning rate, by its name in the model."""
    own = name.removeprefix(f"{NAME}.")
    return config.adapter.lr_ratio(name) if own == name else config.text.lr_ratio(own, config.optimizer.lr)


def ignore_frozen_in_ddp(denoiser: nn.Module) -> None:
    """Make DDP synchronise only trained parameters."""
    # Each process has loaded the same base, possibly into host memory. PyTorch would broadcast every frozen weight
    # once, and quantised ones, being buffers, again in each forward pass.
    tensors = [*denoiser.named_parameters(), *denoiser.named_buffers()]
    frozen = [name for name, tensor in tensors if not tensor.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(denoiser, frozen)


def average_of(config: TrainConfig, denoiser: nn.Module, optimizer: torch.optim.Optimizer) -> Average | None:
    """Start the average of the weights that generate, evaluate and export: the EMA, the optimizer's, or None."""
    parameters = local_parameters(denoiser)
    return config.ema.build(parameters) if config.ema else config.optimizer.average(optimizer, parameters)
