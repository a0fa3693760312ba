"""What a run has changed: pictures of the base and the tuned model from the same noise, and the evaluation loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from simpletune.config import TrainConfig
from simpletune.data.plan import Plan
from simpletune.feed import Batch, Feed
from simpletune.prepare import TextCache, free_memory
from simpletune.sampling import Request, draw, grid, save_png

BASE = "base"
GRID = "grid.png"


class Previews:
    """Draws and keeps validation pictures under ``samples/``: ``base/`` and one folder a step.

    Args:
        config: with folders resolved.
        requests: what to draw.
        text: prompt embeddings.
        folder: the run's ``samples`` folder.
    """

    def __init__(self, config: TrainConfig, requests: list[Request], text: TextCache, folder: Path):
        self.config, self.requests, self.text, self.folder = config, requests, text, folder

    def draw_base(self, transformer: nn.Module) -> None:
        """Pictures of the base model. Full fine-tuning changes the base, so this comes before training."""
        adapter = self.config.adapter
        with nullcontext() if adapter.trains_base else adapter.disabled(transformer):
            self._draw(transformer, BASE, self.folder / BASE)

    def draw_tuned(self, transformer: nn.Module, step: int) -> None:
        """Pictures of the model as it is after ``step`` steps."""
        self._draw(transformer, f"step {step}", self.folder / f"step-{step:06d}")

    def _draw(self, transformer: nn.Module, state: str, folder: Path) -> None:
        if not self.requests:
            return
        device = next(transformer.parameters()).device
        was_training = transformer.training
        transformer.eval()
        dtype = self.config.precision.encoder_dtype()
        vae = self.config.model.load_vae(device, dtype, self.config.memory.vae_tile)
        pictures = draw(transformer, vae, self.config.model, self.config.precision, self.requests, self.text.load)
        del vae
        free_memory(device)
        transformer.train(was_training)
        for number, (picture, request) in enumerate(zip(pictures, self.requests, strict=True)):
            save_png(picture, folder / f"prompt-{number:02d}.png", request, run=self.config.name, weights=state)

    def states(self) -> list[Path]:
        """The folders drawn so far: the base first, then by step."""
        return [self.folder / BASE, *sorted(self.folder.glob("step-*"))]

    def write_grid(self) -> Path | None:
        """One picture of all: a row per prompt, a column per state."""
        if not self.requests:
            return None
        states = self.states()
        rows: list[tuple[str, list[Image.Image]]] = []
        for number, request in enumerate(self.requests):
            images: list[Image.Image] = [Image.open(state / f"prompt-{number:02d}.png") for state in states]
            rows.append((f"{request.prompt}  (seed {request.seed})", images))
        file = self.folder / GRID
        titles = [BASE, *(f"step {int(state.name[5:])}" for state in states[1:])]
        grid(rows, titles).save(file)
        return file


@torch.no_grad()
def evaluation_loss(
    transformer: nn.Module, loss: Callable[[nn.Module, Batch], torch.Tensor], feed: Feed, plan: Plan, count: int
) -> float | None:
    """The mean loss over a fixed set of (picture, noise level, noise); None if the set is empty."""
    if count == 0:
        return None
    was_training = transformer.training
    transformer.eval()
    losses = [loss(transformer, feed.load([each])) for each in plan.evaluation(count)]
    transformer.train(was_training)
    return torch.stack(losses).mean().item()
