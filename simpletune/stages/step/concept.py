"""A training step from prompts alone: the model draws the latents that it learns on.

A micro-batch draws from noise with the target prompt, at one of the trained strengths, and stops after some steps of
the family's solver at z_t. There the base predicts for the prompts of the direction, and every trained strength gets a
pass towards what follows from that (``data/concept.py``), and another for a preserved prompt. Such a pass is one of an
ordinary step: its z_0 and noise are those that the wanted prediction takes z_t for (``NoisingProcess.split``), so all
that changes a step holds for it, too.

Shapes: b samples, c latent channels, h and w the latents' height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from simpletune.adapters.methods.layers import at_strength
from simpletune.data.concept import Concept
from simpletune.data.concept_plan import ConceptPlan, Drawing
from simpletune.data.samples import PlannedSample
from simpletune.data.storage.cache import Cache
from simpletune.engine.denoiser import Denoiser
from simpletune.engine.memory.copy_stream import copy_to_pinned
from simpletune.models.objectives.objective import Solver
from simpletune.models.shared.buckets import Framing, Size
from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.models.shared.flops import TrainedParameters
from simpletune.stages.modulation_plan import DetachedModulation
from simpletune.stages.sample import Sampler
from simpletune.stages.step.attention import use_attention
from simpletune.stages.step.batch_loader import Batch, BatchLoader, Pass
from simpletune.stages.step.variant import PlainStep, StepVariant, restore_base
from simpletune.system.phases import phase
from simpletune.system.rng import stream


@dataclass(frozen=True, kw_only=True)
class ConceptBatch(Batch):
    """A micro-batch whose latents are still to be drawn: z_0 is zero, the noise is where drawing begins, the levels are
    not known, and the conditioning is the target's."""

    drawing: Drawing
    prompts: Mapping[str, Conditioning]
    """The conditioning of each prompt that the micro-batch learns with, of b rows."""
    drawn: Conditioning
    """What the drawing reads: b rows of the target, or with guidance as many of the unconditional before them."""
    solver: Callable[[], Solver]
    """Builds the solver that draws."""

    def map(self, change: Callable[[Tensor], Tensor]) -> ConceptBatch:
        prompts = {prompt: each.map(change) for prompt, each in self.prompts.items()}
        return replace(cast(ConceptBatch, super().map(change)), prompts=prompts, drawn=self.drawn.map(change))


class ConceptLoader(BatchLoader):
    """Loads micro-batches of a run from prompts alone: prompts and noise. What a modulation plan computes ahead is
    computed by the step, once the drawing has stopped."""

    plan: ConceptPlan

    def places(self, step: int) -> Iterator[tuple[Cache, str]]:
        drawings = (self.plan.drawing(step, micro) for micro in range(len(self.plan.micros(step))))
        found = (prompt for each in drawings for prompt in (each.direction.unconditional, *each.prompts))
        for prompt in dict.fromkeys(found):
            yield from self.text.places(prompt)

    def flops(self, samples: list[PlannedSample], trained: TrainedParameters) -> int:
        drawing, size, rows = self._drawing(samples), samples[0].view.bucket, len(samples)
        guided = 2 if self.plan.concept.drawing_guidance > 1 else 1
        drawn = drawing.steps * self._flops_of(trained, size, guided * rows).forward if drawing.steps else 0
        base = len(drawing.prompts) * self._flops_of(None, size, rows).forward
        return drawn + base + drawing.passes * self._flops_of(trained, size, rows).model

    def _drawing(self, samples: list[PlannedSample]) -> Drawing:
        _, step, micro, _ = samples[0].noise_key
        return self.plan.drawing(int(step), int(micro))

    def _read(self, passes: list[Pass]) -> list[Batch]:
        (each,) = passes
        samples, size = each.samples, each.samples[0].view.bucket
        drawing = self._drawing(samples)
        shape, rows = self.model.autoencoder.shape(*size), len(samples)
        noise = [stream(self.seed, *sample.noise_key).standard_normal(shape, dtype="float32") for sample in samples]
        prompts = {prompt: self._rows([prompt] * rows, size) for prompt in drawing.prompts}
        target, concept = drawing.direction.target, self.plan.concept
        away = [drawing.direction.unconditional] * rows if concept.drawing_guidance > 1 else []
        batch = ConceptBatch(
            z_0=torch.zeros(rows, *shape),
            noise=torch.stack([torch.from_numpy(one) for one in noise]),
            level=torch.zeros(rows),
            conditioning=prompts[target],
            names=tuple(sample.view.image.name for sample in samples),
            drawing=drawing,
            prompts=prompts,
            drawn=self._rows([*away, *[target] * rows], size),
            solver=partial(self.model.solver, self.plan.objective, size, concept.drawing_steps, 0),
        )
        return [batch.map(copy_to_pinned) if self.device.type == "cuda" else batch]

    def _rows(self, prompts: list[str], size: Size) -> Conditioning:
        known = {prompt: self.text.load(prompt) for prompt in dict.fromkeys(prompts)}
        return self._framed(stack([known[prompt] for prompt in prompts]), [Framing.whole(size)] * len(prompts))


