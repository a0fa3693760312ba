"""The modulation plan: adaLN modulations computed ahead, so that their weights stay in host memory.

Every block of SD3 scales, shifts and gates its activations by numbers that depend on the timestep and the pooled prompt
alone (arXiv:2403.03206, section 4), and a third of the weights serve only to compute them. Both inputs are known before
a step runs: a run is a function of (configuration, step). So, while those weights are frozen, a window of steps is
computed at once: each layer passes through the device once, and its outputs stay there, 0.9 MB a sample in bf16.

The transformer then takes its modulations in the place of the pooled prompt: ``time_text_embed`` hands them on as they
are, and each modulation layer picks its columns. Nothing is selected by state, so recomputation under checkpointing
sees what the first pass saw.

Shapes: n rows (samples), p pooled width, m modulations of all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from simpletune.data.plan import Draw
from simpletune.memory import accounting
from simpletune.memory.snapshot import HOST
from simpletune.models.sd3_shapes import is_adaln, timestep_of
from simpletune.models.transformer import Transformer
from simpletune.quant.precision import WeightPrecision
from simpletune.tensors import own_tensors, set_tensor


class PassThrough(nn.Module):
    """Stands for ``time_text_embed``: what came in the place of the pooled prompt goes to the blocks as it is."""

    def forward(self, timestep: Tensor, modulations: Tensor) -> Tensor:  # [n, m] -> [n, m]
        """The modulations of all layers."""
        return modulations


class ModulationSlice(nn.Module):
    """Stands for one modulation layer: its columns of the plan's rows.

    Args:
        start: first column.
        stop: the one after the last.
        dtype: the type in which modulations are computed.
    """

    def __init__(self, start: int, stop: int, dtype: torch.dtype):
        super().__init__()
        self.start, self.stop, self.dtype = start, stop, dtype

    def forward(self, modulations: Tensor) -> Tensor:  # [n, m] -> [n, stop - start]
        """This layer's modulations."""
        return modulations[:, self.start : self.stop].to(self.dtype)


class Modulation:
    """The modulation weights of a transformer, taken out of it and kept in host memory. Use ``detach_modulation``.

    Args:
        embed: the transformer's ``time_text_embed``.
        layers: its modulation layers, in the order of their columns.
        precision: how weights are held and products are computed.
        device: where the transformer computes.
        window: how many steps' modulations are computed at once.
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
        for module in (embed, *layers):
            _keep_on_host(module, pin=device.type == "cuda")

    @torch.no_grad()
    def __call__(
        self,
        sigma: Tensor,  # [n], fp32
        pooled: Tensor,  # [n, p]
    ) -> Tensor:  # [n, m], on the device
        """The modulations of n samples, as the transformer itself would compute them in a batch of n."""
        precision = self.precision
        pooled = pooled.to(self.device, precision.compute_dtype())
        rows = torch.empty(len(sigma), self.width, dtype=precision.product_dtype(), device=self.device)
        start = 0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=precision.autocast):
            condition = F.silu(self._on_device(self.embed, timestep_of(sigma.to(self.device)), pooled))
            for layer in self.layers:
                stop = start + _outputs(layer)
                rows[:, start:stop] = self._on_device(layer, condition)
                start = stop
        accounting.register([rows], "plan")
        return rows

    def _on_device(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        """A module's output with copies of its tensors that live on the device only for as long as this takes.

        Copies and products share one stream, so a copy's memory is not used again before its product is done.
        """
        tensors = (*module.named_parameters(), *module.named_buffers())  # no state_dict: quanto's takes tensors apart
        copies = {name: self.bring(tensor) for name, tensor in tensors}
        return functional_call(module, copies, inputs)

    def bring(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device: the only way in. Where both are the same memory, it is the tensor itself."""
        return tensor.to(self.device, non_blocking=True)


class ModulationSource(Protocol):
    """What sampling needs of a ``Modulation``."""

    window: int
    """Steps whose modulations are computed at once."""

    def __call__(self, sigma: Tensor, pooled: Tensor) -> Tensor:  # [n], [n, p] -> [n, m]
        """The modulations of n samples."""


