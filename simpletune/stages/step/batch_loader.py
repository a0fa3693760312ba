"""From a plan's samples to tensors on the device: the passes of a step, their batches, and fetching them ahead.

``Plan.micro_batch`` selects the samples of a micro-batch. ``TrainingPasses.step_passes`` lists what this process
computes of them, ``BatchLoader.fetch`` reads it from the caches, and ``Prefetcher.step`` returns it on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import methodcaller
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from simpletune.adapters.text.inputs import TextInputs
from simpletune.config.prior import NoPrior, PriorOption
from simpletune.data.plan import Plan
from simpletune.data.samples import PlannedSample
from simpletune.data.storage.cache import Cache, crop_key
from simpletune.engine.memory.copy_stream import copy_to_pinned
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.models.shared.flops import Flops, TrainedParameters
from simpletune.stages.modulation_plan import DetachedModulation, ModulationPlan
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.system.rng import stream

if TYPE_CHECKING:
    from simpletune.data.storage.shard_cache import SamplePrefetcher

NO_PRIOR, WHOLE = NoPrior(), RankMicroBatches()


class Pass(NamedTuple):
    """One forward and backward pass of a step."""

    samples: list[PlannedSample]
    second: bool = False
    """Whether it is the second pass of its micro-batch."""
    number: int = 0
    """Its number among all processes' passes of the step."""


