"""Predict training's peak memory without a GPU: run the trainer's own step on fake tensors and count every byte.

No lever, adapter, precision or optimizer is modelled here: their own code runs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.denoiser import Denoiser
from simpletune.engine.graphs import MOST, NODE_BYTES, Graphs, Pass
from simpletune.engine.memory import fake
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.cuda_libraries import Workspaces, cublas_workspaces, most_multiprocessors
from simpletune.engine.memory.fake import Fake, autocast_like_cuda, fake_tensors
from simpletune.engine.memory.kernel_workspace import cuda_layouts, temporaries
from simpletune.engine.memory.snapshot import HOST, MemorySnapshot
from simpletune.engine.optim.ema import Average
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.speed import Kernel
from simpletune.engine.tensors import all_tensors, trained_parameters
from simpletune.estimate.simulate.equal_updates import count_equal_updates
from simpletune.estimate.simulate.processes import count_gathered, fake_processes, simulated_process_count
from simpletune.estimate.simulate.reports import L4, StepReport, kernel_of, square_size, with_workspace
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.sections import StreamWork
from simpletune.models.shared.buckets import Size
from simpletune.stages.load import empty_base
from simpletune.stages.step.replay import why_not
from simpletune.stages.step.synthetic import CPU, SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import TrainStep, assemble, average_of
from simpletune.stages.text_side import empty_text_side
from simpletune.system.startup import pause_collection


@dataclass(frozen=True)
class SimulatedTraining:
    """A run after its simulated steps, from which the simulation of generation and evaluation can continue with the
    training state still allocated."""

    report: StepReport
    """Without the libraries' workspaces."""
    core: TrainStep
    batches: SyntheticBatches
    average: Average | None
    denoiser: Denoiser
    accounting: Accounting
    mode: Fake | None
    """The mode that makes its tensors fake; None: they are real."""


def simulate(
    config: TrainConfig,
    size: Size | None = None,
    capability: tuple[int, int] | None = None,
    recorder: Recorder | None = None,
) -> StepReport:
    """Predict the training stage's peak memory without weights, data or a GPU.

    Args:
        config: the run's configuration, demo names resolved.
        size: width and height in pixels; None: the square of ``data.resolution``.
        capability: of the CUDA device, for attention and workspaces; None: an L4's attention, no workspaces.
        recorder: records the step's work, to predict its time; None: a recorder for a GPU.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    started = time.perf_counter()
    with fake_tensors(), pause_collection():
        report = train(config, size, capability, recorder or Recorder(cuda=True)).report
    extra = Workspaces(0, 0)
    if capability is not None:
        extra = cublas_workspaces(capability, deterministic=config.speed.deterministic)
    return replace(
        report,
        peak=with_workspace(report.peak, extra),
        phases={name: with_workspace(snapshot, extra) for name, snapshot in report.phases.items()},
        steady=with_workspace(report.steady, extra),
        seconds=time.perf_counter() - started,
    )


def train(
    config: TrainConfig,
    size: Size | None = None,
    capability: tuple[int, int] | None = None,
    recorder: Recorder | None = None,
    limit: int | None = None,
    denoiser: Denoiser | None = None,
) -> SimulatedTraining:
    """Simulate the training stage within ``fake_tensors``, or with real tensors to be counted; see ``simulate``.

    ``limit``: live bytes above which the simulation ends; None: no limit. ``denoiser``: a loaded model without its
    adapter; None: an empty one. Raises OutOfMemory if the step takes more than the limit, and UserError if the model's
    configuration cannot be read.
    """
    size = size or square_size(config)
    if denoiser is None:
        sizes = [size, config.image_size()]
        denoiser = empty_base(config.model, config.memory, config.precision, CPU, sizes)
    on_cpu = recorder is not None and not recorder.cuda
    with Accounting() if on_cpu else accounting_like_cuda(config, capability) as accounting:
        return take_steps(accounting, config, denoiser, size, recorder, limit)


def snapshots_of_step(
    config: TrainConfig, size: Size, capability: tuple[int, int] | None = None
) -> list[MemorySnapshot]:
    """Record device memory after every allocation of a step with optimizer states, for the summaries beside a run's
    traces. Excludes the CUDA libraries' workspaces. ``capability``: of the device's attention; None: an L4's."""
    # Counting every allocation would slow a real step many times over.
    with fake_tensors(), pause_collection():
        denoiser = empty_base(config.model, config.memory, config.precision, CPU, [size, config.image_size()])
        with accounting_like_cuda(config, capability, keep=True) as accounting:
            take_steps(accounting, config, denoiser, size)
    return accounting.snapshots or []


