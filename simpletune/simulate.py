"""Peak memory of training without a GPU: the trainer's own step on fake tensors, every byte counted.

Nothing about a lever, an adapter, a precision or an optimizer is described here: they are covered because they run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from simpletune.config import TrainConfig
from simpletune.data.buckets import Size
from simpletune.data.plan import Draw, View
from simpletune.data.source import Picture
from simpletune.feed import Batch
from simpletune.loading import empty_base
from simpletune.memory.accounting import Accounting
from simpletune.memory.device_terms import cublas_workspace, temporaries
from simpletune.memory.fake import fake_tensors
from simpletune.memory.modulation import ModulationPlan
from simpletune.memory.moment import HOST, Moment
from simpletune.models.weights import all_tensors
from simpletune.step import StepCore, assemble

CLIP_TOKENS = 77
CPU = torch.device("cpu")
DRAW = Draw(View(Picture("", "", (64, 64), "", bytes), (64, 64), (0.5, 0.5), False), "", 0.5, ())


@dataclass(frozen=True)
class Report:
    """What training takes on the device, in bytes as ``torch.cuda.max_memory_allocated`` counts them."""

    peak: Moment
    """The largest moment."""
    phases: Mapping[str, Moment]
    """The largest moment of each phase."""
    steady: Moment
    """What lives between two steps."""
    host_bytes: int
    """What levers keep in host memory."""
    seconds: float
    """What the simulation took."""


def simulate(
    config: TrainConfig,
    size: tuple[int, int] | None = None,
    capability: tuple[int, int] | None = None,
    steps: int = 2,
) -> Report:
    """Predict the training stage's peak memory; no weights, no data and no GPU are needed.

    Args:
        config: of the run, demo names resolved.
        size: width and height in pixels; None: the square of ``data.resolution``.
        capability: of the CUDA device, for its libraries' workspaces; None: they are left out.
        steps: optimizer steps; the first has no optimizer state yet, the second has.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    started = time.perf_counter()
    with fake_tensors(), without_collection():
        sizes = [size or (config.data.resolution, config.data.resolution), config.picture_size()]
        transformer = empty_base(config.model, config.memory, config.precision, CPU, sizes)
        report = account(config, transformer, size, steps)
    extra = 0 if capability is None else cublas_workspace(capability)
    return Report(
        peak=with_workspace(report.peak, extra),
        phases={name: with_workspace(moment, extra) for name, moment in report.phases.items()},
        steady=with_workspace(report.steady, extra),
        host_bytes=report.host_bytes,
        seconds=time.perf_counter() - started,
    )


def account(config: TrainConfig, transformer: nn.Module, size: tuple[int, int] | None = None, steps: int = 2) -> Report:
    """Assemble the run around a loaded transformer, take some steps, and count every byte, real or fake.

    Args:
        config: of the run.
        transformer: as the model's ``load_transformer`` or ``empty_transformer`` gives it.
        size: width and height in pixels; None: the square of ``data.resolution``.
        steps: optimizer steps.
    """
    with Accounting(temporaries()) as accounting:
        report, _ = take_steps(accounting, config, transformer, size, steps)
    return report


def take_steps(
    accounting: Accounting, config: TrainConfig, transformer: nn.Module, size: Size | None = None, steps: int = 2
) -> tuple[Report, EmptyFeed]:
    """As ``account``, under an accounting that goes on.

    Returns:
        The report, and the feed, with which the run lives on.
    """
    started = time.perf_counter()
    base = all_tensors(transformer)
    accounting.register(base, "weights")
    with accounting.allocating("optimizer"):
        core = assemble(config, transformer, OneProcess(CPU))
    take_cuda_paths(core.optimizer)
    register_trained(accounting, core, transformer, base)
    accounting.forget_peak()
    hooks = accounting.watch_gradients(core.parameters) + accounting.watch_places(places(transformer))
    transformer.train()
    feed = EmptyFeed(config, core, size)
    for step in range(steps):
        accounting.forget_moments()
        batches = feed.step(step)
        accounting.register((tensor for batch in batches for tensor in batch_tensors(batch)), "activations")
        core.step(batches)
        del batches
        accounting.register(host_counters(core.optimizer), HOST)
    for hook in hooks:
        hook.remove()
    steady, seconds = accounting.current, time.perf_counter() - started
    return Report(accounting.peak, accounting.peaks, steady, accounting.host_bytes, seconds), feed


