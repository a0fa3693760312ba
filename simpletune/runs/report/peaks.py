"""Report peak memory by stage, predicted and measured, and by kind."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportChart, ReportSection, ReportTable, format_gib, seconds
from simpletune.runs.report.run_data import Json, RunData


def memory_section(run: RunData) -> ReportSection:
    """Show peaks by stage, predicted and measured."""
    section = ReportSection("memory", "Memory by stage")
    predicted = run.summary.get("predicted") or {}
    stages = predicted.get("stages", {})
    if not run.stages:
        section.notes.append("No peak was recorded for any stage.")
        return section
    on_gpu = run.peak_key == "peak_allocated_gib"
    rows: list[Json] = []
    for name, figures in run.stages.items():
        value = figures.get(run.peak_key) or 0.0
        mark = stages.get(name, {}).get("peak_allocated_mib") if on_gpu else None
        row: Json = {"name": name, "value": round(value, 4), "label": format_gib(value)}
        rows.append(row | ({"mark": mark / 1024, "mark_label": format_gib(mark / 1024)} if mark is not None else {}))
    ticks = "predicted" if any("mark" in row for row in rows) else ""
    says = f"Peak memory by stage, {run.peak_words}: " + ", ".join(f"{row['name']} {row['label']}" for row in rows)
    spec = charts.bars(rows, "GiB", marks=ticks)
    section.charts.append(ReportChart("stages", f"Measured peak, {run.peak_words}", says, spec))
    if ticks:
        section.notes.append("The dark tick in a bar is the prediction before the run.")
    section.tables.append(_stage_table(run, stages, on_gpu))
    section.notes.append(_prediction_note(run, predicted, on_gpu))
    section.charts += _kinds_chart(stages)
    section.tables += _kinds_table(stages)
    return section


def _stage_table(run: RunData, stages: Json, on_gpu: bool) -> ReportTable:
    head = ["stage", "time", *(["GPU allocated", "GPU reserved"] if on_gpu else []), "process's resident peak"]
    head += ["predicted", "predicted / measured"] if stages else []
    rows = []
    for name, figures in run.stages.items():
        cells = [name, seconds(figures.get("seconds"))]
        cells += [format_gib(figures.get(f"peak_{key}_gib")) for key in ("allocated", "reserved")] if on_gpu else []
        cells.append(format_gib(figures.get("peak_rss_gib")))
        mib, measured = stages.get(name, {}).get("peak_allocated_mib"), figures.get("peak_allocated_gib")
        if stages:
            cells.append(format_gib(mib / 1024) if mib is not None else "")
            cells.append(f"{mib / 1024 / measured - 1:+.1%}" if mib is not None and measured else "")
        rows.append(tuple(cells))
    return ReportTable("Stages", tuple(head), rows)


def _prediction_note(run: RunData, predicted: Json, on_gpu: bool) -> str:
    if not predicted:
        return "This run has no recorded prediction to compare with the measurement."
    peak = predicted.get("peak_allocated_mib")
    if peak is None:
        return "The prediction covers only some stages."
    if on_gpu and run.peak:
        error = peak / 1024 / run.peak - 1
        return (
            f"Predicted for the whole job: {format_gib(peak / 1024)}; measured {format_gib(run.peak)} ({error:+.1%})."
        )
    return (
        f"Predicted on a GPU for the whole job: {format_gib(peak / 1024)}. This run had no GPU, so it was not measured."
    )


def _kinds_chart(stages: Json) -> Iterator[ReportChart]:
    rows = [
        {"name": name, "part": kind, "value": round(mib, 1)}
        for name, figures in stages.items()
        for kind, mib in (figures.get("by_kind") or {}).items()
        if mib
    ]
    if rows:
        says = "Predicted peak by stage, stacked by kind of memory"
        yield ReportChart("kinds", "Predicted peak by kind", says, charts.stacked(rows, "MiB", charts.KIND_COLOURS))


def _kinds_table(stages: Json) -> Iterator[ReportTable]:
    kinds = [kind for kind in charts.KIND_COLOURS if any((f.get("by_kind") or {}).get(kind) for f in stages.values())]
    rows = [
        (name, *(f"{(figures.get('by_kind') or {}).get(kind, 0):,.0f}" for kind in kinds))
        for name, figures in stages.items()
    ]
    if kinds:
        yield ReportTable("Predicted peak by kind, MiB", ("stage", *kinds), rows, folded=True)
