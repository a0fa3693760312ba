"""Report time, price and memory: predicted when the run started, measured, and as the profiler traced them."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportChart, ReportSection, ReportTable, format_gib, seconds
from simpletune.runs.report.run_data import Json, RunData
from simpletune.system.prices import Price

OPERATORS = 15
POINTS = 400  # of the timeline
MISSING = (
    "The profiler traced no epoch of this run. profile.max_traces sets how many epochs it traces, evenly spread; "
    "their summaries are in output.profiles, beside the traces."
)


def memory_section(run: RunData) -> ReportSection:
    """Show peaks by stage, predicted and measured, and the predicted ones by kind of memory."""
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
    peak = predicted.get("peak_allocated_mib")
    if not predicted:
        note = "This run has no recorded prediction to compare with the measurement."
    elif peak is None:
        note = "The prediction covers only some stages."
    elif on_gpu and run.peak:
        error = f"{peak / 1024 / run.peak - 1:+.1%}"
        note = f"Predicted for the whole job: {format_gib(peak / 1024)}; measured {format_gib(run.peak)} ({error})."
    else:
        whole = f"Predicted on a GPU for the whole job: {format_gib(peak / 1024)}"
        note = f"{whole}. This run had no GPU, so it was not measured."
    section.notes.append(note)
    by_stage = {name: figures.get("by_kind") or {} for name, figures in stages.items()}
    parts = [
        {"name": name, "part": kind, "value": round(mib, 1)}
        for name, by_kind in by_stage.items()
        for kind, mib in by_kind.items()
        if mib
    ]
    if parts:
        says = "Predicted peak by stage, stacked by kind of memory"
        spec = charts.stacked_bars(parts, "MiB", charts.KIND_COLOURS)
        section.charts.append(ReportChart("kinds", "Predicted peak by kind", says, spec))
    if kinds := [kind for kind in charts.KIND_COLOURS if any(by_kind.get(kind) for by_kind in by_stage.values())]:
        cells = [(name, *(f"{by_kind.get(kind, 0):,.0f}" for kind in kinds)) for name, by_kind in by_stage.items()]
        section.tables.append(ReportTable("Predicted peak by kind, MiB", ("stage", *kinds), cells, folded=True))
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


def time_sections(run: RunData) -> Iterator[ReportSection]:
    """Compare predicted and measured time of a step, each stage and the job; nothing without a prediction."""
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
    pairs = {"a step": step, **stages, **({"these stages": time["seconds"]} if "seconds" in time else {})}
    rows = [
        (name, seconds(pair["predicted"]), seconds(pair["measured"]), f"{pair['ratio']:.2f}")
        for name, pair in pairs.items()
    ]
    if "cost" in time:
        cost, price = time["cost"], Price(**time["price"])
        unit = f" {price.currency}" if price.currency else ""
        predicted, measured = (f"{cost[key]:.4g}{unit}" for key in ("predicted", "measured"))
        rows.append(("price", predicted, measured, f"{cost['ratio']:.2f}"))
        section.notes.append(f"Price: {price.words}. The measured one includes the start of the process.")
    if stages:
        bars: list[Json] = [
            {
                "name": name,
                "value": pair["measured"],
                "label": seconds(pair["measured"]),
                "mark": pair["predicted"],
                "mark_label": seconds(pair["predicted"]),
            }
            for name, pair in stages.items()
        ]
        says = ", ".join(f"{row['name']} {row['label']}, predicted {row['mark_label']}" for row in bars)
        spec = charts.bars(bars, "s", marks="predicted")
        section.charts.append(ReportChart("stage-seconds", "Seconds by stage", says, spec))
    head = ("", "predicted", "measured", "predicted / measured")
    section.tables.append(ReportTable("Predicted and measured", head, rows))
    yield section


def profile_sections(profiles: list[Json]) -> Iterator[ReportSection]:
    """Show time by phase, memory over a step, and operators; without traces, explain how to get them."""
    if not profiles:
        yield ReportSection("phases", "Time by phase", notes=[MISSING])
        return
    yield _phases(profiles)
    with_memory = [profile for profile in profiles if (profile.get("memory") or {}).get("timeline")]
    if with_memory:
        yield _timeline(with_memory[-1])
    if operators := profiles[-1].get("operators"):
        rows = [
            (str(row["name"]), f"{row['calls']:,}", f"{row['self_ms']:,.2f}", f"{row['share']:.1%}")
            for row in operators[:OPERATORS]
        ]
        title = f"By self time, epoch {profiles[-1]['epoch']}"
        table = ReportTable(title, ("operator", "calls", "self ms", "share"), rows)
        yield ReportSection("operators", "Operators", tables=[table])


def _phases(profiles: list[Json]) -> ReportSection:
    section = ReportSection("phases", "Time by phase")
    rows, cells = [], []
    for profile in profiles:
        epoch = f"epoch {profile['epoch']}"
        phases = {name: value for name, value in (profile.get("phases") or {}).items() if value}
        rows += [{"name": epoch, "part": name, "value": round(1000 * value, 3)} for name, value in phases.items()]
        idle = []
        for name, value in (profile.get("idle") or {}).items():
            form = ".1%" if name.endswith("share") else ".3g"
            shown = f"{value:{form}}" if isinstance(value, float) else str(value)
            idle += [f"{name.replace('_', ' ')} {shown}"] if value is not None else []
        tflops, mfu = profile.get("tflops"), profile.get("mfu")
        speed = f"{tflops:.3g}" if tflops is not None else "", f"{mfu:.1%}" if mfu is not None else ""
        cells.append((epoch, seconds(profile.get("seconds_per_step")), *speed, ", ".join(idle)))
    if rows:
        says = "Milliseconds per step by phase of the training step, one bar for each traced epoch"
        section.charts.append(
            ReportChart(
                "phases", "A traced step", says, charts.stacked_bars(rows, "ms/step", charts.PHASE_COLOURS, ",.1f")
            )
        )
        last = [row for row in rows if row["name"] == rows[-1]["name"]]
        total = sum(row["value"] for row in last) or 1.0  # all may round to 0 ms
        shares = [(str(r["part"]), f"{r['value']:,.1f}", f"{r['value'] / total:.1%}") for r in last]
        title = f"Phases of {rows[-1]['name']}"
        section.tables.append(ReportTable(title, ("phase", "ms/step", "share"), shares, folded=True))
    section.tables.append(ReportTable("Traced epochs", ("epoch", "s/step", "TFLOP/s", "MFU", "idle"), cells))
    section.notes += [str(note) for profile in profiles[-1:] for note in profile.get("notes") or []]
    return section


def _timeline(profile: Json) -> ReportSection:
    memory = profile["memory"]
    points = memory["timeline"]
    many = max(1, -(-len(points) // POINTS))
    kept = [max(points[at : at + many], key=lambda point: point["total_mib"]) for at in range(0, len(points), many)]
    kinds = list(dict.fromkeys(kind for point in kept for kind in point.get("by_kind") or {"all": 0}))
    rows: list[Json] = []
    for point in kept:
        by_kind = point.get("by_kind")
        for kind in kinds:
            mib = by_kind.get(kind, 0.0) if by_kind else point["total_mib"]
            rows.append({"ms": point["ms"], "part": kind, "value": round(mib, 2), "phase": point.get("phase", "")})
    phases: list[Json] = []
    for point in points:
        name = point.get("phase") or ""
        if not phases or phases[-1]["name"] != name:
            phases.append({"name": name, "from": point["ms"], "to": point["ms"], "peak": point["total_mib"]})
        phases[-1]["to"] = point["ms"]
        phases[-1]["peak"] = max(phases[-1]["peak"], point["total_mib"])
    section = ReportSection("timeline", "Memory over one step", charts=[charts.timeline(rows, phases)])
    at = memory.get("at")
    where = f" in {at}" if isinstance(at, str) else f" in {at.get('phase', '')}" if isinstance(at, dict) else ""
    if memory.get("peak_mib") is not None:
        section.notes.append(f"Epoch {profile['epoch']}; peak {memory['peak_mib']:,.0f} MiB{where}.")
    ends = [(p["name"], f"{p['from']:.1f} to {p['to']:.1f}", f"{p['peak']:,.0f}") for p in phases]
    section.tables.append(ReportTable("Peak by phase", ("phase", "ms", "peak MiB"), ends, folded=True))
    if many > 1:
        section.notes.append(f"Each point is the largest of {many} neighbouring ones.")
    return section