class MicroBatches(Protocol):
    """What a modulation plan needs of a run's ``Plan``."""

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""

    def micro_batch(self, step: int, micro: int, process: int = 0) -> list[Draw]:
        """The draws of one micro-batch."""


class ModulationPlan:
    """The modulations of a run's steps, a window at a time.

    Windows lie on absolute multiples of their length and always hold all of their steps, those after the run's end too:
    products of other numbers of rows differ in the last bits, and a resumed run must get the same ones.

    Args:
        modulation: of the transformer.
        plan: of the run.
        pooled: the pooled embedding [p] of a prompt.
        process: which process.
    """

    def __init__(self, modulation: Modulation, plan: MicroBatches, pooled: Callable[[str], Tensor], process: int = 0):
        self.modulation, self.plan, self.pooled, self.process = modulation, plan, pooled, process
        self._window: int | None = None
        self._rows: Tensor | None = None

    def of_step(self, step: int) -> Tensor:  # [micro-batches, b, m]
        """The modulations of one step; the first step of a window computes all of the window's."""
        length = self.modulation.window
        window, place = divmod(step, length)
        if window != self._window or self._rows is None:
            self._rows = None  # freed before the next window is computed
            steps = range(window * length, (window + 1) * length)
            micros = range(self.plan.accumulation)
            draws = [d for s in steps for micro in micros for d in self.plan.micro_batch(s, micro, self.process)]
            rows = self.of_draws(draws)
            self._rows = rows.view(length, self.plan.accumulation, self.plan.batch_size, -1)
            self._window = window
        return self._rows[place]

    def of_draws(self, draws: Sequence[Draw]) -> Tensor:  # [n, m]
        """The modulations of any draws, all computed at once."""
        sigma = torch.tensor([draw.sigma for draw in draws], dtype=torch.float32)
        return self.modulation(sigma, torch.stack([self.pooled(draw.caption) for draw in draws]))


def detach_modulation(
    transformer: Transformer, precision: WeightPrecision, device: torch.device, window: int
) -> Modulation:
    """Take the modulation weights out of a transformer, in place; from then on its pooled input is modulations.

    Args:
        transformer: SD3's, frozen where it computes modulations.
        precision: how its weights are held.
        device: where it computes.
        window: how many steps' modulations are computed at once.

    Raises:
        ValueError: one of these weights trains.
    """
    names = [name for name, _ in transformer.named_modules() if is_adaln(name)]
    taken = {name: transformer.get_submodule(name) for name in ["time_text_embed", *names]}
    training = [name for name, module in taken.items() if any(p.requires_grad for p in module.parameters())]
    if training:
        raise ValueError(f"modulations can be planned only while they are frozen; {training[0]} trains")
    start = 0
    for name in names:
        norm = transformer.get_submodule(name.removesuffix(".linear"))
        stop = start + _outputs(taken[name])
        norm.linear, norm.silu = ModulationSlice(start, stop, precision.product_dtype()), nn.Identity()
        start = stop
    transformer.time_text_embed = PassThrough()
    return Modulation(taken["time_text_embed"], [taken[name] for name in names], precision, device, window)


def _outputs(layer: nn.Module) -> int:
    """Output features of a linear layer, however its weight is packed."""
    return int(layer.out_features)  # type: ignore[arg-type]


def _keep_on_host(module: nn.Module, pin: bool) -> None:
    """Move a module's tensors to host memory; pinned, a copy to the device need not wait.

    Tensor subclasses (quanto's) have no pinned form and stay pageable: their copies are slower, and right all the same.
    """
    for part in module.modules():
        for name, tensor in own_tensors(part):
            host = tensor.detach().to("cpu")
            pinned = pin and type(host) is Tensor
            set_tensor(part, name, host.pin_memory() if pinned else host)
            accounting.register([part._parameters.get(name, part._buffers.get(name))], HOST)