class TrainingPasses:
    """Selects the passes of one process: a plan's micro-batches, each again with the class prompt for a second pass.

    A second pass follows its micro-batch with the same crops, noise and noise levels, and another prompt. So a step's
    random numbers do not depend on it.

    Args:
        plan: the run's plan.
        prior: how the class is preserved.
        share: which micro-batches of a step the process computes.
    """

    def __init__(self, plan: Plan, prior: PriorOption = NO_PRIOR, share: RankMicroBatches = WHOLE):
        self.plan = plan
        self.prior = prior
        self.share = share
        self.batch_size = plan.batch_size
        self._each = 2 if prior.second_pass else 1  # passes of a micro-batch
        self.accumulation = -(-plan.accumulation // share.processes) * self._each
        """The largest number of passes in a step."""
        self.places = lru_cache(maxsize=128)(self._places)

    def _places(self, step: int) -> list[int]:
        """Return the micro-batches of a step that this process computes, in their order; if there is none, one made of
        fillers, because the processes exchange gradients."""
        if self.share.processes == 1 and not self.share.exact:
            return list(range(len(self.plan.micros(step))))
        areas = self.plan.areas(step)
        return self.share.select(areas) or [len(areas)]

    def step_passes(self, step: int) -> Iterator[list[Pass]]:
        """Yield the passes of each micro-batch that this process computes in a step, in order."""
        for place in self.places(step):
            samples, number = self.plan.micro_batch(step, place), place * self._each
            second = [Pass(self._with_class(samples), True, number + 1)] if self._each == 2 else []
            yield [Pass(samples, False, number), *second]

    def micro_batches(self, step: int) -> list[list[PlannedSample]]:
        """Return the samples of this process's micro-batches in a step, each once."""
        return [self.plan.micro_batch(step, place) for place in self.places(step)]

    def micro_batch(self, step: int, number: int) -> list[PlannedSample]:
        """Return the samples of this process's pass of some number; beyond its last one, fillers."""
        places, (own, second) = self.places(step), divmod(number, self._each)
        samples = self.plan.micro_batch(step, places[own] if own < len(places) else len(self.plan.micros(step)))
        return self._with_class(samples) if second else samples

    def _with_class(self, samples: list[PlannedSample]) -> list[PlannedSample]:
        return [replace(sample, caption=self.prior.class_prompt(sample.caption)) for sample in samples]


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device, in fp32 except for the text."""

    z_0: Tensor  # [b, c, h, w]
    noise: Tensor  # [b, c, h, w]
    level: Tensor  # [b]
    conditioning: Conditioning
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
    inpainting: Tensor | None = None  # [b, 1 + c, h, w]
    """The holes, 1 inside, and the latents of the masked pictures; None: the model does not inpaint."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor of the batch."""
        z_0, noise, level = map(change, (self.z_0, self.noise, self.level))
        conditioning = self.conditioning.map(change)
        optional = (self.weight, self.prior, self.inpainting)
        weight, prior, inpainting = (None if each is None else change(each) for each in optional)
        moved = replace(self, z_0=z_0, noise=noise, level=level, conditioning=conditioning)
        text = None if self.text is None else self.text.map(change)
        return replace(moved, weight=weight, prior=prior, inpainting=inpainting, text=text)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the batch."""
        found: list[Tensor] = []

        def see(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(see)
        return found

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """Put other tensors in place of those that ``tensors`` returns, in their order."""
        others = iter(tensors)
        return self.map(lambda _: next(others))

    def kind(self) -> Hashable:
        """Return what a pass of the batch depends on besides the values of its tensors."""
        optional = [each is None for each in (self.weight, self.prior, self.inpainting, self.text)]
        shapes = [(tensor.shape, tensor.dtype) for tensor in self.tensors()]
        return self.fillers, self.parts, *optional, *self.conditioning.tensors(), *shapes

    def with_modulations(self, rows: Tensor) -> Batch:
        """Add a modulation plan's rows [b, m]."""
        return replace(self, conditioning=self.conditioning.modulated(rows))


class BatchLoader:
    """Loads micro-batches.

    Args:
        prepared: the run's plan and caches.
        seed: ``train.seed``.
        device: the target device.
        modulation: the detached modulation of the denoiser; batches then carry modulations computed ahead.
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
        # which samples
        self.seed = seed
        self.plan = prepared.plan
        self.share = share
        self.passes = TrainingPasses(prepared.plan, prior, share)

        # from where
        self.text = prepared.text
        self.latents = prepared.latents
        self.model = prepared.latents.model
        self._framed = self.model.text.framed
        self.remote = prepared.remote

        # to where, with what
        self.device = device
        self._to_device = methodcaller("to", device, non_blocking=True)
        self.modulations: ModulationPlan | None = None
        if modulation is not None:
            time = self.plan.objective.process(self.model.files.scheduler_config, self.model.flow).time
            self.modulations = ModulationPlan(modulation, self.passes, time, self.text.pooled, apart=share.exact)
        self._named: range | None = None  # the last window that ``needs`` has listed
        self._flops: dict[tuple[bool, Size, int], Flops] = {}

    def step(self, step: int) -> list[Batch]:
        """Load one step's micro-batches."""
        return self.place(step, self.fetch(step))

    def fetch(self, step: int) -> list[Batch]:
        """Load one step's passes into host memory, pinned for CUDA, without their modulations.

        A batch's mean loss divided by its ``parts``, and summed over the batches, is this process's share of the step's
        loss, the mean over its samples in all processes. The processes' gradients are averaged, or, with an exact
        share, added.
        """
        samples = sum(map(len, self.plan.micros(step))) / (1 if self.share.exact else self.share.processes)
        found = []
        for passes in self.passes.step_passes(step):
            for each, batch in zip(passes, self._read(passes), strict=True):
                real = sum(sample.weight for sample in each.samples)
                parts, key = samples / real if real else math.inf, (self.seed, "step", step, each.number)
                found.append(replace(batch, fillers=len(each.samples) - real, parts=parts, key=key))
        return found

    def needs(self, step: int) -> Iterator[tuple[Cache, str]]:
        """Return what a step reads from the caches, as pairs of a cache and a key; with a modulation plan also its
        window's prompts, unless an earlier call returned them."""
        found = dict.fromkeys(self.places(step))
        window = None if self.modulations is None else self.modulations.window_prompts_steps(step)
        if window is not None and window != self._named:
            self._named, samples = window, []
            for later, number in product(window, range(self.passes.accumulation)):
                samples += self.passes.micro_batch(later, number)
            for prompt in dict.fromkeys(sample.caption for sample in samples):
                found |= dict.fromkeys(self.text.places(prompt))
        yield from found

    def places(self, step: int) -> Iterator[tuple[Cache, str]]:
        """Return what the passes of a step read from the caches."""
        samples = [sample for passes in self.passes.step_passes(step) for each in passes for sample in each.samples]
        views = dict.fromkeys(crop for sample in samples for crop in sample.view.cached)
        yield from dict.fromkeys((self.latents.cache, crop_key(crop)) for crop in views)
        for prompt in dict.fromkeys(sample.caption for sample in samples):
            yield from self.text.places(prompt)

    def place(self, step: int, fetched: list[Batch]) -> list[Batch]:
        """Copy fetched micro-batches to the device asynchronously, and add their modulations."""
        batches = [batch.map(self._to_device) for batch in fetched]
        if self.modulations is None:
            return batches
        rows = self.modulations.step_modulations(step)  # [micro-batches, b, m]
        return [batch.with_modulations(own) for batch, own in zip(batches, rows[: len(batches)], strict=True)]

    def trial(self, samples: list[PlannedSample]) -> Batch:
        """Load a micro-batch that takes as much memory as one of the first step, with that step's modulations."""
        (fetched,) = self._read([Pass(samples, self.passes.prior.second_pass)])
        batch = fetched.map(self._to_device)
        return batch if self.modulations is None else batch.with_modulations(self.modulations.step_modulations(0)[0])

    def flops(self, samples: list[PlannedSample], trained: TrainedParameters) -> int:
        """Count the operations of a micro-batch, without recomputation; ``trained``: the run's parameters."""
        return self._flops_of(trained, samples[0].view.bucket, len(samples)).model

    def _flops_of(self, trained: TrainedParameters | None, size: Size, rows: int) -> Flops:
        """Count the operations of one pass, once for each shape; None: of the base."""
        key = trained is None, size, rows
        if key not in self._flops:
            self._flops[key] = self.model.flops(trained or TrainedParameters(), size, rows)
        return self._flops[key]

    def single_batches(self, samples: Sequence[PlannedSample]) -> Iterator[Batch]:
        """Yield a batch of one for each sample, without the base's predictions as targets."""
        if self.modulations is None:
            yield from (replace(self.load([sample]), prior=None) for sample in samples)
            return
        window = self.modulations.modulation.window
        for start in range(0, len(samples), window):
            portion = samples[start : start + window]
            rows = self.modulations.modulations_of(portion)  # [n, m]
            for sample, row in zip(portion, rows, strict=True):
                yield replace(self.load([sample]).with_modulations(row[None]), prior=None)

    def load(self, samples: list[PlannedSample]) -> Batch:
        """Load one micro-batch."""
        return self._read([Pass(samples)])[0].map(self._to_device)

    def _read(self, passes: list[Pass]) -> list[Batch]:
        """Read the passes of one micro-batch into host memory, pinned for CUDA: each picture's latents with its mask
        once, and each distinct prompt once."""
        samples = passes[0].samples
        images = {view: self.latents.load(view) for view in dict.fromkeys(sample.view for sample in samples)}
        captions = dict.fromkeys(sample.caption for each in passes for sample in each.samples)
        prompts = {caption: self.text.load(caption) for caption in captions}
        z_0 = torch.stack([images[sample.view].z_0 for sample in samples])
        framings = [framing for sample in samples if (framing := images[sample.view].framing) is not None]
        # Noise is drawn in fp32 on the CPU from its key, so that it is the same on every device.
        objective, shape = self.plan.objective, z_0.shape[1:]
        noise = [torch.from_numpy(objective.noise(stream(self.seed, *sample.noise_key), shape)) for sample in samples]
        first = Batch(
            z_0=z_0,
            noise=torch.stack(noise),
            level=torch.tensor([sample.level for sample in samples], dtype=torch.float32),
            conditioning=Conditioning(torch.empty(0)),
            names=tuple(sample.view.image.name for sample in samples),
        )
        holes = None
        painted = [read for sample in samples if (read := images[sample.view].inpainting) is not None]
        if painted:  # of all samples, or of none
            first = replace(first, inpainting=torch.stack(painted))
            holes = torch.stack([read[:1] for read in painted])  # [b, 1, h, w]
        masks = None
        if any(sample.view.image.mask is not None for sample in samples):
            masks = torch.stack(
                torch.broadcast_tensors(*(images[sample.view].mask for sample in samples))
            )  # [b, 1, h, w]
        found = []
        for each in passes:
            own = [sample.caption for sample in each.samples]
            weight, prior = self._weights(each, masks, holes)
            batch = replace(
                first,
                conditioning=self._framed(stack([prompts[caption] for caption in own]), framings),
                weight=weight,
                prior=prior,
                text=self.text.inputs(own),
            )
            # PyTorch's allocator reuses a step's pinned memory in later ones, once the copies to the device are done.
            found.append(batch.map(copy_to_pinned) if self.device.type == "cuda" else batch)
        return found

    def _weights(self, each: Pass, masks: Tensor | None, holes: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of a pass's samples (of their positions if any has a mask, or counts in its hole alone):
        in the loss against their targets, None if all are 1, and in the loss against the base's predictions, None if
        all are 0; [b, 1, h or 1, w or 1] each.

        The base's predictions are the targets of a second pass and of regularization sources. A second pass skips the
        latter, which have already had their prompt.
        """
        prior, sources = self.passes.prior, [self.plan.sources[sample.view.image.source] for sample in each.samples]

        def column(values: Sequence[float]) -> Tensor:  # [b, 1, 1, 1]
            return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)

        predicted = [prior.predicts and source.regularization != each.second for source in sources]
        learned = column([float(not each.second and not one) for one in predicted])
        factor, outside_masks = prior.prediction_weights
        kept = column([factor * one for one in predicted])
        weights, inside = column([sample.loss_weight for sample in each.samples]), torch.ones(())
        if masks is not None:
            inside = torch.lerp(column([source.unmasked_weight for source in sources]), inside, masks)
            kept = kept + learned * outside_masks * (1 - masks)
        if holes is not None and any(source.inpainting_loss == "inside" for source in sources):
            everywhere = column([float(source.inpainting_loss == "everywhere") for source in sources])
            inside = inside * torch.maximum(everywhere, holes)
        weight, base = weights * learned * inside, weights * kept
        return None if bool((weight == 1).all()) else weight, base if base.any() else None


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
            from simpletune.data.storage.shard_cache import SamplePrefetcher

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
        known, self._coming = self._coming, None
        began, before = time.perf_counter(), sum(cache.waited for cache in self._remote)
        if known is not None and known[0] == step:
            fetched = known[1].result()
            waited = time.perf_counter() - began
        else:
            fetched = self._batches.fetch(step)
            waited = sum(cache.waited for cache in self._remote) - before
        self.waited = waited if self._remote else None
        if self._thread is not None and step + 1 < self._steps:
            self._coming = step + 1, self._thread.submit(self._batches.fetch, step + 1)
        return self._batches.place(step, fetched)
