"""The step core: noise, predict, loss, backward, clip, update, without reading from the device; and its assembly.

Only so does it run under fake tensors, without synchronisation, and under compile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.flow import flow_loss, interpolate, velocity_target
from simpletune.models.compile import compile_training
from simpletune.models.sd3 import predict_velocity
from simpletune.models.transformer import Transformer
from simpletune.optim.in_backward import clip_each, step_in_backward
from simpletune.optim.rounding import RoundedOptimizer
from simpletune.pipeline.load import device_of, modulation_of
from simpletune.pipeline.modulation_plan import Modulation
from simpletune.pipeline.sample import autocast_of
from simpletune.profiling import phase
from simpletune.step.batches import Batch
from simpletune.system.console import say
from simpletune.tensors import trained_parameters


class StepCore:
    """Noise, predict, loss, backward, clip, update: what a step does on the device, without reading from it.

    Args:
        config: of the run.
        model: the transformer, wrapped for the processes there are.
        optimizer: over what trains.
        accelerator: knows the processes.
        modulation: of the transformer, where it was taken out: batches then carry modulations.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        modulation: Modulation | None = None,
    ):
        self.config, self.model, self.optimizer, self.accelerator = config, model, optimizer, accelerator
        self.modulation = modulation
        self.parameters = list(trained_parameters(model).values())
        # Of the last step, on the device: read when something is wrong.
        self.losses: list[Tensor] = []  # of its micro-batches
        self.normed: list[nn.Parameter] = []  # which had a gradient
        self.norms = torch.empty(0)  # of their gradients

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of one micro-batch: a scalar in fp32 (arXiv:2403.03206, eq. 13 and section 2).

        The mean over its samples; over its fillers where it holds nothing else.
        """
        precision = self.config.precision
        with phase("noise"):
            z_t = interpolate(batch.z_0, batch.noise, batch.sigma)
        with autocast_of(precision, z_t.device):
            velocity = predict_velocity(
                model, z_t, batch.sigma, batch.prompt_embeds, batch.pooled, precision.compute_dtype()
            )
        with phase("loss"):
            target = velocity_target(batch.z_0, batch.noise)
            if 0 < batch.fillers < len(target):
                velocity, target = velocity[: -batch.fillers], target[: -batch.fillers]
            return flow_loss(velocity, target)

    def step(
        self, batches: list[Batch], allows_update: Callable[[Tensor, Tensor], bool] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step.

        Args:
            batches: its micro-batches.
            allows_update: is asked, with what is returned, whether to update the weights; None: they are updated.

        Returns:
            The loss, whose mean over the processes is the mean over the step's samples, and the norm of all gradients
            together, before clipping; both still on the device.
        """
        total = torch.zeros((), device=batches[0].z_0.device)
        self.losses = []
        for number, batch in enumerate(batches, 1):
            with self.accelerator.no_sync(self.model) if number < len(batches) else nullcontext():
                with phase("forward"):
                    loss = self.loss(self.model, batch) / batch.parts
                with phase("backward"):
                    self.accelerator.backward(loss)
            total += loss.detach()
            self.losses.append(loss.detach())
        with phase("clip"):
            norm = self.norm()
            updates = allows_update is None or allows_update(total, norm)
            if updates:
                self.clip(norm)
        with phase("optimizer"):  # with memory.optimizer_in_backward there is no gradient left: nothing happens here
            if updates:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def norm(self) -> Tensor:
        """The norm of all gradients together; not finite if one of them is not."""
        if self.config.memory.optimizer_in_backward:  # they are gone: each left its own norm
            assert isinstance(self.optimizer, RoundedOptimizer)
            norms, self.optimizer.norms = self.optimizer.norms, {}
        else:
            gradients = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
            norms = dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True))
        self.normed, self.norms = list(norms), torch.stack(list(norms.values()))
        return torch.linalg.vector_norm(self.norms)

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients as ``train.clip`` says.

        A norm that is NaN scales nothing, so that only the parameters it came from are spoilt and can be named.
        """
        option = self.config.train
        if option.clip_norm is None:
            return
        if option.clip == "global":
            torch.nn.utils.clip_grads_with_norm_(self.parameters, option.clip_norm, norm.nan_to_num(nan=0.0))
        else:
            clip_each(self.parameters, option.clip_norm)


def assemble(config: TrainConfig, transformer: Transformer, accelerator: Accelerator, sizes: int = 1) -> StepCore:
    """Everything between a loaded model and its first step: the trainer's and the memory simulation's one way.

    Args:
        config: of the run.
        transformer: loaded, quantised, frozen.
        accelerator: knows the processes.
        sizes: how many shapes of picture the run has.
    """
    modulation = modulation_of(transformer, config.memory, config.precision, accelerator.device)
    optimizer = attach(config, transformer, sizes)
    if accelerator.num_processes > 1:
        ignore_frozen_in_ddp(transformer)
    return StepCore(
        config, accelerator.prepare_model(transformer, device_placement=False), optimizer, accelerator, modulation
    )


def ignore_frozen_in_ddp(transformer: nn.Module) -> None:
    """Let processes exchange only what trains: each has loaded the same base, which may lie in host memory.

    PyTorch would send every frozen weight once, and every quantised one, a buffer, again in each forward pass.
    """
    tensors = [*transformer.named_parameters(), *transformer.named_buffers()]
    frozen = [name for name, tensor in tensors if not tensor.requires_grad]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, frozen)


def attach(config: TrainConfig, transformer: Transformer, sizes: int = 1) -> torch.optim.Optimizer:
    """The adapter on the loaded model, the passes of its blocks, and the optimizer over what trains."""
    config.adapter.attach(transformer, config.train.seed)
    in_backward = config.memory.optimizer_in_backward
    blocks, device = transformer.transformer_blocks, device_of(transformer)
    if config.speed.compile and compile_training(blocks, device, sizes):
        shapes = "one shape" if sizes == 1 else f"{sizes} shapes"
        say(f"compile the blocks, for {shapes} of picture: the first step takes half a minute or more longer")
    streamed = config.memory.attach(blocks, device, trained=in_backward and config.adapter.trains_base)
    optimizer = config.optimizer.build(trained_parameters(transformer).values(), in_backward)
    if in_backward:
        assert isinstance(optimizer, RoundedOptimizer)
        step_in_backward(optimizer, config.train.clip_norm, streamed)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr
