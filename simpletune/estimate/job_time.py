"""Predict how long a whole job takes on a card, stage by stage, and what limits the speed of its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletune.config.prior import ClassImages
from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import choose_validation_samples, drift_prompts, has_start
from simpletune.estimate.disk_needs import DataCounts, checkpoint_bytes
from simpletune.estimate.job_estimate import needed_bytes
from simpletune.estimate.simulate.reports import SIMULATED, JobReport, parts_in_steps
from simpletune.estimate.timing.constants import FOLDER, read_constants
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.larger_batch import LargerBatch, find_larger_batch
from simpletune.estimate.timing.sections import StreamWork
from simpletune.estimate.timing.speeds import CalibratedSpeeds, HostSpeeds, ScaledSpeeds, Speeds
from simpletune.estimate.timing.timeline import StepSeconds, step_seconds
from simpletune.models.shared.buckets import Size
from simpletune.models.text.encoder import BATCH
from simpletune.runs.folder import STRENGTHS
from simpletune.system.gpus import Card, card_named_by_driver, cards_like
from simpletune.system.prices import Price

# Intervals, as factors on the prediction. That of a calibrated device covers 23 of the 24 rows of
# benchmarks/results/cpu/times.md; that of a data sheet has not been measured.
CALIBRATED = (0.85, 1.3)
STATED = (0.7, 2.0)
# The host's part of a step, as a factor on the predicted one: on a core that is not known, and on one that was timed.
# Other programs slow a step down by up to 1.6 times what the timed loop shows.
OTHER_CORES, THIS_CORE = (0.7, 1.5), (0.9, 1.6)
# Seconds of the host if it was not calibrated: about what an Intel Xeon takes.
READ_JPEG, WRITE_PNG, WRITE_BYTE = 1.5e-8, 1.6e-7, 1.5e-9  # per pixel, per pixel, per byte
READ_BYTE = 5e-10  # per byte of a weight file: assumes a disk of 2 GB/s


@dataclass(frozen=True)
class JobTime:
    """The predicted time and price of a job on one card."""

    card: Card
    step: StepSeconds
    steps: int
    per_epoch: int | None
    """Steps per epoch; None: the data set was not read."""
    stages: dict[str, float]
    """Seconds of text, latents, load, train, save, and if the run has them, class and validate."""
    interval: tuple[float, float]
    """Lower and upper factor of the expected time."""
    source: str
    """Origin of the speeds."""
    price: Price | None = None
    """Price per hour, if it is known."""
    larger: LargerBatch | None = None
    """A larger micro-batch that fits and takes clearly less time for a picture."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole job, without start-up and downloads."""
        return sum(self.stages.values())

    @property
    def cost(self) -> float | None:
        """The price of the whole job, in the price's currency; None without a price."""
        return None if self.price is None else self.seconds / 3600 * self.price.per_hour

    def as_json(self) -> dict[str, object]:
        """Return what ``estimate --json`` prints for one card."""
        low, high = self.interval
        found: dict[str, object] = {
            "device": self.card.name,
            "seconds_per_step": round(self.step.seconds, 4),
            "seconds_per_step_range": [round(self.step.seconds * low, 4), round(self.step.seconds * high, 4)],
            "steps": self.steps,
            "seconds_per_epoch": None if self.per_epoch is None else round(self.per_epoch * self.step.seconds, 1),
            "seconds": round(self.seconds, 2),
            "seconds_by_stage": {name: round(seconds, 4) for name, seconds in self.stages.items()},
            "bound_by": self.step.bound,
            "limited_by": self.step.limit,
            "seconds_of_step_by_use": {name: round(seconds, 5) for name, seconds in self.step.device.items()},
            "host_seconds_of_step": round(self.step.host, 5),
            "speeds": self.source,
            "larger_batch": None if self.larger is None else self.larger.as_json(),
        }
        if self.price is not None:
            found |= {"cost": round(self.cost or 0.0, 4), "price": self.price.model_dump()}
        return found


def speeds_of(card: Card, cache: Path, host: HostSpeeds | None = None) -> tuple[Speeds, tuple[float, float], str]:
    """Return a card's speeds, the interval for predictions with them, and their origin: a calibration of this machine
    in the cache's folder, or the card's data sheet. Raises UserError if a calibration cannot be read."""
    for file in sorted((cache / FOLDER).glob("*.json")):
        constants = read_constants(file)
        named = card in cards_like(constants.device) or card.name == constants.device
        if constants.kind == "cuda" and named:
            there = card_named_by_driver(constants.device, constants.memory_bytes or 0, (0, 0))
            if abs(there.gib - card.gib * card.found) / there.gib < 0.1:  # cards of one name differ in memory
                return CalibratedSpeeds(constants), CALIBRATED, f"calibrated on {constants.device}, {constants.date}"
    stated = DatasheetSpeeds(card, host)
    if not stated.is_known:
        return stated, STATED, "no figures are known for this card: using those of an L4"
    return stated, STATED, "by its data sheet, not calibrated"


