"""Predict training's peak memory without a GPU: run the trainer's own step on fake tensors and count every byte.

No lever, adapter, precision or optimizer is modelled here: their own code runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from simpletune.config.schema import Kernel, TrainConfig
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.attention_workspace import attention_kernel, cuda_layouts
from simpletune.engine.memory.cuda_autocast import autocast_like_cuda
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.kernel_workspace import cublas_workspace, temporaries
from simpletune.engine.memory.snapshot import HOST, MemorySnapshot
from simpletune.engine.optim.ema import Average
from simpletune.engine.tensors import all_tensors, trained_parameters
from simpletune.estimate.simulate.equal_updates import count_equal_updates
from simpletune.estimate.simulate.optimizer_states import host_counters, make_states, states, take_cuda_paths
from simpletune.estimate.simulate.processes import counting_gathered, fake_processes, simulated_processes
from simpletune.estimate.timing.recorder import Recorder, StreamWork
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.denoiser import Denoiser
from simpletune.models.shared.model_config import Shape
from simpletune.stages.load import empty_base
from simpletune.stages.step.synthetic import CPU, SingleProcess, SyntheticBatches, batch_tensors
from simpletune.stages.step.train_step import TrainStep, assemble, average_of
from simpletune.stages.text_side import empty_text_side
from simpletune.system.startup import without_collection


@dataclass(frozen=True)
class StepReport:
    """Device memory of training, in bytes as ``torch.cuda.max_memory_allocated`` counts them."""

    peak: MemorySnapshot
    """The largest snapshot."""
    phases: Mapping[str, MemorySnapshot]
    """The largest snapshot of each phase."""
    steady: MemorySnapshot
    """Memory allocated between two steps."""
    host_bytes: int
    """Host memory used by the levers."""
    shared_bytes: int
    """The part of ``host_bytes`` that a machine's processes share: frozen weights."""
    trained: Mapping[str, Shape]
    """Names and shapes of the trained parameters."""
    trained_bytes: int
    """Size of the trained parameters."""
    state_bytes: int
    """Size of the optimizer state, on device and host."""
    average_bytes: int
    """Size of the EMA, if the run has one."""
    seconds: float
    """Duration of the simulation."""
    sections: Sequence[StreamWork] = ()
    """The step's work on host and device, in order; empty if nothing recorded it."""


L4 = (8, 9)  # whose kernels are counted if no device is named


@dataclass(frozen=True)
class SimulatedRun:
    """A run after its steps on fake tensors.

    Args:
        core: the assembled step core.
        batches: its micro-batches.
        average: EMA of the trained parameters, if the run has one.
    """

    core: TrainStep
    batches: SyntheticBatches
    average: Average | None


