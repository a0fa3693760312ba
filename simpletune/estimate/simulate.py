"""Peak memory of training without a GPU: the trainer's own step on fake tensors, every byte counted.

Nothing about a lever, an adapter, a precision or an optimizer is described here: they are covered because they run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.ema import Average
from simpletune.memory.accounting import Accounting
from simpletune.memory.device_terms import cublas_workspace, temporaries
from simpletune.memory.fake import fake_tensors
from simpletune.memory.snapshot import HOST, MemorySnapshot
from simpletune.models.buckets import Size
from simpletune.models.sd3_shapes import Shape
from simpletune.models.transformer import Transformer
from simpletune.pipeline.load import empty_base
from simpletune.step.attention import attention_by
from simpletune.step.core import StepCore, assemble
from simpletune.step.synthetic import CPU, SingleProcess, SyntheticBatches, batch_tensors
from simpletune.system.startup import without_collection
from simpletune.tensors import all_tensors, trained_parameters


@dataclass(frozen=True)
class StepReport:
    """What training takes on the device, in bytes as ``torch.cuda.max_memory_allocated`` counts them."""

    peak: MemorySnapshot
    """The largest snapshot."""
    phases: Mapping[str, MemorySnapshot]
    """The largest snapshot of each phase."""
    steady: MemorySnapshot
    """What lives between two steps."""
    host_bytes: int
    """What levers keep in host memory."""
    trained: Mapping[str, Shape]
    """Names and shapes of the parameters that train."""
    trained_bytes: int
    """What they take."""
    state_bytes: int
    """The optimizer's state, wherever it lives."""
    average_bytes: int
    """The average of what trains, if one is kept."""
    seconds: float
    """What the simulation took."""


@dataclass(frozen=True)
class SimulatedRun:
    """A run that has taken its steps on fake tensors.

    Args:
        core: assembled.
        batches: its micro-batches.
        average: of what trains, if one is kept.
    """

    core: StepCore
    batches: SyntheticBatches
    average: Average | None


