"""Turn a plan's draws into tensors on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simpletune.adapters.text.inputs import TextInputs
from simpletune.config.prior import NoPrior, PriorOption
from simpletune.data.samples import SampleDraw
from simpletune.data.sources.masks import mask_key
from simpletune.data.storage.cache import Cache, crop_key
from simpletune.data.storage.shard_cache import SamplePrefetcher
from simpletune.stages.modulation_plan import DetachedModulation, ModulationPlan
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.stages.step.passes import WHOLE, TrainingPasses
from simpletune.system.rng import stream

NO_PRIOR = NoPrior()


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device, in fp32 except for the text."""

    z_0: Tensor  # [b, c, h, w]
    noise: Tensor  # [b, c, h, w]
    level: Tensor  # [b]
    prompt_embeds: Tensor  # [b, t, e]
    pooled: Tensor  # [b, p]; with a modulation plan, its rows [b, m]
    names: tuple[str, ...]
    """The pictures' names, for messages."""
    fillers: int = 0
    """The number of padding rows at the end, which the loss excludes."""
    parts: float = 1.0
    """The divisor from the batch's mean loss to its share of the step's loss; infinite if all rows are fillers."""
    weight: Tensor | None = None  # [b, 1, h or 1, w or 1]
    """The weights of samples, or of their positions, in the loss; None: 1 everywhere."""
    prior: Tensor | None = None  # [b, 1, h or 1, w or 1]
    """Their weights in the loss against the base's prediction; None: 0 everywhere; the prediction is not computed."""
    key: tuple[int, str, int, int] | None = None
    """The key of the random numbers that torch draws for the batch (LoRA dropout); None: the generators continue."""
    text: TextInputs | None = None
    """The trained text side's inputs; None: nothing trains there."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor of the batch."""
        tensors = (self.z_0, self.noise, self.level, self.prompt_embeds, self.pooled)
        z_0, noise, level, prompt_embeds, pooled = map(change, tensors)
        weight, prior = (None if each is None else change(each) for each in (self.weight, self.prior))
        moved = replace(self, z_0=z_0, noise=noise, level=level, prompt_embeds=prompt_embeds, pooled=pooled)
        return replace(moved, weight=weight, prior=prior, text=None if self.text is None else self.text.map(change))