class ConceptStep(StepVariant):
    """Draws the latents of each micro-batch, and trains every strength on them.

    Args:
        inner: the step to change.
        plain: the innermost step.
        denoiser: the model with the adapter, not wrapped.
        concept: how to draw.
        modulation: the detached modulation of the denoiser.
    """

    def __init__(
        self,
        inner: StepVariant,
        plain: PlainStep,
        denoiser: Denoiser,
        concept: Concept,
        modulation: DetachedModulation | None = None,
    ):
        super().__init__(inner)
        config = plain.config
        self.plain, self.denoiser, self.concept, self.modulation = plain, denoiser, concept, modulation
        attention = partial(use_attention, config.speed.attention)
        parts = (denoiser, config.model, config.precision, modulation)
        self.sampler = Sampler(*parts, attention=attention, objective=config.objective)

    def passes(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, ConceptBatch)
        direction, kept, process = batch.drawing.direction, batch.drawing.preserved, self.plain.process
        with torch.no_grad():
            with phase("draw"):
                z_t, level = self._draw(batch)
            with phase("base"):
                texts = self._modulated(batch.prompts, level)
                base = self._of_base(z_t, level, texts)
            plus, minus = (base[end] for end in direction.ends)
            wanted = {s: base[direction.start] + s * direction.guidance * (plus - minus) for s in direction.strengths}
            found = [(strength, direction.target, target, direction.weight) for strength, target in wanted.items()]
            if kept is not None:
                factor = direction.weight * direction.preserved_weight
                found += [(strength, kept, base[kept], factor) for strength in wanted]
            pairs = [process.split(z_t, target, level) for _, _, target, _ in found]
        for number, ((strength, prompt, _, weight), (z_0, noise)) in enumerate(zip(found, pairs, strict=True), 1):
            one = Batch(z_0, noise, level, texts[prompt], batch.names, batch.fillers)
            parts = batch.parts * len(wanted) / weight
            # DDP exchanges the gradients in a step's last pass
            alone = nullcontext() if number == len(found) else self.plain.accelerator.no_sync(self.plain.model)
            with at_strength(self.denoiser, strength), alone:
                yield replace(one, parts=parts)

    def _draw(self, batch: ConceptBatch) -> tuple[Tensor, Tensor]:  # [b, c, h, w], [b]
        """Draw z_t; return it with its noise levels."""
        solver, steps = batch.solver(), batch.drawing.steps
        z = solver.start(batch.noise, None)
        self.denoiser.eval()  # without dropout
        try:
            with at_strength(self.denoiser, batch.drawing.strength):
                z = self.sampler.integrate(solver, z, batch.drawn, self.concept.drawing_guidance, steps)
        finally:
            self.denoiser.train()
        return z, solver.levels[steps].expand(len(z)).to(z.device)

    def _modulated(self, prompts: Mapping[str, Conditioning], level: Tensor) -> dict[str, Conditioning]:
        """Add the modulations at the noise levels, if they are planned."""
        if self.modulation is None:
            return dict(prompts)
        pooled = None
        if self.modulation.fact.reads_pooled:
            pooled = torch.cat([each.pooled for each in prompts.values() if each.pooled is not None])
        rows = self.modulation(self.plain.process.time(level).repeat(len(prompts)), pooled)
        return {p: each.modulated(own) for (p, each), own in zip(prompts.items(), rows.split(len(level)), strict=True)}

    def _of_base(self, z_t: Tensor, level: Tensor, prompts: Mapping[str, Conditioning]) -> dict[str, Tensor]:
        """Return what the base predicts for each prompt, one after the other, as the passes that train."""
        config, time = self.plain.config, self.plain.process.time(level)
        with (
            restore_base(config.adapter, self.denoiser),
            config.precision.autocast_on(z_t.device),
            use_attention(config.speed.attention),
        ):
            return {prompt: self.sampler.predict(z_t, time, text) for prompt, text in prompts.items()}
