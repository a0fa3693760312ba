"""The modulation plan: compute adaLN modulations ahead, so that their weights can stay in host memory.

The blocks of a diffusion transformer scale, shift and gate their activations by numbers that depend only on the
timestep, and in some families on the pooled prompt (``Modulation``); a third of SD3's weights serve only to compute
them. Both inputs are known in advance, because a run is a function of (configuration, step). So, if those weights are
frozen, a window of steps is computed at once: each layer visits the device once, and its outputs stay there, 0.9 MB per
sample of SD3 Medium in bf16. If a run draws its noise levels from a few (``Flow.levels``), and modulations depend on
nothing else, all of them are computed before its first step, and kept in host memory.

``replay`` then hands a pass its modulations: they take the place of the embedding of timestep and prompt, and each
modulation layer selects its columns. The selection depends on no state, and the embedding is computed outside of the
checkpointed units, so recomputation repeats the first pass.

Shapes: n rows (samples), p pooled width, m modulations of all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from simpletune.data.samples import PlannedSample
from simpletune.engine.denoiser import Denoiser, unit_filter
from simpletune.engine.memory import accounting
from simpletune.engine.memory.copy_stream import empty_on_host
from simpletune.engine.memory.machine_weights import is_shared
from simpletune.engine.memory.snapshot import FILE, HOST
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import own_tensors, set_tensor
from simpletune.models.shared.modulation import Modulation
from simpletune.models.shared.weights import put_module
from simpletune.system.options import UserError

REPLAYED = "replayed_modulation"
"""The attribute of a model under a plan that holds its ``ReplayedEmbedding``."""


class ReplayedEmbedding(nn.Module):
    """Replaces the embedding of a model under a plan: returns the rows of ``replay`` in the activations' type."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.rows: Tensor | None = None

    def forward(self, *inputs: object) -> Tensor:  # [n, m]
        """Return the modulations of all layers, once: they are freed with the pass, and never those of another one."""
        rows, self.rows = self.rows, None
        if rows is None:
            raise RuntimeError("the model is under a modulation plan: call replay before each of its passes")
        return rows.to(self.dtype)