class BatchLoader:
    """Loads micro-batches.

    Args:
        prepared: the run's plan and caches.
        seed: ``train.seed``.
        device: the target device.
        modulation: the detached modulation of the transformer; batches then carry modulations computed ahead.
        prior: how the class is preserved.
        share: which micro-batches of a step this process computes.
    """

    def __init__(
        self,
        prepared: PreparedData,
        seed: int,
        device: torch.device,
        modulation: DetachedModulation | None = None,
        prior: PriorOption = NO_PRIOR,
        share: RankMicroBatches = WHOLE,
    ):
        self.plan, self.text, self.latents, self.masks = prepared.plan, prepared.text, prepared.latents, prepared.masks
        self.seed, self.device, self.share = seed, device, share
        self.passes = TrainingPasses(self.plan, prior, share)
        self.remote = prepared.remote
        self.modulations: ModulationPlan | None = None
        self._named = range(0)
        if modulation is not None:
            self.modulations = ModulationPlan(modulation, self.passes, self.text.pooled, apart=share.exact)

    def step(self, step: int) -> list[Batch]:
        """Load the micro-batches of one step."""
        return self.place(step, self.fetch(step))

    def fetch(self, step: int) -> list[Batch]:
        """Load a step's micro-batches into host memory; may run ahead of and alongside the computation. A step's loss
        is the mean over its samples in all processes. The processes' gradients are averaged, or, with an exact share,
        added.
        """
        samples = self.plan.samples_in(step) / (1 if self.share.exact else self.share.processes)
        found = []
        for micro in range(self.passes.count(step)):
            draws = self.passes.micro_batch(step, micro)
            real = sum(draw.weight for draw in draws)
            parts = samples / real if real else math.inf
            batch = self._fetched(draws, self.passes.is_second(micro))
            key = (self.seed, "step", step, self.passes.place(step, micro))
            found.append(replace(batch, fillers=len(draws) - real, parts=parts, key=key))
        return found

    def needs(self, step: int) -> Iterator[tuple[Cache, str]]:
        """What a step reads from the caches, as pairs of a cache and a key; with a modulation plan also its window's
        pooled embeddings, unless an earlier call returned them."""
        for micro in range(self.passes.count(step)):
            for draw in self.passes.micro_batch(step, micro):
                yield self.latents.cache, crop_key(draw.view)
                if draw.view.picture.mask is not None:
                    yield self.masks.cache, mask_key(draw.view)
                yield from self.text.places(draw.caption)
        if self.modulations is not None and (window := self.modulations.steps_with(step)) != self._named:
            self._named = window
            for draws in (
                self.passes.micro_batch(s, micro) for s in window for micro in range(self.passes.accumulation)
            ):
                for draw in draws:
                    yield from self.text.places(draw.caption, pooled=True)

    def place(self, step: int, fetched: list[Batch]) -> list[Batch]:
        """Copy fetched micro-batches to the device asynchronously, and add their modulations."""
        batches = [self._placed(batch) for batch in fetched]
        if self.modulations is None:
            return batches
        rows = self.modulations.of_step(step)  # [micro-batches, b, m]
        return [replace(batch, pooled=own) for batch, own in zip(batches, rows[: len(batches)], strict=True)]

    def trial(self, draws: list[SampleDraw]) -> Batch:
        """Load a micro-batch that takes as much memory as one of the first step, with that step's modulations."""
        batch = self._placed(self._fetched(draws, self.passes.prior.second_pass))
        return batch if self.modulations is None else replace(batch, pooled=self.modulations.of_step(0)[0])

    def one_by_one(self, draws: Sequence[SampleDraw]) -> Iterator[Batch]:
        """Yield a batch of one for each draw, without the base's predictions as targets."""
        if self.modulations is None:
            yield from (replace(self.load([draw]), prior=None) for draw in draws)
            return
        window = self.modulations.modulation.window
        for start in range(0, len(draws), window):
            portion = draws[start : start + window]
            rows = self.modulations.of_draws(portion)  # [n, m]
            for draw, row in zip(portion, rows, strict=True):
                yield replace(self.load([draw]), pooled=row[None], prior=None)

    def load(self, draws: list[SampleDraw]) -> Batch:
        """Load one micro-batch. Draws noise in fp32 on the CPU from its key, so that it is the same on every device."""
        return self._placed(self._fetched(draws))

    def _fetched(self, draws: list[SampleDraw], second: bool = False) -> Batch:
        """Load a micro-batch, or its second pass, into host memory, pinned for CUDA."""
        weight, prior = self._weights(draws, second)
        z_0 = torch.stack([self.latents.load(draw.view) for draw in draws])
        embeddings = [self.text.load(draw.caption) for draw in draws]
        batch = Batch(
            z_0=z_0,
            noise=torch.stack([self._noise(draw, z_0.shape[1:]) for draw in draws]),
            level=torch.tensor([draw.level for draw in draws], dtype=torch.float32),
            prompt_embeds=torch.stack([embeds for embeds, _ in embeddings]),
            pooled=torch.stack([pooled for _, pooled in embeddings]),
            names=tuple(draw.view.picture.name for draw in draws),
            weight=weight,
            prior=prior,
            text=self.text.inputs([draw.caption for draw in draws]),
        )
        # PyTorch's allocator reuses a step's pinned memory in later ones, once the copies to the device are done.
        return batch.map(Tensor.pin_memory) if self.device.type == "cuda" else batch

    def _weights(self, draws: Sequence[SampleDraw], second: bool) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the draws (of their positions if any has a mask): in the loss against their targets, None if
        all are 1, and in the loss against the base's predictions, None if all are 0; [b, 1, h or 1, w or 1] each."""
        weights, masks = torch.tensor([draw.loss_weight for draw in draws]).view(-1, 1, 1, 1), None
        inside: Tensor = torch.ones(())
        if any(draw.view.picture.mask is not None for draw in draws):
            masks = torch.stack(
                torch.broadcast_tensors(*(self.masks.load(draw.view) for draw in draws))
            )  # [b, 1, h, w]
            outside = torch.tensor([self.plan.sources[draw.view.picture.source].unmasked_weight for draw in draws])
            inside = torch.lerp(outside.view(-1, 1, 1, 1), inside, masks)
        learned, kept = self.passes.shares(draws, second)  # [b, 1, 1, 1] each
        if masks is not None:
            kept = kept + learned * self.passes.prior.outside * (1 - masks)
        weight, prior = weights * learned * inside, weights * kept
        return None if bool((weight == 1).all()) else weight, prior if prior.any() else None

    def _placed(self, batch: Batch) -> Batch:
        return batch.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _noise(self, draw: SampleDraw, shape: torch.Size) -> Tensor:
        return torch.from_numpy(self.plan.objective.noise(stream(self.seed, *draw.noise_key), shape))


class Prefetcher:
    """Provides the batches of each step in order, while a thread fetches the next step's.

    Leaving the context always ends the thread. A fetching error is raised at its step. Batches depend only on the step,
    so prefetching does not change them, and only one step's batches are on the device at a time.

    Args:
        batches: loads the batches.
        steps: the run's number of steps.
        on: whether to prefetch; if not, loads batches on demand.
    """

    def __init__(self, batches: BatchLoader, steps: int, on: bool = True):
        self._batches, self._steps = batches, steps
        self._thread = ThreadPoolExecutor(1, "prefetch") if on else None
        self._coming: tuple[int, Future[list[Batch]]] | None = None
        self._remote = batches.remote
        self._ahead: SamplePrefetcher | None = None
        if self._remote:
            self._ahead = SamplePrefetcher(batches.needs, steps, min(cache.local_limit for cache in self._remote))
        self.waited: float | None = None
        """Seconds that the last step waited for its samples; None if the cache is a folder."""

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ahead is not None:
            self._ahead.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def step(self, step: int) -> list[Batch]:
        """Return one step's micro-batches on the device, and start fetching the next step's."""
        if self._ahead is not None:
            self._ahead.at(step)
        fetched = self._fetched(step)
        if self._thread is not None and step + 1 < self._steps:
            self._coming = step + 1, self._thread.submit(self._batches.fetch, step + 1)
        return self._batches.place(step, fetched)

    def _fetched(self, step: int) -> list[Batch]:
        """Fetch one step's micro-batches into host memory."""
        known, self._coming = self._coming, None
        began, before = time.perf_counter(), sum(cache.waited for cache in self._remote)
        if known is not None and known[0] == step:
            fetched = known[1].result()
            waited = time.perf_counter() - began
        else:
            fetched = self._batches.fetch(step)
            waited = sum(cache.waited for cache in self._remote) - before
        self.waited = waited if self._remote else None
        return fetched
