"""From a plan's draws to tensors on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simpletune.data.plan import Draw
from simpletune.memory.modulation import Modulation, ModulationPlan
from simpletune.prepare import Prepared
from simpletune.profiling import phase
from simpletune.streams import stream


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device, in fp32 but for the text."""

    z_0: Tensor  # [b, c, h, w]
    noise: Tensor  # [b, c, h, w]
    sigma: Tensor  # [b]
    prompt_embeds: Tensor  # [b, t, e]
    pooled: Tensor  # [b, p]; with a modulation plan its rows, [b, m]
    names: tuple[str, ...]
    """The pictures' names, for messages."""


class Feed:
    """Loads micro-batches.

    Args:
        prepared: plan and caches of the run.
        seed: ``train.seed``.
        device: where to.
        process: which process.
        modulation: of the transformer, where it was taken out: batches then carry modulations, planned ahead.
    """

    def __init__(
        self,
        prepared: Prepared,
        seed: int,
        device: torch.device,
        process: int = 0,
        modulation: Modulation | None = None,
    ):
        self.plan, self.text, self.latents = prepared.plan, prepared.text, prepared.latents
        self.seed, self.device, self.process = seed, device, process
        self.modulations: ModulationPlan | None = None
        if modulation is not None:
            self.modulations = ModulationPlan(modulation, self.plan, self.text.pooled, process)

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of one step."""
        micros = range(self.plan.accumulation)
        batches = [self.load(self.plan.micro_batch(step, micro, self.process)) for micro in micros]
        if self.modulations is None:
            return batches
        rows = self.modulations.of_step(step)  # [micro-batches, b, m]
        return [replace(batch, pooled=own) for batch, own in zip(batches, rows, strict=True)]

    def singly(self, draws: Sequence[Draw]) -> Iterator[Batch]:
        """A batch of one for each draw."""
        if self.modulations is None:
            yield from (self.load([draw]) for draw in draws)
            return
        window = self.modulations.modulation.window
        for start in range(0, len(draws), window):
            portion = draws[start : start + window]
            rows = self.modulations.of_draws(portion)  # [n, m]
            yield from (replace(self.load([draw]), pooled=row[None]) for draw, row in zip(portion, rows, strict=True))

    def load(self, draws: list[Draw]) -> Batch:
        """The tensors of one micro-batch; noise is drawn in fp32 on the CPU from its key, the same on every device."""
        z_0 = torch.stack([self.latents.load(draw.view) for draw in draws])
        with phase("noise"):
            noise = torch.stack([self._noise(draw, z_0.shape[1:]) for draw in draws])
        embeddings = [self.text.load(draw.caption) for draw in draws]
        return Batch(
            z_0=z_0.to(self.device),
            noise=noise.to(self.device),
            sigma=torch.tensor([draw.sigma for draw in draws], dtype=torch.float32).to(self.device),
            prompt_embeds=torch.stack([embeds for embeds, _ in embeddings]).to(self.device),
            pooled=torch.stack([pooled for _, pooled in embeddings]).to(self.device),
            names=tuple(draw.view.picture.name for draw in draws),
        )

    def _noise(self, draw: Draw, shape: torch.Size) -> Tensor:
        return torch.from_numpy(stream(self.seed, *draw.noise_key).standard_normal(tuple(shape), dtype="float32"))