def replay(model: nn.Module, rows: Tensor) -> None:
    """Set the modulations [n, m] of the next forward pass of a model under a plan, or of its DDP wrapper."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    vars(inner)[REPLAYED].rows = rows


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
    """The modulation weights of a model, detached and stored in host memory. Created by ``detach_modulation``.

    Args:
        fact: how the model makes its modulations.
        embed: the module that embeds the timestep, and the pooled prompt if it does.
        layers: the modulation layers, in the order of their columns, and whether a SiLU stands before each.
        precision: the precision of weights and products.
        device: where the denoiser computes.
        window: how many steps' modulations to compute at once.
        mapped: whether the weights lie in the pages of a file, and stay there.
        levels: the noise levels whose modulations ``ModulationPlan`` keeps in host memory.
    """

    def __init__(
        self,
        fact: Modulation,
        embed: nn.Module,
        layers: Sequence[tuple[nn.Module, bool]],
        precision: WeightPrecision,
        device: torch.device,
        window: int,
        mapped: bool = False,
        levels: Sequence[float] = (),
    ):
        self.fact = fact
        self.levels = levels
        self.precision = precision
        self.device = device
        self.window = window
        self.embed = embed
        self.layers = [layer for layer, _ in layers]
        self.activated = [activated for _, activated in layers]
        self.width = sum(map(_outputs, self.layers))
        for part in [part for module in (embed, *self.layers) for part in module.modules()]:
            for name, tensor in own_tensors(part):
                if mapped:
                    accounting.register([tensor], FILE)
                    continue
                host = tensor.detach().to("cpu")
                # Pinned, so that copies are asynchronous. Tensors in pages that the machine's processes share are so
                # already; subclasses (quanto's) cannot be, and their copies are slower.
                if device.type == "cuda" and type(host) is Tensor and not is_shared(host):
                    host = empty_on_host(host, device).copy_(host)
                set_tensor(part, name, host)
                accounting.register([part._parameters.get(name, part._buffers.get(name))], HOST)

    @torch.no_grad()
    def __call__(
        self,
        time: Tensor,  # [n], what the model receives
        pooled: Tensor | None,  # [n, p]; None: the model's modulations do not depend on it
        portions: int = 1,
        on_host: bool = False,
    ) -> Tensor:  # [n, m], on the device or the host
        """Compute the modulations of n samples as the model would in batches of n / ``portions``. Raises UserError if
        they do not fit into the host's memory, where they are to be there."""
        precision, dtype = self.precision, self.precision.compute_dtype()
        times = time.to(self.device).chunk(portions)
        if pooled is not None:
            pooled = pooled.to(self.device, dtype)
        prompts = [None] * portions if pooled is None else pooled.chunk(portions)
        place = torch.device("cpu") if on_host else self.device
        with accounting.allocating(HOST) if on_host else nullcontext():
            rows = torch.empty(len(time), self.width, dtype=precision.product_dtype(), device=place)
        self._require_room(rows, on_host)
        start = 0
        with precision.autocast_on(self.device):
            inputs = [self.fact.inputs(*each, dtype) for each in zip(times, prompts, strict=True)]
            embedded = self._run_on_device(self.embed, inputs)
            conditions = {own: [(F.silu(x) if own else x,) for x in embedded] for own in sorted(set(self.activated))}
            del embedded
            for layer, activated in zip(self.layers, self.activated, strict=True):
                stop = start + _outputs(layer)
                found = self._run_on_device(layer, conditions[activated])
                rows[:, start:stop] = found[0] if portions == 1 else torch.cat(found)
                start = stop
                del found
        accounting.register([rows], HOST if on_host else "plan")
        return rows

    def _require_room(self, rows: Tensor, on_host: bool) -> None:
        """Check that the host has room for the rows. Raises UserError if it has not."""
        # On a card, the prediction of a run's memory includes them, and a full one is explained. What a host's
        # allocation promises, before anything has been written to it, can be more than is free.
        if rows.device.type != "cpu" or type(rows) is not Tensor:  # the simulation's have no bytes
            return
        free = psutil.virtual_memory().available
        if rows.nbytes > free and on_host:
            raise UserError(
                f"objective.levels: {len(rows):,} levels have {rows.nbytes / 2**20:,.0f} MiB of modulations, and "
                f"{free / 2**20:,.0f} MiB of memory are free. Use {len(rows) * free // rows.nbytes:,} or fewer"
            )
        if rows.nbytes > free:
            fits = self.window * free // rows.nbytes
            raise UserError(
                f"memory.modulation_window: {self.window} computes {rows.nbytes / 2**20:,.0f} MiB of modulations "
                f"at once, and {free / 2**20:,.0f} MiB of memory are free. Use "
                + (f"{fits} or less, or memory.modulation resident" if fits else "memory.modulation resident")
            )

    def _run_on_device(self, module: nn.Module, inputs: Sequence[tuple[object, ...]]) -> list[Tensor]:
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

    fact: Modulation
    """How the model makes its modulations."""

    def __call__(self, time: Tensor, pooled: Tensor | None) -> Tensor:  # [n], [n, p] -> [n, m]
        """Compute the modulations of n samples."""


class MicroBatches(Protocol):
    """The part of a run's ``Plan`` that a modulation plan uses."""

    @property
    def batch_size(self) -> int:
        """Samples in a micro-batch."""

    @property
    def accumulation(self) -> int:
        """Passes of this process in a step."""

    def micro_batch(self, step: int, micro: int) -> list[PlannedSample]:
        """Return the samples of one micro-batch."""


class ModulationTable:
    """The modulations of some noise levels, in host memory.

    Args:
        modulation: the detached modulation of the model, which reads no pooled prompt.
        time: the timesteps [n] that the model receives at noise levels [n].
    """

    def __init__(self, modulation: DetachedModulation, time: Callable[[Tensor], Tensor]):
        levels = torch.tensor(modulation.levels, dtype=torch.float32).to(modulation.device)
        self.device = modulation.device
        self.rows = modulation(time(levels), None, on_host=True)
        self.places = {level: place for place, level in enumerate(modulation.levels)}

    def at(self, levels: Sequence[float]) -> Tensor | None:  # [n, m]
        """Copy those of n levels to the device; None if it lacks one."""
        places = [self.places.get(level) for level in levels]
        if None in places:
            return None
        found = self.rows[torch.tensor(places)].to(self.device)
        accounting.register([found], "plan")
        return found


