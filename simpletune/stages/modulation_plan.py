"""The modulation plan: compute adaLN modulations ahead, so that their weights can stay in host memory.

Every block of SD3 scales, shifts and gates its activations by numbers that depend only on the timestep and the pooled
prompt (arXiv:2403.03206, section 4), and a third of the weights serve only to compute them. Both inputs are known in
advance, because a run is a function of (configuration, step). So, if those weights are frozen, a window of steps is
computed at once: each layer visits the device once, and its outputs stay there, 0.9 MB per sample in bf16.

The transformer then receives its modulations in place of the pooled prompt: ``time_text_embed`` passes them through,
and each modulation layer selects its columns. The selection depends on no state, so recomputation under checkpointing
repeats the first pass.

Shapes: n rows (samples), p pooled width, m modulations of all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from simpletune.data.samples import SampleDraw
from simpletune.engine.memory import accounting
from simpletune.engine.memory.copy_stream import host_like
from simpletune.engine.memory.machine_weights import is_shared
from simpletune.engine.memory.snapshot import HOST
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import own_tensors, set_tensor
from simpletune.models.objectives.flow import FlowProcess
from simpletune.models.sd3.shapes import is_adaln
from simpletune.models.shared.denoiser import Denoiser


class PassThrough(nn.Module):
    """Replaces ``time_text_embed``: passes the modulations, which replace the pooled prompt, to the blocks."""

    def forward(self, timestep: Tensor, modulations: Tensor) -> Tensor:  # [n, m] -> [n, m]
        """Return the modulations of all layers."""
        return modulations


class ModulationSlice(nn.Module):
    """Replaces one modulation layer: selects its columns of the plan's rows.

    Args:
        start: the first column.
        stop: the column after the last.
        dtype: the type in which modulations are computed.
    """

    def __init__(self, start: int, stop: int, dtype: torch.dtype):
        super().__init__()
        self.start, self.stop, self.dtype = start, stop, dtype

    def forward(self, modulations: Tensor) -> Tensor:  # [n, m] -> [n, stop - start]
        """Select this layer's modulations."""
        return modulations[:, self.start : self.stop].to(self.dtype)


