"""``scaling``: pictures per second by processes: measured here, predicted for up to 256 cards, published by Mosaic.

Predicted rows come from ``benchmarks/cluster.py``; nothing was fitted to a published figure, and none ran on a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.cluster import FABRICS, Compute, Job, compute_of, divided, exchange_seconds, predict
from benchmarks.hours import rounded
from benchmarks.measured_scaling import exchange_of, measured
from benchmarks.predicted_seconds import config_of
from benchmarks.published import MOSAIC, MOSAIC_BLOG, SCRATCH, SD15_FULL
from benchmarks.scaling_tables import page
from benchmarks.table import Results
from simpletune.cards import card_of
from simpletune.options import Json
from simpletune.prices import of_cards
from simpletune.report import write_report
from simpletune.system.console import say
from simpletune.timing.stated import StatedSpeeds

CARDS = (1, 8, 16, 32, 64, 128, 256)
SD3 = Path("configs/sd3_from_scratch_256.json")
LORA = Path("configs/sd3_medium_lora_r16_int8.json")
PASSES = 8  # micro-batches of a step in measured rows
NO_EVALUATION = ("validation.prompts=[]", "validation.eval_samples=0")


class Plan:
    """A training whose scaling is predicted.

    Args:
        card: which it runs on.
        config: its configuration.
        overrides: for the configuration.
        batch: pictures a step.
        pictures: of the whole training; 0: none are given.
        inside: pictures and prompts are encoded in every step.
        published: pictures a second by number of cards.
        source: who published them.
        price: dollars a card and hour; None: today's.
    """

    def __init__(self, card: str, config: Path, overrides: Sequence[str], batch: int, **more: object):
        self.card, self.config, self.overrides, self.batch = card, config, tuple(overrides), batch
        self.pictures = float(str(more.get("pictures", 0)))
        self.inside = bool(more.get("inside", False))
        given = more.get("published", {})
        self.published: dict[int, float] = given if isinstance(given, dict) else {}
        self.source = str(more.get("source", ""))
        self.price = float(str(more.get("price", of_cards()[card.lower()].per_hour)))

    def job(self) -> Job:
        """The job, with the largest micro-batch that a card takes."""
        return Job(config_of(self.config, self.overrides, card_of(self.card)), self.batch, self.inside)


PLANS = {
    "SD 2 base from scratch, 256 px": Plan(
        "A100-40GB", SD15_FULL, (*SCRATCH, "data.resolution=256", "train.batch_size=16"), 2048, pictures=1126.4e6,
        published={8: 1100, 16: 2180, 32: 4080, 64: 8530, 128: 11600}, source=MOSAIC, price=2,
    ),
    "SD 2 base from scratch, 512 px": Plan(
        "A100-40GB", SD15_FULL, (*SCRATCH, "data.resolution=512", "train.batch_size=16"), 2048, pictures=1740.8e6,
        published={8: 290, 16: 585, 32: 1195, 64: 2340, 128: 4590}, source=MOSAIC, price=2,
    ),
    "SD 2 base from scratch, 512 px, encoding in every step": Plan(
        "A100-40GB", SD15_FULL, (*SCRATCH, "data.resolution=512", "train.batch_size=4"), 2048, pictures=2867.2e6,
        inside=True, published={8: 128.2, 16: 254.0, 32: 485.7, 64: 912.2, 128: 1618.4}, source=MOSAIC_BLOG, price=2,
    ),
    "SD3 from scratch, 256 px": Plan("A100-80GB", SD3, (), 2048, pictures=1024e6),
    "SD3 from scratch, 512 px": Plan("A100-80GB", SD3, ("data.resolution=512",), 2048, pictures=512e6),
    "SD3 Medium, LoRA r16, int8, 1024 px": Plan("L4", LORA, ("train.gradient_accumulation=1",), 256, pictures=1e6),
}  # fmt: skip


def run(folder: Path, minutes: float, only: str) -> Path:
    """Measure and predict the rows that are missing, then write the page.

    Args:
        folder: for the results.
        minutes: start no row after this many.
        only: text that row names must contain.

    Returns:
        The page; its Markdown version is beside it.
    """
    results = Results(folder / "scaling", {})
    for name, row in results.missing(jobs(), minutes, only):
        say(f"bench   {name}")
        results.add(name, {key: rounded(value) for key, value in row().items()})
    return write_report(page(results.rows, PLANS), folder / "scaling.html")[0]


def jobs() -> dict[str, Callable[[], Json]]:
    """Name every row and the function that measures or predicts it: this machine's processes, then cards by plan."""
    found: dict[str, Callable[[], Json]] = {}
    for method in ("LoRA", "full"):
        for processes in (1, 2, 4, 8):
            if processes <= (os.cpu_count() or 1):
                found[f"measured: {method}, {processes} on the CPU"] = partial(measured, method, processes, PASSES)
        found[f"measured: {method}, exchange of 2 on the CPU"] = partial(exchange_of, method, 2)
    for name, plan in PLANS.items():
        computed: dict[int, Compute] = {}
        for cards in CARDS:
            found[f"{name}, {cards} {plan.card}"] = partial(predicted, plan, cards, computed)
    return found


def predicted(plan: Plan, cards: int, computed: dict[int, Compute]) -> Json:
    """Predict one row.

    Args:
        plan: of the training.
        cards: number of cards.
        computed: seconds of one card by micro-batch, kept between the rows of a plan.
    """
    job, fabric = plan.job(), FABRICS[plan.card]
    micro, _ = divided(job.batch, job.config.train.micro_batch, cards)
    if micro not in computed:
        computed[micro] = compute_of(job, micro, StatedSpeeds(card_of(plan.card)))
    step = predict(job, cards, computed[micro], fabric)
    own = {"micro": step.micro, "passes": step.passes, "seconds": step.seconds, "rate": step.rate, "bound": step.bound}
    whole = exchange_seconds(job.exchanged, cards, fabric)
    return {**own, "exposed": step.exposed, "exchange": whole, "reading": step.reading, "batch": job.batch}
