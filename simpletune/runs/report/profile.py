"""Report the profiler's results: time by phase, memory over one step, the most expensive operators."""

from __future__ import annotations

from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportChart, ReportSection, ReportTable, seconds
from simpletune.runs.report.run_data import Json

OPERATORS = 15
POINTS = 400  # of the timeline
MISSING = (
    "The profiler traced no epoch of this run. profile.max_traces sets how many epochs it traces, evenly spread; "
    "their summaries are in output.profiles, beside the traces."
)


def profile_sections(profiles: list[Json]) -> list[ReportSection]:
    """Show time by phase, memory over a step, and operators; without traces, explain how to get them."""
    if not profiles:
        return [ReportSection("phases", "Time by phase", notes=[MISSING])]
    with_memory = [profile for profile in profiles if (profile.get("memory") or {}).get("timeline")]
    sections = [_phases(profiles)]
    if with_memory:
        sections.append(_timeline(with_memory[-1]))
    if profiles[-1].get("operators"):
        sections.append(_operators(profiles[-1]))
    return sections


def _phases(profiles: list[Json]) -> ReportSection:
    section = ReportSection("phases", "Time by phase")
    rows, cells = [], []
    for profile in profiles:
        epoch = f"epoch {profile['epoch']}"
        phases = {name: value for name, value in (profile.get("phases") or {}).items() if value}
        rows += [{"name": epoch, "part": name, "value": round(1000 * value, 3)} for name, value in phases.items()]
        cells.append((epoch, seconds(profile.get("seconds_per_step")), *_speed(profile)))
    if rows:
        says = "Milliseconds per step by phase of the training step, one bar for each traced epoch"
        section.charts.append(
            ReportChart("phases", "A traced step", says, charts.stacked(rows, "ms/step", charts.PHASE_COLOURS, ",.1f"))
        )
        total = sum(row["value"] for row in rows if row["name"] == rows[-1]["name"]) or 1.0  # all may round to 0 ms
        last = [row for row in rows if row["name"] == rows[-1]["name"]]
        shares = [(str(r["part"]), f"{r['value']:,.1f}", f"{r['value'] / total:.1%}") for r in last]
        title = f"Phases of {rows[-1]['name']}"
        section.tables.append(ReportTable(title, ("phase", "ms/step", "share"), shares, folded=True))
    section.tables.append(ReportTable("Traced epochs", ("epoch", "s/step", "TFLOP/s", "MFU", "idle"), cells))
    section.notes += [str(note) for profile in profiles[-1:] for note in profile.get("notes") or []]
    return section


def _speed(profile: Json) -> tuple[str, str, str]:
    tflops, mfu = profile.get("tflops"), profile.get("mfu")
    idle = profile.get("idle") or {}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {_number(name, value)}" for name, value in idle.items() if value is not None
    )
    return f"{tflops:.3g}" if tflops is not None else "", f"{mfu:.1%}" if mfu is not None else "", shown


def _number(name: str, value: object) -> str:
    if isinstance(value, float) and name.endswith("share"):
        return f"{value:.1%}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _timeline(profile: Json) -> ReportSection:
    memory = profile["memory"]
    points = memory["timeline"]
    many = max(1, -(-len(points) // POINTS))
    kept = [max(points[at : at + many], key=lambda point: point["total_mib"]) for at in range(0, len(points), many)]
    kinds = list(dict.fromkeys(kind for point in kept for kind in point.get("by_kind") or {"all": 0}))
    rows = [
        {"ms": point["ms"], "part": kind, "value": round(_of_kind(point, kind), 2), "phase": point.get("phase", "")}
        for point in kept
        for kind in kinds
    ]
    section = ReportSection("timeline", "Memory over one step", charts=[charts.timeline(rows, phases_of(points))])
    at = memory.get("at")
    where = f" in {at}" if isinstance(at, str) else f" in {at.get('phase', '')}" if isinstance(at, dict) else ""
    if memory.get("peak_mib") is not None:
        section.notes.append(f"Epoch {profile['epoch']}; peak {memory['peak_mib']:,.0f} MiB{where}.")
    ends = [(p["name"], f"{p['from']:.1f} to {p['to']:.1f}", f"{p['peak']:,.0f}") for p in phases_of(points)]
    section.tables.append(ReportTable("Peak by phase", ("phase", "ms", "peak MiB"), ends, folded=True))
    if many > 1:
        section.notes.append(f"Each point is the largest of {many} neighbouring ones.")
    return section


def _of_kind(point: Json, kind: str) -> float:
    by_kind = point.get("by_kind")
    return by_kind.get(kind, 0.0) if by_kind else point["total_mib"]


def phases_of(points: list[Json]) -> list[Json]:
    """Find the start, end and peak of each phase in a timeline: ``name``, ``from``, ``to``, ``peak``."""
    found: list[Json] = []
    for point in points:
        name = point.get("phase") or ""
        if not found or found[-1]["name"] != name:
            found.append({"name": name, "from": point["ms"], "to": point["ms"], "peak": point["total_mib"]})
        found[-1]["to"] = point["ms"]
        found[-1]["peak"] = max(found[-1]["peak"], point["total_mib"])
    return found


def _operators(profile: Json) -> ReportSection:
    rows = [
        (str(row["name"]), f"{row['calls']:,}", f"{row['self_ms']:,.2f}", f"{row['share']:.1%}")
        for row in profile["operators"][:OPERATORS]
    ]
    table = ReportTable(f"By self time, epoch {profile['epoch']}", ("operator", "calls", "self ms", "share"), rows)
    return ReportSection("operators", "Operators", tables=[table])
