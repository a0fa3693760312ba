"""The prepare stage of a stream: read and encode the rows that the run uses, one portion after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import MOST
from simpletune.data.samples import Crop, Sample
from simpletune.data.sources.source import RejectedEntry, UnusableImage
from simpletune.stages.plan_data import report_rejected
from simpletune.stages.prepared import (
    Caches,
    PreparedData,
    prompts_outside_data,
    require_inputs,
    validation_requests,
    with_class,
    with_inputs,
)
from simpletune.stages.stream_plan import FIRST, StreamPlan
from simpletune.stages.stream_samples import StreamedSamples
from simpletune.system.options import plural

PORTION = 2**14  # samples whose prompts are encoded together; each portion loads every text encoder once


def encode_stream(config: TrainConfig, plan: StreamPlan, caches: Caches, start: int = 0) -> PreparedData:
    """Fill the caches with the rows of a stream that the run uses. Takes as much memory for a thousand rows as for a
    million.

    Args:
        config: the configuration, with folders resolved.
        plan: the run's plan.
        caches: those of the run.
        start: steps that are done.

    Raises:
        UserError: a shard is damaged, or rows cannot be used and ``data.on_error`` is ``stop``, or none are left.
    """
    steps, asked = config.steps(plan.steps_per_epoch), config.validation.loss_samples
    if config.validation.images is not None:
        require_inputs(validation_requests(config, plan), config.model.autoencoder.downsampling)
    filling = StreamEncoder(config, plan, caches)
    filling.steps(start, steps)
    painted = len(config.validation.prompts or [""]) if config.model.inpaints else 0
    filling.evaluation(max(MOST if asked == "auto" else asked, painted))
    requests = validation_requests(config, filling.plan)
    caches.fill_text(prompts_outside_data(config, requests))
    modulation = config.model.architecture.modulation
    if modulation is not None and modulation.reads_pooled and config.memory.modulation != "resident":
        # modulations are computed for whole windows of steps
        window = config.memory.modulation_window
        filling.steps(start - start % window, steps + -steps % window, images=False)
    requests = with_inputs(config, filling.plan, requests)
    captions = plan.samples.source.captions_from
    return PreparedData(filling.plan, caches.text, caches.latents, requests, captions, filling.rejected, filling.notes)


class StreamEncoder:
    """Encodes rows, and removes unusable ones from the plan.

    Args:
        config: the configuration, with folders resolved.
        plan: the run's plan.
        caches: those of the run.
    """

    def __init__(self, config: TrainConfig, plan: StreamPlan, caches: Caches):
        self.config, self.plan, self.caches = config, plan, caches
        self.rejected: list[RejectedEntry] = []
        self.notes: list[str] = []
        self._noted = False
        self._variants = plan.samples.source.variants

    def steps(self, start: int, steps: int, images: bool = True) -> None:
        """Encode the samples that some steps train on, or only their prompts."""
        self._encode_until_all(lambda: self.plan.used_variants(start, steps), False, images)

    def evaluation(self, count: int) -> None:
        """Encode what an evaluation of ``count`` samples sees: held-out rows, or the first of the run."""
        if len(self.plan.held_out_rows):
            self._encode_until_all(lambda: self.plan.usable_held_out()[:count] * self._variants, True)
        # always the first one, which gives the validation prompt and is listed in the manifest
        self._encode_until_all(
            lambda: self.plan.first_places(1 if len(self.plan.held_out_rows) else max(1, count)) * self._variants, False
        )

    def _encode_until_all(self, wanted: Callable[[], np.ndarray], held_out: bool, images: bool = True) -> None:
        """Encode samples, and the replacements of unusable ones, until none is missing; ``wanted`` returns
        place * variants + variant of each, by the current plan."""
        done = np.empty(0, np.int64)
        while len(todo := np.setdiff1d(wanted(), done)):
            for first in range(0, len(todo), PORTION):
                self._portion(todo[first : first + PORTION], held_out, images)
            done = np.union1d(done, todo)

    def _portion(self, codes: np.ndarray, held_out: bool, images: bool) -> None:
        """Encode samples whose prompts fit into memory together."""
        samples, plan = self.plan.held_out_rows if held_out else self.plan.samples, self.plan
        found, rejected = self._make_samples(samples, codes)
        prompts = [plan.prompt(sample, variant) for sample, _, variant in found]
        dropped = [""] if samples.source.caption_dropout else []
        self.caches.fill_text([*with_class(self.config, prompts), *with_class(self.config, dropped)])
        if images and not (held_out or self._noted):
            self._noted = True
            first = prompts[:FIRST]
            if too_long := self.caches.text.truncated_prompts(first):
                of = f"{len(too_long):,} of the first {plural(len(first), 'caption')}"
                self.notes.append(f"{of} are {self.caches.text.describe_truncation()}")
        if images:
            parts: dict[int, list[Crop]] = {}
            places = np.array([place for _, place, _ in found], dtype=np.int64)
            for (sample, _, variant), part in zip(found, samples.parts(places).tolist(), strict=True):
                parts.setdefault(part, []).append(plan.view(sample, variant))
            rejected += self.caches.fill_images(list(parts.values()))
        report_rejected(rejected, self.config.pictures)
        if rejected:
            self.rejected += rejected
            by_name = {samples.name(place): place for place in np.unique(codes // self._variants).tolist()}
            gone = [by_name[each.name] for each in rejected]
            self.plan = plan.without([], gone) if held_out else plan.without(gone, [])

    def _make_samples(
        self, samples: StreamedSamples, codes: np.ndarray
    ) -> tuple[list[tuple[Sample, int, int]], list[RejectedEntry]]:
        """Make samples of rows, with their places and variants, and list those with unusable captions."""
        found, rejected = list[tuple[Sample, int, int]](), dict[int, RejectedEntry]()
        for place, variant in zip(*(part.tolist() for part in divmod(codes, self._variants)), strict=True):
            try:
                found.append((samples[place], place, variant))
            except UnusableImage as reason:
                rejected[place] = RejectedEntry(samples.name(place), str(reason))
        return found, list(rejected.values())