def register_trained(accounting: Accounting, core: StepCore, transformer: nn.Module, base: list[Tensor]) -> None:
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
    """Let torch's optimizers update all parameters at once, as they do on CUDA by default.

    It takes temporaries as large as all parameters together.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None:
            group["foreach"] = True


def host_counters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Step counters that are tensors: torch keeps them in host memory."""
    counters = (state.get("step") for state in optimizer.state.values())
    return (counter for counter in counters if isinstance(counter, Tensor))


class EmptyFeed:
    """Micro-batches without values, in the shapes and types in which the feed gives them.

    Args:
        config: of the run.
        core: assembled.
        size: width and height in pixels; None: the square of ``data.resolution``.
        device: where to.
    """

    def __init__(self, config: TrainConfig, core: StepCore, size: Size | None = None, device: torch.device = CPU):
        self.core, self.config, self.device = core, config, device
        self.size = size or (config.data.resolution, config.data.resolution)
        self.shapes, self.text = config.model.known_config(), config.precision.encoder_dtype()
        self.batch_size, self.accumulation = config.train.batch_size, config.train.gradient_accumulation
        self.modulations: ModulationPlan | None = None
        if core.modulation is not None:
            self.modulations = ModulationPlan(core.modulation, self, lambda caption: self._pooled())  # type: ignore[arg-type]

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of one step."""
        batches = [self.batch() for _ in range(self.accumulation)]
        if self.modulations is None:
            return batches
        rows = self.modulations.of_step(step)
        return [replace(batch, pooled=own) for batch, own in zip(batches, rows, strict=True)]

    def micro_batch(self, step: int, micro: int, process: int = 0) -> list[Draw]:
        """As a plan's: what a modulation plan needs of it."""
        return [DRAW] * self.batch_size

    def _pooled(self) -> Tensor:
        return torch.zeros(self.shapes["pooled_projection_dim"], dtype=self.text)

    def batch(self) -> Batch:
        """One micro-batch."""
        b, (width, height) = self.batch_size, self.size
        latents = b, self.shapes["in_channels"], height // 8, width // 8
        text = b, CLIP_TOKENS + self.config.model.t5_length, self.shapes["joint_attention_dim"]
        return Batch(
            z_0=torch.zeros(latents, device=self.device),
            noise=torch.zeros(latents, device=self.device),
            sigma=torch.full((b,), 0.5, device=self.device),
            prompt_embeds=torch.zeros(text, dtype=self.text, device=self.device),
            pooled=self._pooled().expand(b, -1).clone().to(self.device),
            names=tuple(str(number) for number in range(b)),
        )


def batch_tensors(batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a micro-batch."""
    return batch.z_0, batch.noise, batch.sigma, batch.prompt_embeds, batch.pooled


def with_workspace(moment: Moment, extra: int) -> Moment:
    """A moment with what libraries keep for good."""
    by_kind = dict(moment.by_kind)
    if extra:
        by_kind["workspace"] = by_kind.get("workspace", 0) + extra
    return Moment(moment.bytes + extra, by_kind, moment.phase, moment.place)


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: when it happens is chance, and what waits for it takes memory until then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class OneProcess:
    """What a step core needs of accelerate's Accelerator, for one process.

    accelerate's own fixes the device for the whole process, which is then lost for the training that follows.

    Args:
        device: of the step.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def prepare_model(self, model: nn.Module, device_placement: bool = False) -> nn.Module:
        """As it is."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Nothing is synchronised."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The backward pass."""
        loss.backward()

    def clip_grad_norm_(self, parameters: list[nn.Parameter], norm: float) -> Tensor:
        """Gradients scaled down to a norm over all."""
        return torch.nn.utils.clip_grad_norm_(parameters, norm)