class ModulationPlan:
    """Computes the modulations of a run's steps one window at a time.

    Windows start at absolute multiples of their length and always contain all their steps, even beyond the end of the
    run: the number of rows affects the last bits of a product, and a resumed run must reproduce them.

    Args:
        modulation: the detached modulation of the model.
        plan: provides the samples of each pass.
        time: the timesteps [n] that the model receives at noise levels [n].
        pooled: returns the pooled embedding [p] of a prompt.
        apart: compute the rows of each of a step's passes separately, so that their bits do not depend on how many
            passes a process has.
    """

    def __init__(
        self,
        modulation: DetachedModulation,
        plan: MicroBatches,
        time: Callable[[Tensor], Tensor],
        pooled: Callable[[str], Tensor | None],
        apart: bool = False,
    ):
        self.modulation = modulation
        self.plan = plan
        self.time = time
        self.pooled = pooled
        self.apart = apart
        self.table = ModulationTable(modulation, time) if modulation.levels else None
        self._steps: range | None = None
        self._rows: Tensor | None = None

    @property
    def window(self) -> int:
        """How many steps' modulations are made at once."""
        return self.modulation.window if self.table is None else 1

    def window_steps(self, step: int) -> range:
        """Return the steps whose modulations are made together with those of a step."""
        length = self.window
        first = step - step % length
        return range(first, first + length)

    def window_prompts_steps(self, step: int) -> range | None:
        """Return the steps whose prompts ``step_modulations`` needs; None: it needs none."""
        return self.window_steps(step) if self.modulation.fact.reads_pooled else None

    def step_modulations(self, step: int) -> Tensor:  # [micro-batches, b, m]
        """Return the modulations of one step; the first step of a window computes those of the whole window."""
        length, steps = self.window, self.window_steps(step)
        if steps != self._steps or self._rows is None:
            self._rows = None  # freed before the next window is computed
            count, size = self.plan.accumulation, self.plan.batch_size
            if self.apart:
                samples = [d for micro in range(count) for s in steps for d in self.plan.micro_batch(s, micro)]
                self._rows = self.modulations_of(samples, count).view(count, length, size, -1).transpose(0, 1)
            else:
                samples = [d for s in steps for micro in range(count) for d in self.plan.micro_batch(s, micro)]
                self._rows = self.modulations_of(samples).view(length, count, size, -1)
            self._steps = steps
        return self._rows[step - steps.start]

    def modulations_of(self, samples: Sequence[PlannedSample], portions: int = 1) -> Tensor:  # [n, m]
        """Make the modulations of any samples at once, or in equal portions one after the other."""
        if self.table is not None and (kept := self.table.at([sample.level for sample in samples])) is not None:
            return kept
        levels = torch.tensor([sample.level for sample in samples], dtype=torch.float32).to(self.modulation.device)
        pooled = None
        if self.modulation.fact.reads_pooled:
            found = [each for sample in samples if (each := self.pooled(sample.caption)) is not None]
            assert len(found) == len(samples), "the family says that modulations depend on a pooled prompt"
            pooled = torch.stack(found)
        return self.modulation(self.time(levels), pooled, portions)


def detach_modulation(
    denoiser: Denoiser,
    fact: Modulation,
    precision: WeightPrecision,
    device: torch.device,
    window: int,
    mapped: bool = False,
    levels: Sequence[float] = (),
) -> DetachedModulation:
    """Detach a model's modulation weights in place; each of its passes then needs ``replay``.

    Args:
        denoiser: the model, with frozen modulation weights.
        fact: how it makes its modulations.
        precision: its precision.
        device: where it computes.
        window: how many steps' modulations to compute at once.
        mapped: as for ``DetachedModulation``.
        levels: alike.

    Raises:
        ValueError: one of these weights is trained, or ``fact`` is not the model's.
    """
    if unit_filter(denoiser.units)(fact.embed):
        raise ValueError(f"{fact.embed} lies inside of a unit, whose recomputation would need its modulations again")
    names = [name for name, _ in denoiser.named_modules() if fact.has(name)]
    taken = {name: denoiser.get_submodule(name) for name in [fact.embed, *names]}
    training = [name for name, module in taken.items() if any(p.requires_grad for p in module.parameters())]
    if training:
        raise ValueError(f"the modulation plan needs frozen modulation weights; {training[0]} is trained")
    start, layers = 0, []
    for name in names:
        if (activation := fact.activation(name)) is not None:
            if not isinstance(denoiser.get_submodule(activation), nn.SiLU):
                raise ValueError(f"{activation} is not the SiLU that should stand before {name}")
            put_module(denoiser, activation, nn.Identity())
        stop = start + _outputs(taken[name])
        put_module(denoiser, name, ModulationSlice(start, stop, precision.product_dtype()))
        layers.append((taken[name], activation is not None))
        start = stop
    replayed = vars(denoiser)[REPLAYED] = ReplayedEmbedding(precision.compute_dtype())
    put_module(denoiser, fact.embed, replayed)
    return DetachedModulation(fact, taken[fact.embed], layers, precision, device, window, mapped, levels)


def _outputs(layer: nn.Module) -> int:
    """Return the number of output features of a linear layer, regardless of how its weight is packed."""
    return int(layer.out_features)  # type: ignore[arg-type]
