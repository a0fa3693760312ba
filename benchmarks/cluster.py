"""Predict training on many cards: one card's computation, the exposed exchange of gradients, and the data rate.

Bandwidths are taken from others (``FABRICS``); nothing is fitted to a published scaling table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.predicted_seconds import record_encoding
from simpletune.config.schema import TrainConfig
from simpletune.estimate.disk_needs import LATENT_BYTES
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.recorder import BACKWARD
from simpletune.estimate.timing.timeline import step_seconds

MACHINE = 8  # cards of a machine
GRADIENT = 4  # bytes: gradients are exchanged in fp32
BUCKET = 25 * 10**6  # bytes that DDP exchanges together; the last one waits for the end of the backward pass
DATA = 2e9  # bytes a second that a machine reads: assumed, an NVMe disk


@dataclass(frozen=True)
class Fabric:
    """How fast cards exchange gradients, as bus bandwidth of nccl-tests: bytes a second.

    Args:
        inside: among the cards of a machine.
        between: among machines.
        source: who says so.
    """

    inside: float
    between: float
    source: str


FABRICS = {
    "A100-40GB": Fabric(200e9, 84.8e9, "NVLink: NVIDIA/nccl-tests issue 149, 8 A100, about 200 GB/s; machines: issue "
                                       "119, 3 x 8 A100 with 4 HDR adapters each, 84.8 GB/s on average"),
    "A100-80GB": Fabric(200e9, 84.8e9, "as A100-40GB"),
    "L4": Fabric(10e9, 10e9, "assumed: PCI Express 4 through host memory, and 100 Gbit/s between machines"),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is trained, with how many pictures per step.

    Args:
        config: with the micro-batch as ``train.batch_size``.
        batch: pictures a step, of all cards.
        inside: pictures and prompts are encoded in every step.
    """

    config: TrainConfig
    batch: int
    inside: bool = False

    @property
    def exchanged(self) -> int:
        """Bytes of the gradients of trained parameters."""
        return GRADIENT * self.config.adapter.trainable(self.config.model.architecture.known_shapes())

    @property
    def sample_bytes(self) -> int:
        """Bytes that a cached sample takes on disk: its latents and its prompt."""
        model, side = self.config.model, self.config.resolution
        latent = math.prod(model.autoencoder.shape(side, side)) * LATENT_BYTES
        return latent + model.text.tokens * model.text.width * self.config.precision.encoder_dtype().itemsize


@dataclass(frozen=True)
class Compute:
    """Seconds of one card.

    Args:
        first: a step of one micro-batch, with the optimizer's update.
        each: a further micro-batch.
        backward: backward pass of a micro-batch, under which gradients are exchanged.
        encoding: of one picture and its prompt, if they are encoded in every step.
    """

    first: float
    each: float
    backward: float
    encoding: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A step on many cards.

    Args:
        cards: number of cards.
        micro: pictures of a micro-batch.
        passes: micro-batches of a card in a step.
        seconds: of the step.
        compute: seconds of it that cards compute.
        exposed: seconds of it that cards wait for the exchange.
        reading: seconds to read the step's samples, on each machine beside the computation.
    """

    cards: int
    micro: int
    passes: int
    seconds: float
    compute: float
    exposed: float
    reading: float

    @property
    def rate(self) -> float:
        """Pictures a second."""
        return self.cards * self.micro * self.passes / self.seconds

    @property
    def bound(self) -> str:
        """What takes most of the step."""
        if self.reading >= self.compute + self.exposed:
            return "data"
        return "exchange" if self.exposed > self.compute else "computation"


def divided(batch: int, micro: int, cards: int) -> tuple[int, int]:
    """Divide a step's pictures: the micro-batch, no larger than ``micro``, and how many of them each card takes.

    Raises:
        ValueError: the cards cannot take equally many.
    """
    if batch % cards:
        raise ValueError(f"{batch} pictures cannot be divided over {cards} cards")
    each = batch // cards
    micro = next(size for size in range(min(micro, each), 0, -1) if each % size == 0)
    return micro, each // micro


def compute_of(job: Job, micro: int, speeds: DatasheetSpeeds) -> Compute:
    """Predict the seconds of one card, by simulating one and two micro-batches."""
    steps = []
    for passes in (1, 2):
        own = {"batch_size": micro, "gradient_accumulation": passes, "global_batch": None}
        train = job.config.train.model_copy(update=own)
        report = simulate(job.config.model_copy(update={"train": train}), capability=speeds.card.capability)
        steps.append(step_seconds(report.sections, speeds))
    inside = record_encoding(job.config)(speeds) if job.inside else 0.0
    busy = sum(steps[0].phases.values())
    share = sum(steps[0].phases.get(name, 0.0) for name in BACKWARD) / busy
    each = steps[1].seconds - steps[0].seconds
    return Compute(steps[0].seconds, each, share * steps[0].seconds, inside)


def exchange_seconds(bytes_: int, cards: int, fabric: Fabric) -> float:
    """Seconds of an all-reduce: 2 (n - 1) / n of the bytes at the bus bandwidth, as nccl-tests defines it."""
    if cards == 1:
        return 0.0
    return 2 * (cards - 1) / cards * bytes_ / (fabric.inside if cards <= MACHINE else fabric.between)


def predict(job: Job, cards: int, compute: Compute, fabric: Fabric) -> Prediction:
    """Predict a step on a number of cards.

    The exchange begins with the last micro-batch's backward pass; the part that this does not hide is exposed, at least
    the last bucket. Reading runs in parallel with the computation.
    """
    micro, passes = divided(job.batch, job.config.train.micro_batch, cards)
    busy = compute.first + (passes - 1) * compute.each + micro * passes * compute.encoding
    exchange = exchange_seconds(job.exchanged, cards, fabric)
    last = exchange * min(1.0, BUCKET / job.exchanged)
    exposed = max(exchange - compute.backward, last)
    machines = math.ceil(cards / MACHINE)
    reading = 0.0 if job.inside else job.batch / machines * job.sample_bytes / DATA
    return Prediction(cards, micro, passes, max(busy + exposed, reading), busy, exposed, reading)