def simulate(
    config: TrainConfig,
    size: tuple[int, int] | None = None,
    capability: tuple[int, int] | None = None,
    recorder: Recorder | None = None,
) -> StepReport:
    """Predict the training stage's peak memory without weights, data or a GPU.

    Args:
        config: the run's configuration, demo names resolved.
        size: width and height in pixels; None: the square of ``data.resolution``.
        capability: the CUDA device's compute capability, for its attention and its libraries' workspaces; None: an L4's
            attention, and no workspaces.
        recorder: records the step's work, to predict its time; None: a recorder for a GPU.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    started = time.perf_counter()
    with fake_tensors(), without_collection():
        sizes = [size or (config.data.resolution, config.data.resolution), config.picture_size()]
        denoiser = empty_base(config.model, config.memory, config.precision, CPU, sizes)
        report = account(config, denoiser, size, capability, recorder or Recorder(cuda=True))
    extra = 0 if capability is None else cublas_workspace(capability)
    return StepReport(
        peak=with_workspace(report.peak, extra),
        phases={name: with_workspace(snapshot, extra) for name, snapshot in report.phases.items()},
        steady=with_workspace(report.steady, extra),
        host_bytes=report.host_bytes,
        shared_bytes=report.shared_bytes,
        trained=report.trained,
        trained_bytes=report.trained_bytes,
        state_bytes=report.state_bytes,
        average_bytes=report.average_bytes,
        seconds=time.perf_counter() - started,
        sections=report.sections,
    )


def account(
    config: TrainConfig,
    denoiser: Denoiser,
    size: tuple[int, int] | None = None,
    capability: tuple[int, int] | None = None,
    recorder: Recorder | None = None,
) -> StepReport:
    """Assemble the run around a loaded transformer, take a step, and count every byte, real or fake.

    Args:
        config: the run's configuration.
        denoiser: the result of the model's ``load_denoiser`` or ``empty_denoiser``.
        size: width and height in pixels; None: the square of ``data.resolution``.
        capability: see ``simulate``.
        recorder: see ``simulate``.
    """
    on_cpu = recorder is not None and not recorder.cuda
    with Accounting() if on_cpu else accounting_like_cuda(config, capability) as accounting:
        report, _ = take_steps(accounting, config, denoiser, size, recorder)
    return report


@contextmanager
def accounting_like_cuda(
    config: TrainConfig, capability: tuple[int, int] | None = None, keep: bool = False
) -> Iterator[Accounting]:
    """Count bytes as a CUDA device would use them, with its attention, its autocast and its kernels' temporaries.

    Args:
        config: the run's configuration.
        capability: the device's compute capability; None: an L4's.
        keep: see ``Accounting``.
    """
    kernel = attention_kernel(capability or L4, config.precision.product_dtype(), config.speed.attention)
    autocast = autocast_like_cuda() if config.precision.autocast else nullcontext()
    with autocast, Accounting(temporaries(kernel), keep, cuda_layouts(kernel)) as accounting:
        yield accounting


def take_steps(
    accounting: Accounting,
    config: TrainConfig,
    denoiser: Denoiser,
    size: Size | None = None,
    recorder: Recorder | None = None,
    limit: int | None = None,
) -> tuple[StepReport, SimulatedRun]:
    """Like ``account``, within an accounting that the caller opened and may continue.

    Args:
        accounting: the accounting that counts.
        config: see ``account``; likewise the next three.
        denoiser: the loaded model.
        size: the pictures' size.
        recorder: the step's recorder.
        limit: the number of live bytes above which the simulation ends; None: no limit.

    Returns:
        The report and the simulated run.

    Raises:
        OutOfMemory: the step takes more than the limit.
    """
    started = time.perf_counter()
    speed = config.speed.model_copy(update={"compile": False, "attention": simulated_attention(config)})
    config = config.model_copy(update={"speed": speed})
    with recorder.queues() if recorder else nullcontext():
        core = assemble_step(accounting, config, denoiser)
    on_host = 0 if config.adapter.trains_base else accounting.host_bytes
    if recorder is None or recorder.cuda:
        take_cuda_paths(core.optimizer)
    count_equal_updates(core.optimizer)
    make_states(accounting, core)
    with accounting.allocating("optimizer"):
        average = average_of(config, denoiser, core.optimizer)
    accounting.limit = limit  # only from here on: creating the states takes more than any step
    accounting.forget_peak()
    denoiser.train()
    run = SimulatedRun(core, SyntheticBatches(config, core, size), average)
    take_watched_step(accounting, run, denoiser, recorder)
    accounting.limit = None
    report = StepReport(
        peak=accounting.peak,
        phases=accounting.peaks,
        steady=accounting.current,
        host_bytes=accounting.host_bytes,
        shared_bytes=on_host,
        trained={name: tuple(p.shape) for name, p in trained_parameters(denoiser).items()},
        trained_bytes=sum(parameter.nbytes for parameter in core.parameters),
        state_bytes=sum(value.nbytes for value in states(core.optimizer)),
        average_bytes=4 * sum(parameter.numel() for parameter in core.parameters) if average else 0,
        seconds=time.perf_counter() - started,
        sections=recorder.sections if recorder else (),
    )
    return report, run


def take_watched_step(accounting: Accounting, run: SimulatedRun, denoiser: Denoiser, recorder: Recorder | None) -> None:
    """Take one step of a simulated run while watching its modules, gradients and work."""
    hooks = accounting.watch_gradients(run.core.parameters) + accounting.phases.watch_modules(places(denoiser))
    watching = recorder.watching(accounting) if recorder else nullcontext()
    with watching, nullcontext() if run.core.fsdp is None else counting_gathered():
        accounting.forget_snapshots()
        if recorder is not None:
            recorder.begin_step()
        take_step(accounting, run, recorder)
    for hook in hooks:
        hook.remove()


def assemble_step(accounting: Accounting, config: TrainConfig, denoiser: Denoiser) -> TrainStep:
    """Assemble one process's step core, and register what it holds."""
    processes = simulated_processes() if config.train.uses_fsdp(simulated_processes()) else 1
    text = empty_text_side(config, CPU)
    base = [*all_tensors(denoiser), *frozen_tensors(text)]
    accounting.register(base, "weights")
    with accounting.allocating("optimizer"), nullcontext() if processes == 1 else fake_processes(processes):
        core = assemble(config, denoiser, SingleProcess(CPU, processes), text=text)
    if core.fsdp is None:
        register_trained(accounting, denoiser, base)
    else:  # the whole weights are gone once nothing refers to them
        base.clear()
        accounting.register(all_tensors(denoiser), "weights")
    return core


def take_step(accounting: Accounting, run: SimulatedRun, recorder: Recorder | None) -> None:
    """Take one step of a simulated run."""
    modulation = run.core.modulation
    with recorder.shared_by(modulation.window) if recorder and modulation else nullcontext():
        batches = run.batches.step(0)
    tensors = [tensor for batch in batches for tensor in batch_tensors(batch)]
    if recorder is not None:
        recorder.begin_work(tensors)
    accounting.register(tensors, "activations")
    del tensors
    run.core.step(batches)
    del batches
    accounting.register(host_counters(run.core.optimizer), HOST)
    if run.average is not None:
        run.average.update()


def simulated_attention(config: TrainConfig) -> Kernel:
    """The kernel to run instead of the configured one: all but math use as much memory as flash."""
    return "math" if config.speed.attention == "math" else "auto"


def frozen_tensors(text: nn.Module | None) -> list[Tensor]:
    """The text side's frozen tensors."""
    return [] if text is None else [tensor for tensor in all_tensors(text) if not tensor.requires_grad]


def register_trained(accounting: Accounting, denoiser: Denoiser, base: list[Tensor]) -> None:
    """Register every tensor that the model has gained since it was loaded as ``adapter``."""
    known = {id(tensor) for tensor in base}
    gained = [tensor for tensor in all_tensors(denoiser) if id(tensor) not in known]
    accounting.register(gained, "adapter")


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules to name in a report: a model's children and the elements of its lists."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}", element) for number, element in child.named_children())
        else:
            yield name, child


def with_workspace(snapshot: MemorySnapshot, extra: int) -> MemorySnapshot:
    """Add the libraries' permanent workspace to a snapshot."""
    by_kind = dict(snapshot.by_kind)
    if extra:
        by_kind["workspace"] = by_kind.get("workspace", 0) + extra
    return MemorySnapshot(snapshot.bytes + extra, by_kind, snapshot.phase, snapshot.module)
