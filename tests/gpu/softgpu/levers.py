"""Run a few steps of a transformer of four blocks with chosen levers, from batches to losses, as a run does.

Under tests/gpu/softgpu/run the same steps run with many seeds of its adversary; every seed must give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import CONFIG, STEPS, UNITS, load, shake_updates
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.samples import Crop, PlannedSample
from simpletune.data.sources.source import SourceImage
from simpletune.engine.kernels import adaln, rms_norm, rotary, swiglu
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.optim.options import PAGED_FROM, PagedAdamW8bit
from simpletune.engine.optim.state import state_to_tensors
from simpletune.engine.tensors import trained_parameters
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.sd3_architecture import SD3Architecture
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.conditioning import Conditioning
from simpletune.stages.latent_cache import CachedImage
from simpletune.stages.step.batch_loader import BatchLoader, Prefetcher
from simpletune.stages.step.replay import graphs_of
from simpletune.stages.step.synthetic import SingleProcess
from simpletune.stages.step.train_step import TrainStep, assemble
from simpletune.training.pending_steps import DeviceEvent, PendingStep, global_figures

BATCH = 2
SHAPES = CONFIG | {"num_attention_heads": 4, "caption_projection_dim": 64}
"""Matrices of 4096 and more elements, the least that 8-bit optimizers and the streaming of their state take."""


@dataclass(frozen=True)
class Levers:
    """The levers of a short run."""

    method: str = "lora"
    weights: str = "int8"
    optimizer: str = "adamw"
    streamed: bool = False
    boundaries: bool = False
    less: bool = False  # attention's output kept, feed-forward networks recomputed alone
    window: int | None = None
    prefetch: bool = False
    ahead: int = 0
    in_backward: bool = False
    accumulation: int = 1
    graphs: bool = False

    @property
    def steps(self) -> int:
        """More with graphs, whose first two are plain."""
        return STEPS + 3 if self.graphs else STEPS

    def config(self, device: str) -> TrainConfig:
        """The run's configuration."""
        precision = {"weights": self.weights, "compute": "fp32"} if self.weights != "bf16" else {"weights": "bf16"}
        return validate(
            {
                "name": "levers",
                "device": device,
                "data": {"path": "."},
                "adapter": {"method": self.method} | ({} if self.method in ("full", "oft") else {"rank": 4}),
                "precision": precision,
                "optimizer": {"name": self.optimizer, "lr": 1 if self.optimizer == "prodigy" else 0.01},
                "train": {
                    "steps": self.steps,
                    "batch_size": BATCH,
                    "gradient_accumulation": self.accumulation,
                    "clip": "per_parameter" if self.in_backward else "global",
                },
                "memory": {
                    "checkpointing": "all",
                    "resident_blocks": 1 if self.streamed else None,
                    "offload_checkpoint_inputs": self.boundaries,
                    "keep_attention": "all" if self.less else "none",
                    "feed_forward": "alone" if self.less else "block",
                    "modulation": "resident" if self.window is None else "plan",
                    "modulation_window": self.window or 16,
                    "optimizer_in_backward": self.in_backward,
                },
                "speed": {"graphs": self.graphs},
            },
            "levers",
        )


ALONE = {
    "plain": Levers(),
    "streaming": Levers(streamed=True),
    "streaming nf4": Levers(weights="nf4", streamed=True),
    "boundaries": Levers(boundaries=True),
    "boundaries and attention's output": Levers(boundaries=True, less=True),
    "plan windows": Levers(window=2),
    "prefetched batches": Levers(prefetch=True),
    "late figures": Levers(ahead=1),
    "in-backward updates": Levers(method="full", weights="fp32", in_backward=True),
    "8-bit states": Levers(method="full", weights="fp32", optimizer="adamw8bit"),
}
TOGETHER = {
    "LoRA": Levers(streamed=True, boundaries=True, less=True, window=2, prefetch=True, ahead=1, accumulation=2),
    "full": Levers(
        "full", "bf16", "adamw8bit", streamed=True, boundaries=True, less=True, prefetch=True, ahead=1, in_backward=True
    ),
}  # fmt: skip

GRAPHS = {
    "graphs": Levers(graphs=True),
    "graphs nf4": Levers(weights="nf4", graphs=True),
    "graphs bf16": Levers(weights="bf16", graphs=True),
    "graphs LoKr": Levers("lokr", graphs=True),
    "graphs DoRA": Levers("dora", graphs=True),
    "graphs plan windows": Levers(window=2, graphs=True),
    "graphs accumulation": Levers(accumulation=3, graphs=True),
    "graphs full": Levers("full", "fp32", "adamw8bit", graphs=True),
    "graphs LoHa": Levers("loha", graphs=True),
    "graphs OFT": Levers("oft", graphs=True),
    **{
        f"graphs {name}": Levers("full", "bf16", name, graphs=True)
        for name in ("adafactor", "adamw_bf16", "adamw_schedule_free", "lion8bit", "paged_adamw8bit", "prodigy")
    },
}
ALL_GRAPHS = Levers(less=True, window=2, prefetch=True, ahead=1, accumulation=2, graphs=True)
"""With every lever that a graph takes."""


class _Plan:
    """The plan's part that batches use: draws that follow from step, micro-batch and row."""

    batch_size, objective = BATCH, Flow()
    sources = (SimpleNamespace(regularization=False),)

    def __init__(self, accumulation: int):
        self.accumulation = accumulation

    def micros(self, step: int) -> list[range]:
        return [range(BATCH)] * self.accumulation

    def micro_batch(self, step: int, micro: int) -> list[PlannedSample]:
        first = (step * self.accumulation + micro) * BATCH
        image = SourceImage("p", "", (64, 64), "", bytes)
        view = Crop(image, (64, 64), (0.5, 0.5), False)
        return [PlannedSample(view, str(n), (n % 7 + 1) / 9, (n,)) for n in range(first, first + BATCH)]


