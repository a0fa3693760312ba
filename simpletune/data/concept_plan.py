"""The plan of a run from prompts alone.

There is no picture: a sample is a direction at a size, which each row of a micro-batch draws from noise of its own. An
epoch has one micro-batch for each direction at each of the resolutions, in an order drawn anew. How far a step's
drawings go is the same in all its micro-batches, so that no process waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import numpy as np

from simpletune.data.concept import Concept, Direction
from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import Crop, PlannedSample, Sample
from simpletune.data.sources.source import SourceImage
from simpletune.models.objectives import Objective
from simpletune.system.options import Json
from simpletune.system.rng import stream


@dataclass(frozen=True)
class Canvas(Crop):
    """The size of a drawing. No cache has anything of it."""

    @property
    def cached(self) -> tuple[Crop, ...]:
        return ()


class Drawing(NamedTuple):
    """What a micro-batch draws, and learns there."""

    direction: Direction
    steps: int
    """Sampling steps after which the drawing stops, fewer than ``concept.drawing_steps``."""
    strength: float
    """The adapter's strength while it draws: one of those that are trained."""
    preserved: str | None
    """The preserved prompt to learn, too."""

    @property
    def prompts(self) -> list[str]:
        """The distinct prompts to predict for where the drawing stops."""
        kept = [] if self.preserved is None else [self.preserved]
        return list(dict.fromkeys([self.direction.target, *self.direction.ends, self.direction.start, *kept]))

    @property
    def passes(self) -> int:
        """The number of passes with gradients."""
        return len(self.direction.strengths) * (1 if self.preserved is None else 2)


class ConceptPlan(Plan):
    """Selects direction, size and drawing of each micro-batch of a run.

    Args:
        concept: the directions.
        objective: that of the run.
        seed: ``train.seed``.
        batch: the batch sizes of a step.
    """

    def __init__(self, concept: Concept, objective: Objective, seed: int, batch: GlobalBatch):
        self.concept = concept
        samples = [
            Sample(_blank(concept, number, side), (side, side), repeat)
            for side in concept.resolutions
            for number in range(len(concept.directions))
            for repeat in range(batch.batch_size)
        ]
        super().__init__(samples, concept, objective, seed, batch)

    def with_batch(self, batch: GlobalBatch) -> ConceptPlan:
        return ConceptPlan(self.concept, self.objective, self.seed, batch)

    def drawing(self, step: int, micro: int) -> Drawing:
        """Return what a micro-batch of a step draws."""
        directions = self.concept.directions
        direction = directions[int(self._rows(step)[micro][0]) // self.batch_size % len(directions)]
        steps = int(stream(self.seed, "drawn-steps", step).integers(self.concept.drawing_steps))
        draw = stream(self.seed, "drawing", step, micro)
        strength = direction.strengths[draw.integers(len(direction.strengths))]
        kept = direction.preserved
        return Drawing(direction, steps, strength, kept[draw.integers(len(kept))] if kept else None)

    def _order_of_epoch(self, number: int) -> np.ndarray:
        rows = np.arange(len(self.samples)).reshape(-1, self.batch_size)
        return rows[stream(self.seed, "pass-order", number).permutation(len(rows))]

    def _draw(
        self, sample: Sample, epoch: int, key: tuple[int, int, int], together: int | None = None
    ) -> PlannedSample:
        canvas = Canvas(sample.image, sample.bucket, (0.5, 0.5), False)
        # The level is that of the solver's step at which the drawing stops; the solver knows it.
        return PlannedSample(canvas, sample.image.caption, nan, ("drawing-noise", *key))

    def prompt(self, sample: Sample, variant: int) -> str:
        return sample.image.caption

    def views(self) -> list[Crop]:
        return []

    def captions(self) -> list[str]:
        return self.concept.prompts

    def images(self) -> int:
        return 0

    def example(self) -> str:
        """Return the first direction's target."""
        return self.concept.directions[0].target

    def evaluation(self, count: int) -> list[PlannedSample]:
        """Return no samples: there is nothing to evaluate on."""
        return []

    def manifest(self) -> list[Json]:
        """Return a line for each sample; its hash is of all that it depends on beside size and seed."""
        return [self._row(sample) for sample in self.samples]

    def _row(self, sample: Sample) -> Json:
        return {
            "file": sample.image.name,
            "sha256": sample.image.digest,
            "caption": sample.image.caption,
            "bucket": list(sample.bucket),
            "repeat": sample.repeat,
        }


def _blank(concept: Concept, number: int, side: int) -> SourceImage:
    """Describe a direction at a size as if it were a picture."""
    direction = concept.directions[number]
    name = f"direction {number + 1} at {side} px"
    return SourceImage(name, direction.target, (side, side), concept.digest(direction), bytes)