def simulate(
    config: TrainConfig,
    size: tuple[int, int] | None = None,
    capability: tuple[int, int] | None = None,
) -> StepReport:
    """Predict the training stage's peak memory; no weights, no data and no GPU are needed.

    Args:
        config: of the run, demo names resolved.
        size: width and height in pixels; None: the square of ``data.resolution``.
        capability: of the CUDA device, for its libraries' workspaces; None: they are left out.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    started = time.perf_counter()
    with fake_tensors(), without_collection():
        sizes = [size or (config.data.resolution, config.data.resolution), config.picture_size()]
        transformer = empty_base(config.model, config.memory, config.precision, CPU, sizes)
        report = account(config, transformer, size)
    extra = 0 if capability is None else cublas_workspace(capability)
    return StepReport(
        peak=with_workspace(report.peak, extra),
        phases={name: with_workspace(snapshot, extra) for name, snapshot in report.phases.items()},
        steady=with_workspace(report.steady, extra),
        host_bytes=report.host_bytes,
        trained=report.trained,
        trained_bytes=report.trained_bytes,
        state_bytes=report.state_bytes,
        average_bytes=report.average_bytes,
        seconds=time.perf_counter() - started,
    )


def account(config: TrainConfig, transformer: Transformer, size: tuple[int, int] | None = None) -> StepReport:
    """Assemble the run around a loaded transformer, take a step, and count every byte, real or fake.

    Args:
        config: of the run.
        transformer: as the model's ``load_transformer`` or ``empty_transformer`` gives it.
        size: width and height in pixels; None: the square of ``data.resolution``.
    """
    with Accounting(temporaries()) as accounting:
        report, _ = take_steps(accounting, config, transformer, size)
    return report


def take_steps(
    accounting: Accounting, config: TrainConfig, transformer: Transformer, size: Size | None = None
) -> tuple[StepReport, SimulatedRun]:
    """As ``account``, under an accounting that goes on.

    Returns:
        The report, and what the run lives on with.
    """
    started = time.perf_counter()
    config = config.model_copy(update={"speed": config.speed.model_copy(update={"compile": False})})
    base = all_tensors(transformer)
    accounting.register(base, "weights")
    with accounting.allocating("optimizer"):
        core = assemble(config, transformer, SingleProcess(CPU))
    take_cuda_paths(core.optimizer)
    register_trained(accounting, transformer, base)
    updates_stream = config.memory.resident_blocks is not None and config.adapter.trains_base
    steps = 2 if updates_stream else 1
    if not updates_stream:
        make_states(accounting, core)
    with accounting.allocating("optimizer"):
        average = config.ema.build(trained_parameters(transformer)) if config.ema else None
    accounting.forget_peak()
    hooks = accounting.watch_gradients(core.parameters) + accounting.watch_modules(places(transformer))
    transformer.train()
    synthetic = SyntheticBatches(config, core, size)
    for step in range(steps):
        accounting.forget_snapshots()
        batches = synthetic.step(step)
        accounting.register((tensor for batch in batches for tensor in batch_tensors(batch)), "activations")
        with attention_by("math" if config.speed.attention == "math" else "auto"):  # the rest take what flash takes
            core.step(batches)
        del batches
        accounting.register(host_counters(core.optimizer), HOST)
        if average is not None:
            average.update()
    for hook in hooks:
        hook.remove()
    report = StepReport(
        peak=accounting.peak,
        phases=accounting.peaks,
        steady=accounting.current,
        host_bytes=accounting.host_bytes,
        trained={name: tuple(p.shape) for name, p in trained_parameters(transformer).items()},
        trained_bytes=sum(parameter.nbytes for parameter in core.parameters),
        state_bytes=sum(value.nbytes for value in states(core.optimizer)),
        average_bytes=sum(value.nbytes for value in average.tensors().values()) if average else 0,
        seconds=time.perf_counter() - started,
    )
    return report, SimulatedRun(core, synthetic, average)


def make_states(accounting: Accounting, core: StepCore) -> None:
    """Let the optimizer make its states, as its first update would, so that one step shows all.

    Where trained weights are streamed only a backward pass can: their states' homes are beside theirs.
    """
    with accounting.allocating("optimizer"):
        for parameter in core.parameters:
            parameter.grad = torch.zeros_like(parameter)
        core.optimizer.step()
        core.optimizer.zero_grad(set_to_none=True)
    accounting.register(host_counters(core.optimizer), HOST)


def register_trained(accounting: Accounting, transformer: Transformer, base: list[Tensor]) -> None:
    """What the model has gained since it was loaded is the adapter."""
    known = {id(tensor) for tensor in base}
    gained = [tensor for tensor in all_tensors(transformer) if id(tensor) not in known]
    accounting.register(gained, "adapter")


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts to name in a report: a model's children, and the elements of its lists."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}", element) for number, element in child.named_children())
        else:
            yield name, child


def take_cuda_paths(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's optimizers update all parameters at once, as those that are not fused do on CUDA by default.

    It takes temporaries as large as all parameters together.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def host_counters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Step counters that are tensors: torch keeps them in host memory, but for its fused updates."""
    if any(group.get("fused") for group in optimizer.param_groups):
        return iter(())
    counters = (state.get("step") for state in optimizer.state.values())
    return (counter for counter in counters if isinstance(counter, Tensor))


def states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in values if isinstance(value, Tensor))


def with_workspace(snapshot: MemorySnapshot, extra: int) -> MemorySnapshot:
    """A snapshot with what libraries keep for good."""
    by_kind = dict(snapshot.by_kind)
    if extra:
        by_kind["workspace"] = by_kind.get("workspace", 0) + extra
    return MemorySnapshot(snapshot.bytes + extra, by_kind, snapshot.phase, snapshot.module)