class DetachedModulation:
    """The modulation weights of a transformer, detached and stored in host memory. Created by ``detach_modulation``.

    Args:
        embed: the transformer's ``time_text_embed``.
        layers: its modulation layers, in the order of their columns.
        precision: the precision of weights and products.
        device: where the transformer computes.
        window: how many steps' modulations to compute at once.
    """

    def __init__(
        self,
        embed: nn.Module,
        layers: Sequence[nn.Module],
        precision: WeightPrecision,
        device: torch.device,
        window: int,
    ):
        self.embed, self.layers, self.precision, self.device, self.window = embed, layers, precision, device, window
        self.width = sum(_outputs(layer) for layer in layers)
        for part in [part for module in (embed, *layers) for part in module.modules()]:
            for name, tensor in own_tensors(part):
                host = tensor.detach().to("cpu")
                # Pinned, so that copies are asynchronous. Tensors in pages that the machine's processes share are so
                # already; subclasses (quanto's) cannot be, and their copies are slower.
                if device.type == "cuda" and type(host) is Tensor and not is_shared(host):
                    host = host_like(host, device).copy_(host)
                set_tensor(part, name, host)
                accounting.register([part._parameters.get(name, part._buffers.get(name))], HOST)

    @torch.no_grad()
    def __call__(
        self,
        sigma: Tensor,  # [n], fp32
        pooled: Tensor,  # [n, p]
        portions: int = 1,
    ) -> Tensor:  # [n, m], on the device
        """Compute the modulations of n samples as the transformer would in batches of n / ``portions``."""
        precision = self.precision
        pooled = pooled.to(self.device, precision.compute_dtype())
        rows = torch.empty(len(sigma), self.width, dtype=precision.product_dtype(), device=self.device)
        start = 0
        with precision.autocast_on(self.device):
            inputs = zip(FlowProcess().time(sigma.to(self.device)).chunk(portions), pooled.chunk(portions), strict=True)
            conditions = [(F.silu(each),) for each in self._on_device(self.embed, list(inputs))]
            for layer in self.layers:
                stop = start + _outputs(layer)
                found = self._on_device(layer, conditions)
                rows[:, start:stop] = found[0] if portions == 1 else torch.cat(found)
                start = stop
                del found
        accounting.register([rows], "plan")
        return rows

    def _on_device(self, module: nn.Module, inputs: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Run a module on each of several inputs, with temporary copies of its tensors on the device."""
        # Copies and products share one stream, so a copy's memory is not reused before its product is done.
        tensors = (*module.named_parameters(), *module.named_buffers())  # quanto's state_dict would flatten tensors
        copies = {name: self.bring(tensor) for name, tensor in tensors}
        return [functional_call(module, copies, each) for each in inputs]

    def bring(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device. If host and device are the same, returns the tensor itself."""
        return tensor.to(self.device, non_blocking=True)


class ModulationSource(Protocol):
    """The part of ``DetachedModulation`` that sampling uses."""

    window: int
    """How many steps' modulations to compute at once."""

    def __call__(self, sigma: Tensor, pooled: Tensor) -> Tensor:  # [n], [n, p] -> [n, m]
        """Compute the modulations of n samples."""


class MicroBatches(Protocol):
    """The part of a run's ``Plan`` that a modulation plan uses."""

    @property
    def batch_size(self) -> int:
        """Samples in a micro-batch."""

    @property
    def accumulation(self) -> int:
        """Passes of this process in a step."""

    def micro_batch(self, step: int, micro: int) -> list[SampleDraw]:
        """The draws of one micro-batch."""


class ModulationPlan:
    """Computes the modulations of a run's steps one window at a time.

    Windows start at absolute multiples of their length and always contain all their steps, even beyond the end of the
    run: the number of rows affects the last bits of a product, and a resumed run must reproduce them.

    Args:
        modulation: the detached modulation of the transformer.
        plan: provides the draws of each pass.
        pooled: returns the pooled embedding [p] of a prompt.
        apart: compute the rows of each of a step's passes separately, so that their bits do not depend on how many
            passes a process has.
    """

    def __init__(
        self, modulation: DetachedModulation, plan: MicroBatches, pooled: Callable[[str], Tensor], apart: bool = False
    ):
        self.modulation, self.plan, self.pooled, self.apart = modulation, plan, pooled, apart
        self._steps: range | None = None
        self._rows: Tensor | None = None

    def steps_with(self, step: int) -> range:
        """The steps whose modulations are computed together with those of a step."""
        length = self.modulation.window
        first = step - step % length
        return range(first, first + length)

    def of_step(self, step: int) -> Tensor:  # [micro-batches, b, m]
        """The modulations of one step; the first step of a window computes those of the whole window."""
        length, steps = self.modulation.window, self.steps_with(step)
        if steps != self._steps or self._rows is None:
            self._rows = None  # freed before the next window is computed
            count, size = self.plan.accumulation, self.plan.batch_size
            if self.apart:
                draws = [d for micro in range(count) for s in steps for d in self.plan.micro_batch(s, micro)]
                self._rows = self.of_draws(draws, count).view(count, length, size, -1).transpose(0, 1)
            else:
                draws = [d for s in steps for micro in range(count) for d in self.plan.micro_batch(s, micro)]
                self._rows = self.of_draws(draws).view(length, count, size, -1)
            self._steps = steps
        return self._rows[step - steps.start]

    def of_draws(self, draws: Sequence[SampleDraw], portions: int = 1) -> Tensor:  # [n, m]
        """Compute the modulations of any draws at once, or in equal portions one after the other."""
        sigma = torch.tensor([draw.level for draw in draws], dtype=torch.float32)
        return self.modulation(sigma, torch.stack([self.pooled(draw.caption) for draw in draws]), portions)


def detach_modulation(
    denoiser: Denoiser, precision: WeightPrecision, device: torch.device, window: int
) -> DetachedModulation:
    """Detach a transformer's modulation weights in place; it then takes modulations as its pooled input.

    Args:
        denoiser: SD3's transformer, with frozen modulation weights.
        precision: its precision.
        device: where it computes.
        window: how many steps' modulations to compute at once.

    Raises:
        ValueError: one of these weights is trained.
    """
    names = [name for name, _ in denoiser.named_modules() if is_adaln(name)]
    taken = {name: denoiser.get_submodule(name) for name in ["time_text_embed", *names]}
    training = [name for name, module in taken.items() if any(p.requires_grad for p in module.parameters())]
    if training:
        raise ValueError(f"the modulation plan needs frozen modulation weights; {training[0]} is trained")
    start = 0
    for name in names:
        norm = denoiser.get_submodule(name.removesuffix(".linear"))
        stop = start + _outputs(taken[name])
        norm.linear, norm.silu = ModulationSlice(start, stop, precision.product_dtype()), nn.Identity()
        start = stop
    denoiser.time_text_embed = PassThrough()
    return DetachedModulation(taken["time_text_embed"], [taken[name] for name in names], precision, device, window)


def _outputs(layer: nn.Module) -> int:
    """The number of output features of a linear layer, regardless of how its weight is packed."""
    return int(layer.out_features)  # type: ignore[arg-type]
