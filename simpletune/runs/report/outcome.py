"""Report how a run ended, or that it is still running, and its attempts: the first start and each resume."""

from __future__ import annotations

from simpletune.runs.attempts import Attempt
from simpletune.runs.report.content import ReportSection, ReportTable, format_gib
from simpletune.runs.report.run_data import RunData, without_folders
from simpletune.system.console import duration
from simpletune.system.stage_timer import peak_of_stages


def resumes(run: RunData) -> str:
    """Say how many attempts a run took and from which steps it was resumed; empty for one attempt."""
    if len(run.attempts) < 2:
        return ""
    steps = [f"{attempt.from_step:,}" for attempt in run.attempts[1:]]
    return f"{len(run.attempts)} attempts; resumed from step{'s' * (len(steps) > 1)} {', '.join(steps)}"


def outcome(run: RunData) -> str:
    """Say how a run ended, in a few words."""
    if status := run.summary.get("status"):
        return str(status)
    if run.attempts and run.attempts[-1].ended:
        return run.attempts[-1].in_words()
    if run.attempts:
        return "running" if run.held else "killed"
    return "running" if run.held else "finished" if run.summary else "not recorded"


def attempts_section(run: RunData) -> ReportSection | None:
    """List the attempts; None for a single one that finished."""
    rows = run.attempts
    before = f"The attempts at steps 1 to {rows[0].from_step:,} were not recorded." if rows else ""
    unknown = bool(rows) and rows[0].from_step > 0
    if not unknown and (not rows or (len(rows) == 1 and rows[0].ended == "finished")):
        return None
    section = ReportSection("attempts", "Attempts", notes=[before] if unknown else [])
    if len(rows) > 1:
        section.notes.append("Time, cost and memory on this page cover all attempts together.")
    for earlier, later in zip(rows, rows[1:], strict=False):
        section.notes.append(_resumed(earlier, later))
    head = ("started (UTC)", "steps", "time", "peak memory", "device", "how it ended")
    cells = [
        (f"{row.started:%Y-%m-%d %H:%M}", _steps(row),
         duration(row.seconds), _peak(row), row.device, _ending(row, run.held and row is rows[-1]))
        for row in rows
    ]  # fmt: skip
    section.tables.append(ReportTable("Attempts", head, cells))
    return section


def _resumed(earlier: Attempt, later: Attempt) -> str:
    verb = "Resumed" if later.from_step else "Restarted"
    lost = earlier.last_step - later.from_step
    again = f"; {lost:,} step{'s' * (lost != 1)} repeated" if lost > 0 else ""
    return f"{verb} on {later.started:%Y-%m-%d} at {later.started:%H:%M} UTC from step {later.from_step:,}{again}."


def _peak(row: Attempt) -> str:
    on_gpu = peak_of_stages(row.stages, "peak_allocated_gib")
    return format_gib(on_gpu if on_gpu is not None else peak_of_stages(row.stages, "peak_rss_gib"))


def _steps(row: Attempt) -> str:
    return f"{row.from_step + 1:,} to {row.last_step:,}" if row.last_step > row.from_step else "none"


def _ending(row: Attempt, held: bool) -> str:
    if row.ended is None:
        return "running" if held else "killed"
    if row.ended == "failed" and row.reason:
        return f"failed: {without_folders(row.reason).splitlines()[0]}"
    return row.in_words()
