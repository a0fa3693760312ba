"""Predict the seconds of a published row's job on its card, from the card's stated figures alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from benchmarks.published import IMAGES, RATE, STEP, Row
from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.modulation import settle_modulation
from simpletune.config.prior import ClassImages
from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import fake_tensors
from simpletune.estimate.job_time import range_ends, section_seconds
from simpletune.estimate.simulate.reports import SIMULATED
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.simulate.simulate_stages import (
    Recorders,
    simulate_class_images,
    simulate_encoding,
    text_snapshots,
)
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.sections import StreamWork
from simpletune.estimate.timing.speeds import ITEM, Speeds
from simpletune.estimate.timing.timeline import StepSeconds, step_seconds
from simpletune.models.text.encoder import BATCH
from simpletune.stages.load import empty_autoencoder
from simpletune.system.console import silence
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json
from simpletune.system.startup import pause_collection

# Its data sheet: 756 TFLOP/s in bf16, 51 in fp32, 2 TB/s, 114 multiprocessors.
H100_PCIE = find_card("H100-PCIe")
TOGETHER, CARDS = 4, 8  # pictures served in one batch; cards of a machine that trains from scratch
Timed = Callable[[Speeds], Json]
"""A recorded job, whose figures follow from speeds."""


def card_named(name: str) -> Card:
    """A card of the table, or the one that only the published rows need."""
    return H100_PCIE if name == H100_PCIE.name else find_card(name)


def config_of(file: Path, overrides: tuple[str, ...], card: Card) -> TrainConfig:
    """Configure a job on a card, without evaluation and pictures."""
    settings = [*overrides, "validation.prompts=[]", "validation.loss_samples=0"]
    with silence():
        config = resolve_model_folder(read_config(file, settings, needs_data=False)[0])
        return settle_modulation(settle_compute(config, card.capability), on_host=False)


def predicted(row: Row) -> Json:
    """Predict a row in its unit, and what its step consists of.

    Returns:
        ``predicted``, its ``range``, ``step`` (of training or of drawing) and ``inside`` (what the source encodes in
        every step) in seconds, and what bounds the step.
    """
    card = card_named(row.card)
    config = config_of(row.config, row.overrides, card)
    if row.unit == IMAGES:
        timed = images(config, card, row.stores_scores)
    else:
        with diffusers_blocks():
            timed = training(config, card, row.unit, row.inside)
    return with_range(timed, card, "predicted")


def with_range(timed: Timed, card: Card, name: str) -> Json:
    """What a card's stated speeds predict, and the ``range`` of one of its figures."""
    speeds = DatasheetSpeeds(card)
    return {**timed(speeds), "range": sorted(timed(end)[name] for end in range_ends(speeds))}


def training(config: TrainConfig, card: Card, unit: str = STEP, inside: bool = False) -> Timed:
    """Record a step of training and what its source encodes in it, for any speeds of the card."""
    several, samples = config.train.accumulation, config.train.micro_batch * config.train.accumulation
    steps = record_step(config, card)
    encoded = record_encoding(config) if inside else None

    def timed(speeds: Speeds) -> Json:
        step, seconds = of_step(steps, several, speeds)
        encoding = samples * encoded(speeds) if encoded else 0.0
        whole = seconds + encoding
        predicted = {STEP: whole, RATE: CARDS * samples / whole}[unit]
        return {"step": seconds, "inside": encoding, "bound": step.bound, "predicted": predicted}

    return timed


@contextmanager
def diffusers_blocks() -> Iterator[None]:
    """Use diffusers' blocks of SD3, which the published rows ran; ours move a third fewer bytes."""
    with mock.patch("simpletune.models.sd3.joint_block.use_joint_blocks"):
        yield


def record_step(config: TrainConfig, card: Card) -> list[Sequence[StreamWork]]:
    """Record steps of one micro-batch, and of two where the step has several."""
    found = []
    for count in range(1, min(config.train.accumulation, 2) + 1):
        train = config.train.model_copy(update={"gradient_accumulation": count})
        found.append(simulate(config.model_copy(update={"train": train}), capability=card.capability).sections)
    return found


def of_step(recorded: Sequence[Sequence[StreamWork]], several: int, speeds: Speeds) -> tuple[StepSeconds, float]:
    """Extrapolate from a recorded step to one of several micro-batches: each further one takes as long."""
    found = [step_seconds(sections, speeds) for sections in recorded]
    each = found[-1].seconds - found[0].seconds
    return found[-1], found[-1].seconds + (several - len(found)) * each


def record_encoding(config: TrainConfig) -> Callable[[Speeds], float]:
    """Record the encoding of one picture and its prompt, whose seconds follow from speeds."""
    side, recorders = config.resolution, Recorders(partial(Recorder, cuda=True))
    with fake_tensors(), pause_collection(), silence():
        simulate_encoding(config.model, empty_autoencoder(config), (side, side), recorders)
        list(text_snapshots(config, recorders))
    image = recorders.pop("latents").sections
    prompts = [each.sections for each in recorders.values()]
    return lambda speeds: (
        section_seconds(image, speeds) + sum(section_seconds(each, speeds) for each in prompts) / (2 * BATCH)
    )


def images(config: TrainConfig, card: Card, stores_scores: bool) -> Timed:
    """Record the drawing of pictures in one batch, and their decoding one by one."""
    prior, recorders = config.prior, Recorders(partial(Recorder, cuda=True))
    assert isinstance(prior, ClassImages), "the rows of served pictures are jobs that draw them"
    with fake_tensors(), pause_collection(), silence():
        simulate_class_images(config, card.capability, recorders, TOGETHER)
    sections = recorders["class"].sections
    drawn = [each for each in sections if each.phase == "sample"]
    decode = [each for each in sections if each.phase == "decode"]

    def timed(speeds: Speeds) -> Json:
        step = step_seconds(drawn, speeds)
        one = (step.seconds + (scores(drawn, speeds) if stores_scores else 0.0)) / min(SIMULATED, prior.steps)
        decoded = section_seconds(decode, speeds)
        return {"step": one, "inside": decoded, "bound": step.bound, "predicted": prior.steps * one + decoded}

    return timed


def scores(sections: Sequence[StreamWork], speeds: Speeds) -> float:
    """Seconds to write attention's scores, take their softmax and read them again (arXiv:2205.14135, algorithm 0)."""
    return sum(
        count * speeds.seconds("add", work.dtype, (4 * math.prod(work.extents[:3]) * ITEM[work.dtype],))
        for section in sections
        for work, count in section.work.items()
        if work.kind == "attention"
    )
