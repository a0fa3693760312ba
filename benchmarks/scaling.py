"""``scaling``: pictures per second by processes: measured here, predicted for up to 256 cards, published by Mosaic.

Predicted rows come from ``benchmarks/cluster.py``; nothing was fitted to a published figure, and none ran on a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cluster import FABRICS, Compute, compute_of, divided, exchange_seconds, predict
from benchmarks.hours import rounded
from benchmarks.measured_scaling import exchange_of, measured
from benchmarks.scaling_plans import PLANS, Plan
from benchmarks.scaling_tables import page
from benchmarks.table import Results
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.runs.report import write_report
from simpletune.system.gpus import find_card
from simpletune.system.options import Json

CARDS = (1, 8, 16, 32, 64, 128, 256)
PASSES = 8  # micro-batches of a step in measured rows
NO_EVALUATION = ("validation.prompts=[]", "validation.loss_samples=0")


def run(folder: Path, minutes: float, only: str) -> Path:
    """Measure and predict the rows that are missing, then write the page; its Markdown version is beside it."""
    results = Results(folder / "scaling", {})
    results.measure({name: partial(rounded, row) for name, row in jobs().items()}, minutes, only)
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
        computed[micro] = compute_of(job, micro, DatasheetSpeeds(find_card(plan.card)))
    step = predict(job, cards, computed[micro], fabric)
    own = {"micro": step.micro, "passes": step.passes, "seconds": step.seconds, "rate": step.rate, "bound": step.bound}
    whole = exchange_seconds(job.exchanged, cards, fabric)
    return {**own, "exposed": step.exposed, "exchange": whole, "reading": step.reading, "batch": job.batch}
