"""Report time and price, predicted when the run started and measured."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportChart, ReportSection, ReportTable, seconds
from simpletune.runs.report.run_data import Json, RunData
from simpletune.system.prices import Price

HEAD = ("", "predicted", "measured", "predicted / measured")


def time_sections(run: RunData) -> Iterator[ReportSection]:
    """Compare predicted and measured time of a step, each stage and the job; yield nothing without a prediction."""
    time = run.summary.get("predicted_time")
    if not time:
        return
    step, stages = time["seconds_per_step"], time.get("stages") or {}
    low, high = time.get("seconds_per_step_range") or (None, None)
    section = ReportSection("time", "Time and price, predicted and measured")
    within = "" if low is None else f", expected between {seconds(low)} and {seconds(high)}"
    bound = f", bound by {time['bound_by']}" if time.get("bound_by") else ""
    section.notes.append(
        f"Predicted when the run started, for {time.get('device')} ({time.get('speeds')}): "
        f"{seconds(step['predicted'])} a step{within}{bound}. The measured step is the median, without warm-up."
    )
    rows: list[tuple[str, ...]] = [("a step", *_cells(step)), *((name, *_cells(pair)) for name, pair in stages.items())]
    if "seconds" in time:
        rows.append(("these stages", *_cells(time["seconds"])))
    if "cost" in time:
        cost, price = time["cost"], Price(**time["price"])
        unit = f" {price.currency}" if price.currency else ""
        cells = (f"{cost[key]:.4g}{unit}" for key in ("predicted", "measured"))
        rows.append(("price", *cells, f"{cost['ratio']:.2f}"))
        section.notes.append(f"Price: {price.words}. The measured one includes the start of the process.")
    if stages:
        section.charts.append(_chart(stages))
    section.tables.append(ReportTable("Predicted and measured", HEAD, rows))
    yield section


def _cells(pair: Json) -> tuple[str, str, str]:
    return seconds(pair["predicted"]), seconds(pair["measured"]), f"{pair['ratio']:.2f}"


def _chart(stages: Json) -> ReportChart:
    """Draw the measured seconds as bars, with the predicted ones as ticks."""
    rows: list[Json] = [
        {"name": name, "value": pair["measured"], "label": seconds(pair["measured"]),
         "mark": pair["predicted"], "mark_label": seconds(pair["predicted"])}
        for name, pair in stages.items()
    ]  # fmt: skip
    says = ", ".join(f"{row['name']} {row['label']}, predicted {row['mark_label']}" for row in rows)
    return ReportChart("stage-seconds", "Seconds by stage", says, charts.bars(rows, "s", marks="predicted"))
