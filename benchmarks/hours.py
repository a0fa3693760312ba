"""``hours``: predict seconds, hours and prices of published jobs, and compare with the published figures.

Everything is predicted from the operations of our step and the stated figures of a card
(``simpletune/estimate/timing/datasheet.py``). For published rows the step has diffusers' blocks of SD3, which their
authors ran. Nothing was fitted to a published figure, and nothing here ran on a card.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks import hours_tables, vertex
from benchmarks.hours_tables import is_within, ratio_of
from benchmarks.predicted_seconds import card_named, config_of, predicted, training, with_range
from benchmarks.published import LORA, SD15, Row, costs, rows
from benchmarks.table import Results, command_of
from simpletune.estimate.job_time import OTHER_CORES, STATED
from simpletune.runs.report import write_report
from simpletune.runs.report.charts import image
from simpletune.runs.report.content import Fact, Report, ReportChart
from simpletune.system.options import Json

TITLE = "Hours and prices, predicted and published"
LEAD = (
    "Predicted: from the operations of our step, run without values, and each card's stated figures; on no card. "
    "Beside published figures SD3's blocks are diffusers', as their authors ran them; ours are faster. "
    "Published: by others, on their cards. Nothing was fitted to a published figure. "
    f"Range: the device at {STATED[0]} to {STATED[1]} times its seconds, the host at {OTHER_CORES[0]} to "
    f"{OTHER_CORES[1]}, folded as the step is. Command: {command_of('hours')}."
)
OURS = ("T4", "L4", "A10G", "RTX4090", "A100-40GB", "H100")  # cards with a price
SIDES = (256, 512, 1024)


def run(folder: Path, minutes: float, only: str) -> Path:
    """Predict the rows that are missing, then write the page; its Markdown version and the figure are beside it."""
    results, known = Results(folder / "hours", {}), Results(folder / "vertex", {}).rows
    results.measure({name: partial(rounded, row) for name, row in jobs(known).items()}, minutes, only)
    beside = [row for row in rows() if row.key in results.rows]
    if beside:
        write_figure(folder / "hours.png", ratios(beside, results.rows))
    return write_report(page(results.rows), folder / "hours.html")[0]


def rounded(row: Callable[[], Json]) -> Json:
    """Compute a row; five digits of each number."""
    return {key: digits(value) for key, value in row().items()}


def digits(value: object) -> object:
    """Five digits of a number, or of each in a list."""
    if isinstance(value, list):
        return [digits(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def jobs(known: dict[str, Json]) -> dict[str, Callable[[], Json]]:
    """Name every row and what predicts it.

    Args:
        known: rows of the ``vertex`` grid, whose largest batches need not be searched again.
    """
    found: dict[str, Callable[[], Json]] = {row.key: partial(predicted, row) for row in rows()}
    for method, card, batch, _, config, overrides in costs():
        found[f"cost: {method}, {card}, batch {batch}"] = partial(step_row, card, config, overrides)
    for card in OURS:
        for side in SIDES:
            overrides = (*LORA, f"data.resolution={side}", "train.batch_size=4")
            found[f"card: {card}, {side} px"] = partial(step_row, card, SD15, overrides)
    for card, side in vertex.LARGEST:
        name = f"largest batch: {card}, {side} px"
        found[name] = partial(dict, known[name]) if name in known else partial(vertex.largest_row, card, side)
    return found


def step_row(name: str, file: Path, overrides: tuple[str, ...]) -> Json:
    """Predict a training step on a card with cached latents and prompts."""
    card = card_named(name)
    compute = () if card.has_bf16 else ("precision.compute=fp16",)
    found = with_range(training(config_of(file, (*overrides, *compute), card), card), card, "step")
    return {key: found[key] for key in ("step", "range", "bound")}


def page(found: dict[str, Json]) -> Report:
    """Lay out the page from the rows that exist."""
    beside = [row for row in rows() if row.key in found]
    sections = [
        *hours_tables.beside_sections(beside, found),
        hours_tables.cost_section(found),
        hours_tables.card_section(found, OURS, SIDES),
        hours_tables.largest_section(found),
        hours_tables.scratch_section(found),
    ]
    if beside:
        chart = ReportChart("ratios", "Predicted over published seconds", says(beside, found), ratios(beside, found))
        sections[0].charts.insert(0, chart)
    return Report(TITLE, LEAD, "", [], list(facts(beside, found)), sections, data={"losses": []})


def facts(beside: list[Row], found: dict[str, Json]) -> Iterable[Fact]:
    """How close the predictions are."""
    goals = {row: ratio_of(row, found[row.key]) for row in beside if row.goal}
    if goals:
        near = sum(0.8 <= ratio <= 1.25 for ratio in goals.values())
        yield Fact("within 25%", f"{near} of {len(goals)}", "rows whose method is ours and whose timing is steady")
        yield Fact("median of these", f"{statistics.median(goals.values()):.2f}", "predicted over published seconds")
    if beside:
        inside = sum(is_within(row, found[row.key]) for row in beside)
        yield Fact("within the stated range", f"{inside} of {len(beside)}", "all rows; those outside it are explained")


def says(beside: list[Row], found: dict[str, Json]) -> str:
    """The chart in words."""
    return "; ".join(f"{row.key}: {ratio_of(row, found[row.key]):.2f}" for row in beside)


def ratios(beside: list[Row], found: dict[str, Json]) -> Json:
    """Points and ranges: predicted over published seconds of each row, with the band of 25%."""
    values = [
        {
            "row": row.key,
            "ratio": round(ratio_of(row, found[row.key]), 3),
            **dict(
                zip(
                    ("low", "high"),
                    sorted(round(ratio_of(row, {"predicted": each}), 3) for each in found[row.key]["range"]),
                    strict=True,
                )
            ),
            "goal": "ours, steady" if row.goal else "warm-up, other methods or hosts",
        }
        for row in beside
    ]
    x = {"field": "ratio", "type": "quantitative", "title": "predicted over published seconds",
         "scale": {"type": "log", "domain": [0.08, 3.5]}, "axis": {"values": [0.1, 0.2, 0.5, 1, 2]}}  # fmt: skip
    y = {"field": "row", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 330}}
    colour = {"field": "goal", "type": "nominal", "title": None, "legend": {"orient": "top"},
              "scale": {"domain": ["ours, steady", "warm-up, other methods or hosts"],
                        "range": ["#4c78a8", "#9d9da1"]}}  # fmt: skip
    band = {"data": {"values": [{"from": 0.8, "to": 1.25}]}, "mark": {"type": "rect", "opacity": 0.15},
            "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "to"}}}  # fmt: skip
    points = {"mark": {"type": "point", "filled": True, "size": 60, "tooltip": True},
              "encoding": {"x": x, "y": y, "color": colour}}  # fmt: skip
    ranges = {"mark": {"type": "rule", "opacity": 0.5},
              "encoding": {**points["encoding"], "x": {**x, "field": "low"}, "x2": {"field": "high"}}}  # fmt: skip
    return {"data": {"values": values}, "layer": [band, ranges, points], "height": {"step": 17}, "width": "container"}


def write_figure(file: Path, spec: Json) -> None:
    """Draw the chart as a picture."""
    from PIL import Image

    title = "Predicted over published seconds (line: range; band: within 25%)"
    drawn = Image.open(io.BytesIO(image({**spec, "width": 420, "title": title}))).convert("RGB")
    drawn.quantize(64).save(file, optimize=True)