@contextmanager
def accounting_like_cuda(
    config: TrainConfig, capability: tuple[int, int] | None = None, keep: bool = False
) -> Iterator[Accounting]:
    """Count bytes as a CUDA device would use them, with its attention, autocast and kernels' temporaries; None:
    an L4."""
    kernel = kernel_of(config, capability or L4)
    autocast = autocast_like_cuda() if config.precision.autocast else nullcontext()
    multiprocessors = most_multiprocessors(capability or L4) if config.speed.deterministic else None
    if config.optimizer.name.endswith("8bit"):
        import bitsandbytes  # noqa: F401  # or the constants that it makes when imported would count as the optimizer's
    with autocast, Accounting(temporaries(kernel, multiprocessors), keep, cuda_layouts(kernel)) as accounting:
        yield accounting


def take_steps(
    accounting: Accounting,
    config: TrainConfig,
    denoiser: Denoiser,
    size: Size,
    recorder: Recorder | None = None,
    limit: int | None = None,
) -> SimulatedTraining:
    """Simulate like ``train``, around a loaded model and within an accounting that the caller opened and may
    continue."""
    started = time.perf_counter()
    speed = config.speed.model_copy(update={"compile": False, "attention": simulated_attention(config)})
    config = config.model_copy(update={"speed": speed})
    with recorder.queues() if recorder else nullcontext():
        core = assemble_step(accounting, config, denoiser)
    on_host = 0 if config.adapter.trains_base else accounting.host_bytes
    if recorder is None or recorder.cuda:
        for group in core.optimizer.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                # torch's default on CUDA: it needs temporaries as large as all parameters together.
                group["foreach"] = True
    count_equal_updates(core.optimizer)
    make_states(accounting, core)
    with accounting.allocating("optimizer"):
        average = average_of(config, denoiser, core.optimizer)
    on_cuda = recorder is None or recorder.cuda
    replayed = ReplayedPasses(core, accounting) if on_cuda and is_replayed(config) else None
    core.graphs = replayed
    denoiser.train()
    batches = SyntheticBatches(config, core, size)
    if isinstance(core.optimizer, RoundedOptimizer) and core.optimizer.offloading is not None:
        with recorder.watching(accounting) if recorder else nullcontext():
            take_step(accounting, core, batches, recorder)  # from then on it knows which state to fetch ahead
    accounting.limit = limit  # only from here on: creating the states takes more than any step
    accounting.forget_peak()
    hooks = accounting.watch_gradients(core.parameters) + accounting.phases.watch_modules(reported_modules(denoiser))
    watching = recorder.watching(accounting) if recorder else nullcontext()
    with watching, nullcontext() if core.fsdp is None else count_gathered():
        accounting.forget_snapshots()
        take_step(accounting, core, batches, recorder)
        if average is not None:
            average.update()
    for hook in hooks:
        hook.remove()
    accounting.limit = None
    state_values = [value for state in core.optimizer.state.values() for value in state.values()]
    sections = _of_average_step(recorder.sections, batches.frequencies()) if recorder else ()
    report = StepReport(
        peak=accounting.peak if replayed is None else replayed.peak(sections, kinds_of_passes(config)),
        phases=accounting.peaks,
        steady=accounting.current,
        host_bytes=accounting.host_bytes,
        shared_bytes=on_host,
        trained={name: tuple(p.shape) for name, p in trained_parameters(denoiser).items()},
        trained_bytes=sum(parameter.nbytes for parameter in core.parameters),
        state_bytes=sum(value.nbytes for value in state_values if isinstance(value, Tensor)),
        average_bytes=4 * sum(parameter.numel() for parameter in core.parameters) if average else 0,
        seconds=time.perf_counter() - started,
        sections=sections,
    )
    if replayed is not None:
        replayed.drop()
        core.graphs = None
    return SimulatedTraining(report, core, batches, average, denoiser, accounting, fake.active_mode())


def is_replayed(config: TrainConfig) -> bool:
    """Return whether a run on a CUDA device replays its passes as graphs."""
    return config.speed.graphs is True and why_not(config, torch.device("cuda"), simulated_process_count()) is None


def kinds_of_passes(config: TrainConfig) -> int:
    """Return how many kinds of passes to expect at a time: by size, if pictures keep their aspect ratios."""
    return MOST if any(source.aspect == "buckets" for source in config.pictures.members) else 1


