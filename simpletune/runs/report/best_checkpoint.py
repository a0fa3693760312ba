"""Report which checkpoint is the best and why: held-out loss and drift from the base over the steps."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.config.validation_schedule import drift_group
from simpletune.runs.best_checkpoint import LAST, BestCheckpoint, choose_best, paired_difference
from simpletune.runs.folder import EVALUATIONS, read_rows
from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.runs.report.run_data import RunData
from simpletune.system.options import Json, UserError

ABOUT = (
    "Drift is how much the model's predictions changed from the base's at fixed latents, noise and prompts: "
    "E|v - v_base|² / E|v_base|², with its standard error over the samples. It should rise for the captions and stay "
    "low for other prompts."
)


def choice_sections(run: RunData) -> Iterator[ReportSection]:
    """Show what each evaluated step measured, and the best checkpoint; yield nothing without evaluations."""
    try:
        rows = sorted(read_rows(run.folder / EVALUATIONS), key=lambda row: row["step"])
        best = choose_best(run.folder)
    except UserError:  # another note of the page names the damaged file
        return
    rows = [row for row in rows if row.get("eval_losses")]
    if len(rows) < 2:
        return
    section = ReportSection("best", "Which checkpoint")
    if best is not None:
        section.notes.append(best_words(run.name, best))
    drifted = [row for row in rows if row.get("drift")]
    if drifted:
        points = [
            {"step": row["step"], "prompts": drift_group(group), "drift": value,
             "low": value - row["drift_error"][group], "high": value + row["drift_error"][group]}
            for row in drifted for group, value in row["drift"].items()
        ]  # fmt: skip
        last = ", ".join(f"{drift_group(group)} {value:.2%}" for group, value in drifted[-1]["drift"].items())
        section.charts.append(charts.drift(points, f"Drift from the base over the steps; at the last: {last}"))
        section.notes.append(ABOUT)
    section.tables.append(table(rows, run.loss_is, best))
    yield section


def best_words(name: str, best: BestCheckpoint) -> str:
    """Say which checkpoint to use, and why."""
    if best.by == LAST:
        return f"The last checkpoint, step {best.step:,}, counts as the best: {best.why}."
    return f"Best: step {best.step:,} ({name}{best.suffix}), by {best.by}: {best.why}."


def table(rows: list[Json], loss_is: str, best: BestCheckpoint | None) -> ReportTable:
    """Tabulate every evaluation: the loss, its paired difference to the first one, and the drifts."""
    groups = list(dict.fromkeys(group for row in rows for group in row.get("drift", {})))
    cells = []
    for row in rows:
        step = "before training" if row["step"] == 0 else f"{row['step']:,}"
        mark = " (best)" if best is not None and best.by != LAST and best.step == row["step"] else ""
        change = ""
        if row is not rows[0] and len(row["eval_losses"]) == len(rows[0]["eval_losses"]):
            change = "{:+.4f} ± {:.4f}".format(*paired_difference(row["eval_losses"], rows[0]["eval_losses"]))
        drifts = [f"{row['drift'][group]:.2%}" if group in row.get("drift", {}) else "" for group in groups]
        cells.append((f"{step}{mark}", f"{row['eval_loss']:.4f}", change, *drifts))
    head = ("step", "loss", "change, ± paired error", *(drift_group(group).removeprefix("the ") for group in groups))
    drift = ", and drift by prompts" if groups else ""
    return ReportTable(f"{loss_is[0].upper()}{loss_is[1:]}{drift}", head, cells)