def _numbers(key: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(key) + 1))


class _Text:
    """The text cache's part that batches use."""

    def inputs(self, captions: list[str]) -> None:
        """Nothing trains on the text side."""

    def load(self, caption: str) -> Conditioning:
        return Conditioning(_numbers(caption, 6, 24), pooled=self.pooled(caption))

    def pooled(self, caption: str) -> Tensor:
        return _numbers(caption, 16)


def _prepared(accumulation: int) -> Any:
    image = CachedImage(_numbers("0", 4, 8, 8), torch.ones(1, 1, 1), None)
    latents = SimpleNamespace(model=SD3(), load=lambda view: image)
    return SimpleNamespace(plan=_Plan(accumulation), text=_Text(), latents=latents, remote=[])


def assembled(levers: Levers, device: torch.device) -> TrainStep:
    """The model with its levers, and what makes its steps."""
    config = levers.config(device.type)
    streams = config.memory.host_filter(UNITS)
    model = load(
        SHAPES, SD3().architecture.random_tensors(SHAPES, 3), config.precision, device,
        on_host=lambda name: streams(name) or (levers.window is not None and SD3Architecture.modulation.serves(name)),
    )  # fmt: skip
    core = assemble(config, model, SingleProcess(device))  # type: ignore[arg-type]
    shake_updates(model)
    core.graphs = graphs_of(core)
    return core


@dataclass
class Result:
    """The result of a short run."""

    figures: list[tuple[float, float]]
    tensors: list[Tensor]
    early: list[Tensor] = field(default_factory=list)
    """What lay in host memory before the host waited for the last figures; empty on the CPU."""

    def equals(self, other: Result) -> bool:
        """Whether every bit is the same, NaN's too."""
        pairs = list(zip(self.tensors, other.tensors, strict=True))
        if self.early and other.early:
            pairs += zip(self.early, other.early, strict=True)
        return repr(self.figures) == repr(other.figures) and all(
            a.dtype == b.dtype and _bits(a).equal(_bits(b)) for a, b in pairs
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor[None].view(torch.uint8)


def run(levers: Levers, device: str = "cuda", kernels: bool = False) -> Result:
    """Make the steps, reading figures one step late if the levers say so, then what a checkpoint reads.

    Args:
        levers: of the steps.
        device: that computes.
        kernels: use those of simpletune/engine/kernels, which round less often than the CPU's operators and are slow in
            Triton's interpreter; otherwise torch's operators.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            for operators in (adaln, rms_norm, rotary, swiglu):
                patch.setitem(operators.FALLBACK.failed, torch.device("cuda", 0), "bits are compared")
        return _run(levers, device)


def _run(levers: Levers, device: str) -> Result:
    where = torch.device(device)
    core = assembled(levers, where)
    batches = BatchLoader(_prepared(levers.accumulation), 0, where, modulation=core.modulation)
    figures, pending, steps = [], deque[PendingStep](), levers.steps
    core.model.train()
    early: list[Tensor] = []
    with Prefetcher(batches, steps, on=levers.prefetch) as prefetcher:
        for step in range(steps):
            began = DeviceEvent(where)
            given = prefetcher.step(step)
            loss, norm = core.run(step, steps, given)
            pending.append(PendingStep.launch(step, began, core, global_figures(loss, norm, core)))
            if step + 1 == steps and device == "cuda":
                early = [tensor.clone() for tensor in _left(core) if tensor.device.type == "cpu"]
            while len(pending) > (0 if step + 1 == steps else levers.ahead):
                figures.append(pending.popleft().read()[:2])
    return Result(figures, [tensor.cpu().clone() for tensor in _left(core)], early)


def run_poisoned(levers: Levers) -> Result:
    """A run that fills slots with NaN as soon as their block is done."""
    build = BlockOffload.__init__
    BlockOffload.__init__ = partialmethod(build, poison=True)  # type: ignore[assignment]
    try:
        return run(levers)
    finally:
        BlockOffload.__init__ = build  # type: ignore[method-assign]


def run_paged() -> Result:
    """One large matrix whose 8-bit state lies in managed memory, which the host reads as it stands."""
    start = torch.randn(400, 300, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(start.cuda())
    optimizer = PagedAdamW8bit(lr=0.01).make([weight])
    for _ in range(2):
        weight.grad = weight.detach().sin()
        optimizer.step()
    tensors, _ = state_to_tensors(optimizer)
    assert weight.numel() >= PAGED_FROM and any(tensor.device.type == "cpu" for tensor in tensors.values())
    return Result([], [*(tensor.cpu().clone() for tensor in tensors.values()), weight.detach().cpu()])


RUNS: dict[str, Callable[[], Result]] = {
    **{name: partial(run, levers) for name, levers in (ALONE | TOGETHER | GRAPHS).items()},
    "all graphs": partial(run, ALL_GRAPHS),
    "LoRA poisoned": partial(run_poisoned, TOGETHER["LoRA"]),
    "full poisoned": partial(run_poisoned, TOGETHER["full"]),
    "paged": run_paged,
}


def _left(core: TrainStep) -> Iterable[Tensor]:
    """The trained weights and the optimizer's states."""
    yield from (parameter.detach() for parameter in trained_parameters(core.model).values())
    for state in core.optimizer.state.values():
        yield from (value.detach() for value in state.values() if isinstance(value, Tensor))
