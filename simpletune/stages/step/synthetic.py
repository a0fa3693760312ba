"""Batches without data, and an accelerator for one process, to run training steps in simulations and benchmarks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from simpletune.config.batches import mixes_lengths
from simpletune.config.schema import TrainConfig
from simpletune.data.concept import Concept, Direction
from simpletune.data.concept_plan import Drawing
from simpletune.data.samples import Crop, PlannedSample
from simpletune.data.sources.source import SourceImage
from simpletune.models.objectives.flow import Euler
from simpletune.models.shared.buckets import Framing, Size
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.flops import TrainedParameters
from simpletune.stages.modulation_plan import ModulationPlan
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.concept import ConceptBatch
from simpletune.stages.step.train_step import TrainStep
from simpletune.stages.text_side import empty_text_inputs

CPU = torch.device("cpu")
DRAWN = 3  # steps of a drawing: by the third, everything that earlier steps leave behind is allocated
PASS = ("noise", "forward", "loss", "backward", "recompute")  # phases of a pass that trains
SAMPLE = PlannedSample(Crop(SourceImage("", "", (64, 64), "", bytes), (64, 64), (0.5, 0.5), False), "", 0.5, ())


class SyntheticBatches:
    """Micro-batches of constants, with the shapes and types of real ones.

    Args:
        config: the run's configuration.
        core: the assembled step core.
        size: (width, height) in pixels; None uses the square of ``data.resolution``.
        device: the target device.
    """

    def __init__(self, config: TrainConfig, core: TrainStep, size: Size | None = None, device: torch.device = CPU):
        self.core, self.config, self.device = core, config, device
        self.size = size or (config.resolution, config.resolution)
        self.text = config.precision.encoder_dtype()
        passes = 2 if config.prior.second_pass else 1
        self.batch_size, self.accumulation = config.train.micro_batch, config.train.accumulation * passes
        self.modulations: ModulationPlan | None = None
        self.sample = SAMPLE
        if core.modulation is not None and core.modulation.levels:
            self.sample = replace(SAMPLE, level=core.modulation.levels[0])
        if core.modulation is not None and config.concept is None:  # there the step computes them
            width = config.model.text.pooled_width
            self.modulations = ModulationPlan(
                core.modulation,
                self,
                core.process.time,
                lambda caption: torch.zeros(width, dtype=self.text) if width else None,
                apart=config.train.reduce == "exact",
            )

    def step(self, step: int) -> list[Batch]:
        """Make the micro-batches of one step."""
        batches = [replace(self.batch(), parts=self.accumulation) for _ in range(self.accumulation)]
        if self.config.prior.predicts:  # the base's predictions are targets, too; masks weight positions
            one = batches[0].level.view(-1, 1, 1, 1) if batches[0].weight is None else batches[0].weight
            batches = [replace(batch, prior=torch.ones_like(one)) for batch in batches]
        if self.modulations is None:
            return batches
        rows = self.modulations.step_modulations(step)
        return [batch.with_modulations(own) for batch, own in zip(batches, rows, strict=True)]

    def micro_batch(self, step: int, micro: int) -> list[PlannedSample]:
        """Return samples with placeholder captions and pictures, for the modulation plan."""
        return [self.sample] * self.batch_size

    def single_batch(self) -> Batch:
        """Make a batch of one, like those of an evaluation."""
        batch = self.batch(1)
        return (
            batch
            if self.modulations is None
            else batch.with_modulations(self.modulations.modulations_of([self.sample]))
        )

    def batch(self, size: int | None = None) -> Batch:
        """Make one micro-batch.

        Args:
            size: the number of samples; None uses the run's batch size.
        """
        b, (width, height) = size or self.batch_size, self.size
        model, sources, weight, concept = self.config.model, self.config.sources, None, self.config.concept
        latents = (b, *model.autoencoder.shape(width, height))
        text = model.text.framed(model.text.blank(self.text, b), [Framing.whole(self.size)] * b)
        drawn = text.map(lambda tensor: tensor.to(self.device))  # with guidance, of two prompts
        if not mixes_lengths(self.config):
            text = replace(text, mask=None)
        if any(source.weighs_places for source in sources):
            weight = torch.ones((b, 1, *latents[2:]), device=self.device)
        elif any(source.weight != 1 for source in sources):
            weight = torch.ones((b, 1, 1, 1), device=self.device)
        made = Batch(
            z_0=torch.zeros(latents, device=self.device),
            noise=torch.zeros(latents, device=self.device),
            level=torch.full((b,), 0.5, device=self.device),
            conditioning=text.map(lambda tensor: tensor.to(self.device)),
            names=tuple(str(number) for number in range(b)),
            weight=weight,
            text=empty_text_inputs(self.config, b, self.device),
            inpainting=torch.zeros(b, 1 + latents[1], *latents[2:], device=self.device) if model.inpaints else None,
        )
        return made if concept is None else self._to_draw(made, concept, drawn)

    def frequencies(self) -> dict[str, float]:
        """Return how many times an average step of the run does what the synthetic one does, by phase, if not once: a
        drawing stops anywhere, directions differ in their passes, and sides in the operations of a pass."""
        concept = self.config.concept
        if concept is None:
            return {}
        own, every = self._drawing(concept), [_drawing_of(each) for each in concept.directions]
        found = {
            "draw": (concept.drawing_steps - 1) / 2 / own.steps,
            "base": sum(len(each.prompts) for each in every) / len(every) / len(own.prompts),
        }
        found |= dict.fromkeys(PASS, sum(each.passes for each in every) / len(every) / own.passes)
        sides, model, share = concept.resolutions, self.config.model, 1.0
        if len(sides) > 1:
            with _disable_current_modes():  # its tensors are not fake, and hidden from the accounting
                operations = {side: model.flops(TrainedParameters(), (side, side), 1).forward for side in sides}
            share = sum(operations.values()) / len(sides) / operations[max(sides)]
        return {phase: share * often for phase, often in found.items()}

    def _drawing(self, concept: Concept) -> Drawing:
        """Make a drawing of the direction with the most passes, of as many steps as determine its memory."""
        window = 0 if self.core.modulation is None else self.core.modulation.window
        most = max(map(_drawing_of, concept.directions), key=lambda each: (each.passes, len(each.prompts)))
        return most._replace(steps=min(max(DRAWN, window), concept.drawing_steps - 1))

    def _to_draw(self, batch: Batch, concept: Concept, drawn: Conditioning) -> ConceptBatch:
        """Make a micro-batch that is drawn."""
        drawing = self._drawing(concept)
        prompts = {prompt: batch.conditioning.map(torch.clone) for prompt in drawing.prompts}
        if concept.drawing_guidance > 1:
            drawn = drawn.map(lambda tensor: tensor.repeat(2, *[1] * (tensor.dim() - 1)))
        else:
            drawn = batch.conditioning.map(torch.clone)
        given = {each.name: getattr(batch, each.name) for each in fields(Batch)}
        flow, steps = self.config.model.flow, concept.drawing_steps
        # a real solver keeps at most two more latents
        return ConceptBatch(
            **given, drawing=drawing, prompts=prompts, drawn=drawn, solver=lambda: Euler(torch.zeros(steps + 1), flow)
        )


def _drawing_of(direction: Direction) -> Drawing:
    return Drawing(direction, 0, direction.strengths[0], direction.preserved[0] if direction.preserved else None)


class SingleProcess:
    """The parts of accelerate's Accelerator that a step core uses, for one process that exchanges nothing.

    accelerate's own class fixes the device for the rest of the process, including later training.

    Args:
        device: the device of the step.
        processes: the simulated number of processes, of which this is the first.
    """

    def __init__(self, device: torch.device, processes: int = 1):
        self.device, self.num_processes = device, processes

    def prepare_model(self, model: nn.Module, device_placement: bool = False) -> nn.Module:
        """Return the model unchanged."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return an empty context: there is nothing to synchronise."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""
        loss.backward()
