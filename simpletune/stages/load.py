"""Load the base model as the memory options say; keeps one copy per machine of what stays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.denoiser import Denoiser
from simpletune.engine.memory import Memory
from simpletune.engine.memory.machine_weights import MachineWeights, SharedFile, Table, shared_loading
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.models.families import Model
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.family import Overlay
from simpletune.stages.modulation_plan import DetachedModulation, detach_modulation
from simpletune.system.console import detail, say
from simpletune.system.options import plural
from simpletune.system.printable import describe_exception
from simpletune.system.processes import local_process_count


def load_base(
    config: TrainConfig,
    device: torch.device,
    sizes: Collection[Size],
    cache: Path | None = None,
    overlay: Overlay | None = None,
) -> Denoiser:
    """Load the base model, cropping positions and keeping modules in host memory as the memory options say.

    ``config`` has its folders resolved, ``sizes`` are (width, height) in pixels of every picture that the model will
    see, and ``cache`` is the root folder of the cache for the quantised base; None disables caching.
    ``overlay`` is the stack of ``model.loras``, if it names any.
    """
    return config.model.load_denoiser(
        config.precision,
        device,
        config.train.seed,
        on_host=stays_on_host(config.memory, config.model),
        sizes=sizes if config.memory.crop_positions else None,
        cache=cache,
        overlay=overlay,
        mapped=_stays_in_file(config),
    )


def load_autoencoder(config: TrainConfig, device: torch.device) -> nn.Module:
    """Load the run's autoencoder; ``config`` has its folders resolved."""
    autoencoder = config.model.autoencoder
    return autoencoder.load(device, autoencoder.dtype(config.precision), config.memory.vae_tile)


def empty_autoencoder(config: TrainConfig) -> nn.Module:
    """Load it without values, for simulation with fake tensors."""
    autoencoder = config.model.autoencoder
    return autoencoder.empty(autoencoder.dtype(config.precision), config.memory.vae_tile)


def load_base_together(
    config: TrainConfig,
    accelerator: Accelerator,
    sizes: Collection[Size],
    cache: Path | None = None,
    overlay: Overlay | None = None,
) -> Denoiser:
    """Load the base as ``load_base`` does, in all processes at once. The processes of a machine share frozen weights
    that stay in host memory; a process that cannot share loads its own copy, and the first process logs why.

    Raises:
        UserError: the processes of a machine have loaded different weights.
    """
    device = accelerator.device
    if accelerator.num_processes == 1 or not leaves_weights_on_host(config.memory):
        return load_base(config, device, sizes, cache, overlay)
    weights, why = meet(config, accelerator)
    with shared_loading(weights):
        denoiser = load_base(config, device, sizes, cache, overlay)
    filled = weights is not None and weights.fills
    tables: list[Table | None] = gather_object([weights.table(denoiser) if weights is not None and filled else None])
    if weights is not None:
        table = tables[first_local_rank(accelerator)]
        assert table is not None, "who offers fills"
        weights.point(denoiser, table)
        try:
            weights.pin(device)
        except RuntimeError as error:
            why = describe_exception(error)
            weights.copy_out(denoiser)
    reasons: list[str] = gather_object([why])  # empty: it shares, or is alone on its machine
    if weights is not None:
        weights.close()
        if weights.nbytes:
            size = f"{weights.nbytes / 2**30:.2f} GiB of frozen weights in host memory"
            detail(f"host    {size}, once for all processes of a machine")
    if own := [why for why in reasons if why]:
        say(
            f"warning {plural(len(own), 'process has its', 'processes have their')} own copy of the frozen weights in "
            f"host memory, which takes as much memory again: {own[0]}"
        )
    return denoiser


def leaves_weights_on_host(memory: Memory) -> bool:
    """Return whether a run of several processes leaves weights in host memory."""
    # All of these are frozen: a modulation plan needs an adapter that does not train the base, and offloading trained
    # weights needs optimizer_in_backward, which is refused for several processes.
    return memory.resident_blocks is not None or memory.modulation == "plan"


def first_local_rank(accelerator: Accelerator) -> int:
    """Return the rank of this machine's first process."""
    return int(accelerator.process_index - accelerator.local_process_index)


def meet(config: TrainConfig, accelerator: Accelerator) -> tuple[MachineWeights | None, str]:
    """Return the pages that this machine's processes share; the first process creates them, the others join.

    Returns:
        The pages, or None and the reason; a process that is alone on its machine needs none.
    """
    weights, why, offer = None, "", None
    if local_process_count() > 1 and accelerator.local_process_index == 0:
        try:
            weights = MachineWeights.create(8 * config.model.architecture.parameter_count())
            offer = weights.offer
        except OSError as error:
            why = str(error)
    offers: list[SharedFile | None] = gather_object([offer])
    if local_process_count() > 1 and accelerator.local_process_index > 0:
        made = offers[first_local_rank(accelerator)]
        try:
            weights = None if made is None else MachineWeights.join(made)
        except OSError as error:
            why = str(error)
    return weights, why


def empty_base(
    model: Model, memory: Memory, precision: WeightPrecision, device: torch.device, sizes: Collection[Size]
) -> Denoiser:
    """Load the base as ``load_base`` does, with uninitialised weights, whose values do not affect memory."""
    return model.empty_denoiser(
        precision, device, on_host=stays_on_host(memory, model), sizes=sizes if memory.crop_positions else None
    )


def stays_on_host(memory: Memory, model: Model) -> Callable[[str], bool]:
    """Return a predicate: whether the module of a given name stays in host memory when the base is loaded."""
    offloaded = memory.host_filter(model.architecture.units())
    planned = model.architecture.modulation if memory.modulation == "plan" else None
    return lambda name: offloaded(name) or (planned is not None and planned.serves(name))


def _stays_in_file(config: TrainConfig) -> Callable[[str], bool] | None:
    """Return a predicate: whether the module of a given name, if it stays in host memory, does so in the file of the
    quantised base; None: none does."""
    if config.memory.host_weights == "mapped":
        return lambda name: True
    fact = config.model.architecture.modulation
    return fact.serves if fact is not None and config.tabulates_modulations else None


def modulation_of(denoiser: Denoiser, config: TrainConfig, device: torch.device) -> DetachedModulation | None:
    """Detach and return a model's modulation if ``memory.modulation`` is plan; otherwise None."""
    fact, memory = config.model.architecture.modulation, config.memory
    if memory.modulation != "plan":
        return None
    assert fact is not None, "Memory.model_rules refuses it"
    window, mapped = memory.modulation_window, _stays_in_file(config) is not None
    return detach_modulation(denoiser, fact, config.precision, device, window, mapped, config.tabulated_levels)
