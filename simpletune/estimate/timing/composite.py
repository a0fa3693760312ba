"""Time whole steps of small models, because operations in a loop differ from a step.

Single operations in a loop find their code, their pages and some operands in the caches. So the time of whole steps,
divided by the sum of their parts as a prediction's recorder counts them, scales the parts: a model too small to compute
anything scales the host's parts, larger ones the device's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from simpletune.engine.memory.accounting import Accounting
from simpletune.estimate.timing.constants import Composite
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.sections import KernelWork
from simpletune.estimate.timing.stopwatch import CudaStopwatch, Stopwatch
from simpletune.system.phases import phase

HEAD = 64


@dataclass(frozen=True)
class CompositeModel:
    """A model and its input."""

    width: int
    tokens: int
    blocks: int
    dtype: torch.dtype = torch.float32


SMALLEST = CompositeModel(32, 16, 4)
ON_CPU = (CompositeModel(192, 256, 4),)  # its weights and activations exceed a core's caches
ON_CUDA = tuple(
    CompositeModel(width, tokens, 2, torch.bfloat16) for width, tokens in ((640, 4096), (1536, 1024), (1536, 4096))
)


def composites(watch: Stopwatch) -> list[Composite]:
    """Time whole steps, the smallest model's first."""
    sizes = ON_CUDA if isinstance(watch, CudaStopwatch) else ON_CPU
    with torch.enable_grad():
        return [_time_step(watch, *_model(size, watch.device)) for size in (SMALLEST, *sizes)]


def _model(size: CompositeModel, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build blocks like SD3's, with LoRA, and their forward pass; runs the same code as training."""
    from diffusers.models.attention import JointTransformerBlock
    from peft import LoraConfig, inject_adapter_in_model

    heads = max(2, size.width // HEAD)
    made = (JointTransformerBlock(size.width, heads, size.width // heads) for _ in range(size.blocks))
    blocks = nn.ModuleList(made).requires_grad_(False)
    model = inject_adapter_in_model(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]), blocks)
    model.to(device, size.dtype)
    x = torch.randn(1, size.tokens, size.width).to(device, size.dtype)
    time = torch.randn(1, size.width).to(device, size.dtype)

    def forward() -> Tensor:
        text, image = x[:, : -(-size.tokens // 2)], x
        for block in blocks:
            text, image = block(image, text, time)
        return image

    return model, forward


def _time_step(watch: Stopwatch, model: nn.Module, forward: Callable[[], Tensor]) -> Composite:
    """Time a model's forward and backward pass, and count their operations."""

    def step() -> None:
        with phase("forward"):
            loss = forward().sum()
        with phase("backward"):
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    recorder, accounting = Recorder(cuda=False), Accounting()
    with accounting, recorder.watching(accounting):
        step()
    seconds = watch.device_seconds([step], "step")
    host: Counter[str] = Counter()
    work: Counter[KernelWork] = Counter()
    for section in recorder.sections:
        host.update(section.host)
        work.update(section.work)
    rows = [(each.kind, each.dtype, list(each.extents), count) for each, count in work.items()]
    return Composite(seconds=seconds, host=dict(host), work=rows)
