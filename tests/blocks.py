"""What the tests of checkpointing and streaming share: a transformer of four blocks, its steps, an unkind queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletune.flow import flow_loss
from simpletune.memory.boundaries import HostBoundaries
from simpletune.memory.checkpointing import set_passes
from simpletune.memory.copies import Ticket
from simpletune.memory.streaming import StreamedBlocks
from simpletune.models.sd3 import predict_velocity
from simpletune.models.sd3_transformer import load
from simpletune.quant.precision import WeightPrecision
from simpletune.sampling import autocast_of

BLOCKS = 4
CONFIG = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": BLOCKS,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24, "caption_projection_dim": 32,
    "pooled_projection_dim": 16, "pos_embed_max_size": 8,
}  # fmt: skip


def transformer(precision: WeightPrecision, device: str = "cpu") -> Any:
    """An SD3 of four blocks with random weights, always the same."""
    return load(CONFIG, None, precision, torch.device(device), seed=3)


def shake_updates(model: nn.Module) -> None:
    """Make a LoRA's updates count from the first step on: PEFT starts lora_B at zero."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def loss_of(model: nn.Module, precision: WeightPrecision, key: int, device: str = "cpu") -> Tensor:
    """The loss of one micro-batch of two samples that follows from its key."""
    generator = torch.Generator().manual_seed(key)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    z_t, prompts, pooled, target = draw(2, 4, 8, 8), draw(2, 6, 24), draw(2, 16), draw(2, 4, 8, 8)
    sigma = torch.tensor([0.3, 0.8], device=device)
    with autocast_of(precision, z_t.device):
        velocity = predict_velocity(model, z_t, sigma, prompts, pooled, precision.compute_dtype())
    return flow_loss(velocity, target)


@dataclass
class Setting:
    """How a model's blocks are run."""

    streamed: tuple[int, ...] = ()
    checkpointed: int = BLOCKS
    host: bool = False
    poison: bool = False
    queue: Callable[[], Any] | None = None
    trained: bool = False


def prepare(model: Any, setting: Setting, device: str = "cpu") -> StreamedBlocks | None:
    """Give a model's blocks their passes."""
    queue = setting.queue or (lambda: None)
    where = torch.device(device)
    streaming = None
    if setting.streamed:
        streaming = StreamedBlocks(
            model.transformer_blocks, setting.streamed, where, setting.trained, queue(), queue(), setting.poison
        )
    boundaries = HostBoundaries(where, queue()) if setting.host else None
    set_passes(model.transformer_blocks, setting.checkpointed, boundaries, streaming)
    return streaming


class LateCopies:
    """A queue that does nothing until it must: a use that does not wait finds what was there before."""

    def __init__(self) -> None:
        self._queue: list[Late] = []

    def mark(self) -> Ticket:
        """The computation is done already, on the CPU."""
        return None

    def run(self, work: Callable[[], object], after: Iterable[Ticket]) -> Ticket:
        """Keep the work for later."""
        late = Late(self, work, list(after))
        self._queue.append(late)
        return late

    def wait(self, ticket: Ticket) -> None:
        """Do what was handed out up to that work."""
        if ticket is not None:
            ticket.queue.flush(ticket)

    join = wait

    def flush(self, last: Late) -> None:
        """Work in order, each after what it waits for."""
        while not last.done:
            late = self._queue.pop(0)
            for ticket in late.after:
                self.wait(ticket)
            with torch.no_grad():
                late.work()
            late.done = True


@dataclass(eq=False)
class Late:
    """Work of a late queue."""

    queue: LateCopies
    work: Callable[[], object]
    after: list[Ticket]
    done: bool = False


def write_pipeline(folder: Path) -> None:
    """A pipeline of three blocks on disk."""
    from simpletune.demo import tiny_sd3

    tiny_sd3.build(folder, **{**tiny_sd3.MINIMAL, "layers": 3, "heads": 3}, seed=2, dtype="fp32")
