"""Report the loss of one or several runs: data for the page's curve, and a few lines of text."""

from __future__ import annotations

from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.runs.report.run_data import Json, RunData

ROOM = 4_000  # points per run on a page, more than a screen has columns
ROWS = 10
MIXED = "loss at fixed noise"


def loss_data(run: RunData) -> Json:
    """Build the columns for the page's script: step, loss, and fields for the tooltip."""
    rows = mean_by_group(run.metrics, ROOM)
    fields = [field for field in ("lr", "grad_norm", "seconds") if any(field in row for row in rows)]
    columns = {field: [_short(row.get(field)) for row in rows] for field in ("step", "loss", *fields)}
    return {"run": run.name, **columns}


def mean_by_group(rows: list[Json], room: int) -> list[Json]:
    """Reduce to at most ``room`` rows; each then has the mean loss of its group."""
    many = max(1, -(-len(rows) // room))
    if many == 1:
        return rows
    groups = [rows[start : start + many] for start in range(0, len(rows), many)]
    return [{**group[-1], "loss": sum(row["loss"] for row in group) / len(group)} for group in groups]


def _short(value: object) -> float | int | None:
    """Round to six digits to keep the page small."""
    if isinstance(value, int) or value is None:
        return value
    number = float(f"{value:.6g}")
    return number if number - number == 0 else None  # JSON has no infinities and no NaN


def loss_section(runs: list[RunData]) -> ReportSection:
    """Draw the curve, and its text version for the Markdown file."""
    section = ReportSection("loss", "Loss", block="loss")
    plotted = [run for run in runs if run.metrics]
    if not plotted:
        section.block = ""
        section.notes.append("No step was recorded.")
        return section
    points = [
        {"run": run.name, "step": step, "eval_loss": round(loss, 6)}
        for run in plotted
        for step, loss in [*run.evaluations, *([] if run.start_loss is None else [(0, run.start_loss)])]
    ]
    fields = [field for field in ("lr", "grad_norm", "seconds") if any(field in run.metrics[-1] for run in plotted)]
    title = loss_title(plotted)
    section.charts.append(charts.loss([run.name for run in plotted], points, fields, title))
    if points:
        section.notes.append(f"Diamonds: {title}, averaged over a fixed set, so the points of a run can be compared.")
        if title == MIXED:
            measured = "; ".join(f"{run.name}: {run.loss_is}" for run in plotted if run.evaluations)
            section.notes.append(f"Runs used different pictures: {measured}.")
    if any(len(run.metrics) > ROOM for run in plotted):
        section.notes.append(f"Beyond {ROOM:,} steps, neighbouring steps are averaged.")
    for run in plotted:
        name = f"{run.name}: " if len(plotted) > 1 else ""
        section.lines.append(f"{name}`{charts.sparkline([row['loss'] for row in run.metrics])}`")
        if len(plotted) == 1:
            section.tables.append(_table(run))
    return section


def loss_title(runs: list[RunData]) -> str:
    """Name the runs' validation loss; ``MIXED`` if they evaluated different pictures."""
    names = {run.loss_is for run in runs if run.evaluations}
    return MIXED if len(names) > 1 else "".join(names)


def _table(run: RunData) -> ReportTable:
    """Tabulate the mean losses of equal parts of the run."""
    many = -(-len(run.metrics) // ROWS)
    groups = [run.metrics[start : start + many] for start in range(0, len(run.metrics), many)]
    rows = []
    for group in groups:
        first, last = group[0]["step"], group[-1]["step"]
        mean = sum(row["loss"] for row in group) / len(group)
        seen = [loss for step, loss in run.evaluations if first <= step <= last]
        rows.append((f"{first:,} to {last:,}", f"{mean:.4f}", f"{seen[-1]:.4f}" if seen else ""))
    before = [loss for step, loss in run.evaluations if step == 0]
    first = [("before" if run.start_loss is None else "base", "", f"{before[0]:.4f}")] if before else []
    start = [] if run.start_loss is None else [("start", "", f"{run.start_loss:.4f}")]
    rows = [*first, *start, *rows]
    return ReportTable("Loss by part of the run", ("steps", "mean loss", run.loss_is), rows, folded=True)