def job_time(
    config: TrainConfig,
    job: JobReport,
    card: Card,
    counts: DataCounts | None = None,
    price: Price | None = None,
    host: HostSpeeds | None = None,
    reserved: int = 0,
) -> JobTime:
    """Predict the time of a job on a card.

    Args:
        counts: only what it leaves out is taken to be cached. None: the data set was not read, and its stages are left
            out.
        host: what was measured of the machine, if it is this one.
        reserved: bytes of the card that other programs use.
    """
    speeds, interval, source = speeds_of(card, config.output.cache_folder, host)
    step = step_seconds(job.train.sections, speeds)
    if isinstance(speeds, DatasheetSpeeds) and step.seconds:
        interval = step_range(job.train.sections, speeds, step)
    batch, side, prior = config.train.micro_batch * config.train.accumulation, config.resolution, config.prior
    per_epoch = None if counts is None else counts.steps or max(1, -(-counts.samples // batch))
    steps = config.steps(per_epoch or 1)
    bring = READ_BYTE + 1 / (card.link * 1e9)  # seconds per byte from a file to the card
    base = 2 * config.model.architecture.parameter_count() * bring
    beside = sum(job.part_bytes.get(part, 0) for part in parts_in_steps(config)) * bring
    vae = job.part_bytes.get("vae", 0) * bring
    stages = {"text": _text_seconds(config, job, counts, speeds, bring)}
    if isinstance(prior, ClassImages):
        one = _generation_seconds(job.work["class"], speeds, prior.steps, (side, side))
        stages["class"] = base + vae + prior.count * one
    stages["latents"] = 0.0
    if counts is not None and counts.pixels:
        # images are larger than their crops
        read_image = speeds.rates.get("read_jpeg", READ_JPEG) * side * side * 4
        stages["latents"] = vae + counts.pixels / side**2 * (section_seconds(job.work["latents"], speeds) + read_image)
    stages |= {"load": base + beside, "train": steps * step.seconds}
    if validate := _validation_seconds(config, job, speeds, steps, vae):
        stages["validate"] = validate
    checkpoint, result = checkpoint_bytes(config)
    saved = times_due(config.checkpoint.every, steps) * checkpoint + result
    stages["save"] = saved * speeds.rates.get("write_byte", WRITE_BYTE)
    larger = larger_batch(config, job, card, speeds, counts, reserved)
    return JobTime(card, step, steps, per_epoch, stages, interval, source, price, larger)


def larger_batch(
    config: TrainConfig, job: JobReport, card: Card, speeds: Speeds, counts: DataCounts | None, reserved: int = 0
) -> LargerBatch | None:
    """Find a larger micro-batch that takes clearly less time for a picture, and that the configuration's rules, its
    data and the card allow."""
    train, peak = config.train, job.stages["train"].bytes if job.stages else 0
    workspaces = peak - job.train.peak.bytes

    def may(factor: int, step_bytes: int) -> bool:
        larger = train.micro_batch * factor
        return (
            needed_bytes(step_bytes + workspaces) + reserved <= card.bytes
            and (counts is None or counts.samples >= larger)
            and (train.global_batch is None or train.global_batch % larger == 0)
        )

    return find_larger_batch(job.train.sections, speeds, train, job.train.phases, may)


def step_range(sections: Sequence[StreamWork], speeds: DatasheetSpeeds, step: StepSeconds) -> tuple[float, float]:
    """Return the interval of a step by a data sheet: the device's and the host's factors, folded as the step is."""
    low, high = (step_seconds(sections, end).seconds / step.seconds for end in range_ends(speeds))
    return low, high


def range_ends(speeds: DatasheetSpeeds) -> list[Speeds]:
    """Return the fastest and the slowest speeds that a data sheet's stand for."""
    cores = OTHER_CORES if speeds.measured is None else THIS_CORE
    return [ScaledSpeeds(speeds, *factors) for factors in zip(STATED, cores, strict=True)]


def times_due(every: int | None, steps: int) -> int:
    """Count how often something happens that is due every ``every`` steps and after the last one."""
    return 1 + ((steps - 1) // every if every else 0)


def _text_seconds(
    config: TrainConfig, job: JobReport, counts: DataCounts | None, speeds: Speeds, bring: float
) -> float:
    """Predict the seconds of loading the text encoders and encoding all prompts, also those of generation and drift."""
    if counts is not None and not counts.prompts:
        return 0.0  # all are cached
    generated = config.validation.prompts
    prompts = (
        (counts.prompts if counts else 0) + (1 if generated is None else len(generated)) + 1
    )  # and the negative prompt
    prompts += len(drift_prompts(config.validation)) + isinstance(config.prior, ClassImages)
    return sum(
        job.part_bytes.get(name.removeprefix("text."), 0) * bring
        + prompts / (2 * BATCH) * section_seconds(sections, speeds)
        for name, sections in job.work.items()
        if name.startswith("text.")
    )


def _generation_seconds(sections: Sequence[StreamWork], speeds: Speeds, steps: int, size: Size) -> float:
    """Predict the seconds of generating one image and writing it; ``SIMULATED`` of its steps were recorded."""
    sample, decode = (
        section_seconds([s for s in sections if s.phase == name], speeds) for name in ("sample", "decode")
    )
    png = math.prod(size) * speeds.rates.get("write_png", WRITE_PNG)
    return sample / min(SIMULATED, steps) * steps + decode + png


def _validation_seconds(config: TrainConfig, job: JobReport, speeds: Speeds, steps: int, load: float) -> float:
    """Predict the seconds of generation, including before training, with the autoencoder loaded each time, and of
    evaluating the loss and each group's drift from the base."""
    option = config.validation
    seconds = 0.0
    if "draw" in job.work:
        images = 1 if option.prompts is None else len(option.prompts)
        one = _generation_seconds(job.work["draw"], speeds, option.steps, config.image_size())
        strengths = 1 if config.concept is None else len(STRENGTHS) - 1  # the base's are drawn once
        seconds += (1 + has_start(config) + strengths * times_due(option.every, steps)) * (load + images * one)
    if "evaluate" in job.work:
        batch = config.train.micro_batch * config.train.accumulation
        passes = choose_validation_samples(config, batch, steps).share * batch * steps
        seconds += passes * section_seconds(job.work["evaluate"], speeds)
    return seconds


def section_seconds(sections: Sequence[StreamWork], speeds: Speeds) -> float:
    """Predict the seconds of sections that nothing follows."""
    return step_seconds(sections, speeds).seconds if sections else 0.0