class ReplayedPasses(Graphs):
    """Passes as ``Graphs`` captures them: gradients and inputs lie in tensors that stay."""

    def __init__(self, core: TrainStep, accounting: Accounting):
        self.accounting, self.parameters = accounting, core.parameters
        self.static: list[Tensor] = []
        with accounting.allocating("gradients"):
            for parameter in core.parameters:
                parameter.grad = torch.zeros_like(parameter)

    def run(self, kind: Hashable, inputs: Sequence[Tensor], compute: Pass) -> Tensor:
        if not self.static:
            with self.accounting.allocating("activations"):
                self.static = [torch.empty_like(tensor) for tensor in inputs]
        return compute(self.static)

    def end_step(self) -> None:
        torch._foreach_zero_([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def drop(self) -> None:
        self.static = []
        for parameter in self.parameters:
            parameter.grad = None

    def peak(self, sections: Sequence[StreamWork], kinds: int) -> MemorySnapshot:
        """Return the largest snapshot: what a pass takes stays in the graphs' pool beside what the rest of the step
        takes, and each graph has inputs and memory of the driver."""
        rest = ("clip", "optimizer")
        peaks = self.accounting.peaks
        within = max((each for name, each in peaks.items() if name not in rest), key=lambda each: each.bytes)
        outside = max((peaks[name].bytes for name in rest if name in peaks), default=0) - self.accounting.current.bytes
        inputs = sum(tensor.nbytes for tensor in self.static)
        nodes = sum(part.share * sum(part.work.values()) for part in sections if part.phase not in rest)
        extra = max(0, outside) + (kinds - 1) * inputs + kinds * round(nodes) * NODE_BYTES
        product = None if within.in_products is None else within.in_products + extra
        return replace(with_workspace(within, Workspaces(extra, 0)), in_products=product)


def _of_average_step(sections: Sequence[StreamWork], frequencies: Mapping[str, float]) -> Sequence[StreamWork]:
    """Count the sections of a phase as often as an average step has them."""
    if not frequencies:
        return sections
    return [replace(each, share=each.share * frequencies.get(each.phase, 1.0)) for each in sections]


def assemble_step(accounting: Accounting, config: TrainConfig, denoiser: Denoiser) -> TrainStep:
    """Assemble one process's step core, and register what it holds: what the model gains counts as ``adapter``."""
    processes = simulated_process_count() if config.train.uses_fsdp(simulated_process_count()) else 1
    text = empty_text_side(config, CPU)
    base = list(all_tensors(denoiser))
    if text is not None:
        base += [tensor for tensor in all_tensors(text) if not tensor.requires_grad]
    accounting.register(base, "weights")
    with accounting.allocating("optimizer"), nullcontext() if processes == 1 else fake_processes(processes):
        core = assemble(config, denoiser, SingleProcess(CPU, processes), text=text)
    if core.fsdp is None:
        known = {id(tensor) for tensor in base}
        accounting.register([tensor for tensor in all_tensors(denoiser) if id(tensor) not in known], "adapter")
    else:  # the whole weights are gone once nothing refers to them
        base.clear()
        accounting.register(all_tensors(denoiser), "weights")
    return core


def make_states(accounting: Accounting, core: TrainStep) -> None:
    """Create the optimizer states as a first update would, so that one simulated step includes them; offloaded weights'
    states go to host memory."""
    optimizer = core.optimizer
    with accounting.allocating("optimizer"):
        for parameter in core.parameters:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(optimizer, RoundedOptimizer) and optimizer.independent:
            for parameter in core.parameters:  # leaves states like a step's, and simulates equal ones once
                optimizer.update(parameter)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(optimizer, RoundedOptimizer) and optimizer.offloading is not None:
            for parameter in core.parameters:
                optimizer.offloading.keep_state(parameter, optimizer.state[parameter])
    accounting.register(host_counters(optimizer), HOST)


def take_step(accounting: Accounting, core: TrainStep, batches: SyntheticBatches, recorder: Recorder | None) -> None:
    """Make a step's micro-batches, and take the step."""
    ahead = batches.modulations
    with recorder.share_work(ahead.window) if recorder and ahead else nullcontext():
        step = batches.step(0)
    tensors = [tensor for batch in step for tensor in batch.tensors()]
    if recorder is not None:
        recorder.begin_work(tensors)
    accounting.register(tensors, "activations")
    del tensors
    core.step(step)
    del step
    accounting.register(host_counters(core.optimizer), HOST)


def host_counters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield step counters that are tensors: torch keeps them in host memory unless the update is fused."""
    if any(group.get("fused") for group in optimizer.param_groups):
        return iter(())
    counters = (state.get("step") for state in optimizer.state.values())
    return (counter for counter in counters if isinstance(counter, Tensor))


def simulated_attention(config: TrainConfig) -> Kernel:
    """Return the kernel to run instead of the configured one: all but math use as much memory as flash."""
    return "math" if config.speed.attention == "math" else "auto"


def reported_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules to name in a report: a model's children and the elements of its lists."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}", element) for number, element in child.named_children())
        else:
            yield name, child
