"""The report of several runs side by side."""

from __future__ import annotations

from simpletune.runs.report import charts, image_rows
from simpletune.runs.report.content import (
    Fact,
    Report,
    ReportChart,
    ReportSection,
    ReportTable,
    dollars,
    format_gib,
    seconds,
)
from simpletune.runs.report.evaluations import fidelity_sections
from simpletune.runs.report.losses import MIXED, loss_data, loss_section, loss_title
from simpletune.runs.report.run_data import Json, RunData, outcome, resumes
from simpletune.runs.report.settings import settings_of
from simpletune.system.console import duration

NAMES = ("name", "about", "output.runs", "output.profiles", "output.cache", "output.prices", "output.report")
WEIGHTY = (
    "model.pretrained", "data.path", "data.resolution", "train.batch_size", "train.gradient_accumulation",
)  # fmt: skip
IMAGES = 12  # maximum of prompts on the page


def comparison_report(runs: list[RunData], price: float | None, title: str = "", lead: str = "") -> Report:
    """Build the report of several runs, in percent of the first; the price is in dollars per hour."""
    differences = differing_settings(runs)
    grid = image_grid(runs)
    status = [f"{run.name}: {note}" for run in runs for note in run.notes]
    if weighty := [path for path in WEIGHTY if path in differences]:
        status.append(f"These runs differ in {', '.join(weighty)}, which affects times and peaks.")
    devices = {str(run.summary.get("device", "")) for run in runs if run.summary}
    machines = {str(run.environment.get("device", "")) for run in runs if run.environment}
    if len(devices) > 1 or len(machines) > 1:
        used = "; ".join(sorted(machines if len(machines) > 1 else devices))
        status.append(f"The runs used different machines: {used}.")
    shown = ReportSection("pictures", "The same prompts in every run")
    if grid:
        shown.block = "grid"
        shown.notes.append("The base and each run's last pictures, from the same noise; large ones are scaled down.")
        shown.lines.append("The pictures are on the HTML page and in each run's `samples/`.")
    else:
        shown.notes.append("No run drew validation pictures.")
    changed = ReportSection("differences", "Differences")
    if differences:
        rows = [(path, *values) for path, values in differences.items()]
        changed.tables.append(ReportTable("Settings", ("setting", *(run.name for run in runs)), rows))
    else:
        changed.notes.append("These runs have the same configuration.")
    sections = [
        runtime_section(runs),
        peak_section(runs),
        table_section(runs, price),
        shown,
        loss_section(runs),
        *fidelity_sections(runs),
        changed,
        environment_section(runs),
    ]
    data = {"losses": [loss_data(run) for run in runs if run.metrics], "grid": grid}
    lead = lead or f"Compared with the first, {runs[0].name}."
    return Report(title or f"{len(runs)} runs", lead, "", status, headline(runs), sections, price, [], data)


def headline(runs: list[RunData]) -> list[Fact]:
    """Name the runs with the least memory and the fastest step, relative to the first run."""

    def against(value: float | None, first: float | None) -> str:
        return f"{value / first:.0%} of the first" if value and first else "not known for the first"

    facts = []
    peaks = [run for run in runs if run.peak]
    if peaks and len({run.peak_key for run in peaks}) == 1:
        least = min(peaks, key=lambda run: run.peak or 0.0)
        note = f"{least.name}, {against(least.peak, runs[0].peak)}"
        facts.append(Fact("Least memory", format_gib(least.peak), note))
    quick = [run for run in runs if run.seconds_per_step]
    if quick:
        best = min(quick, key=lambda run: run.seconds_per_step or 0.0)
        note = f"{best.name}, {against(best.seconds_per_step, runs[0].seconds_per_step)}"
        facts.append(Fact("Fastest step", seconds(best.seconds_per_step), note))
    return facts


def runtime_section(runs: list[RunData]) -> ReportSection:
    """Chart seconds per epoch; seconds per step if not every run knows its epoch's length."""
    epochs = all(run.seconds_per_epoch for run in runs)
    section = ReportSection("runtime", "Runtime per epoch" if epochs else "Runtime per step")
    first = runs[0].seconds_per_epoch if epochs else runs[0].seconds_per_step
    rows: list[Json] = []
    for run in runs:
        value = run.seconds_per_epoch if epochs else run.seconds_per_step
        percent = f" ({value / first:.0%})" if value and first else ""
        rows.append({"name": run.name, "value": value, "label": f"{seconds(value)}{percent}" if value else "not known"})
    says = "; ".join(f"{row['name']} {row['label']}" for row in rows)
    unit = "seconds per epoch" if epochs else "seconds per step"
    section.charts.append(ReportChart("runtime", "", f"{section.title}: {says}", charts.bars(rows, unit, "@runs")))
    lengths = sorted({run.steps_per_epoch for run in runs if run.steps_per_epoch})
    if epochs:
        listed = ", ".join(f"{steps:,}" for steps in lengths)
        steps_of = "step of an epoch" if lengths == [1] else "steps of an epoch"
        section.notes.append(f"Median seconds per step (without warm-up) times {listed} {steps_of}.")
    else:
        section.notes.append("Seconds per step, because the steps per epoch are not known for every run.")
    return section


def peak_section(runs: list[RunData]) -> ReportSection:
    """Chart the peak memory."""
    section = ReportSection("peak", "Peak memory usage")
    kinds = {run.peak_words for run in runs if run.peak}
    rows: list[Json] = []
    for run in runs:
        first = runs[0].peak if run.peak_key == runs[0].peak_key else None
        percent = f" ({run.peak / first:.0%})" if run.peak and first else ""
        label = f"{format_gib(run.peak)}{percent}" if run.peak else "not known"
        rows.append({"name": run.name, "value": run.peak, "label": label})
    says = "; ".join(f"{row['name']} {row['label']}" for row in rows)
    section.charts.append(ReportChart("peak", "", f"Peak memory: {says}", charts.bars(rows, "GiB", "@runs")))
    if len(kinds) == 1:
        section.notes.append(
            f"Peak of the whole job, {kinds.pop()}: the maximum over text, latents, training and validation."
        )
    elif kinds:
        section.notes.append("Do not compare these peaks: some are of GPU memory, some of host memory.")
    return section


def table_section(runs: list[RunData], price: float | None) -> ReportSection:
    """Tabulate all figures, with percentages of the first run's; and each run's time over all attempts, and its end."""

    def percent(value: float | None, first: float | None) -> str:
        return f"{value / first:.1%}" if value and first else ""

    head = ["run", "trained parameters", "s/step", "% of first", "s/epoch", "samples/s", "peak", "% of first", "loss"]
    head += [loss_title(runs) or MIXED, *(["1,000 steps"] if price else [])]
    rows, times = [], []
    for run in runs:
        trained = run.summary.get("trainable_parameters")
        share = f" ({100 * run.share:.3g}%)" if run.share is not None else ""
        final = run.summary.get("final_loss")
        cells = [
            run.name,
            f"{trained:,}{share}" if trained is not None else "",
            seconds(run.seconds_per_step),
            percent(run.seconds_per_step, runs[0].seconds_per_step),
            seconds(run.seconds_per_epoch),
            f"{run.samples_per_second:.3g}" if run.samples_per_second else "",
            format_gib(run.peak),
            percent(run.peak, runs[0].peak if run.peak_key == runs[0].peak_key else None),
            f"{final:.4f}" if final is not None else "",
            f"{run.evaluations[-1][1]:.4f}" if run.evaluations else "",
        ]
        if price:
            cells.append(dollars(run.seconds_per_step * 1000 / 3600 * price) if run.seconds_per_step else "")
        rows.append(tuple(cells))
        time = run.seconds_total
        cost = [dollars(time / 3600 * price) if time is not None else ""] if price else []
        took = duration(time) if time is not None else ""
        times.append((run.name, took, *cost, resumes(run) or ("1 attempt" if run.attempts else ""), outcome(run)))
    note = f"Percentages refer to the first run, {runs[0].name}." + (f" Cost at ${price:g} per hour." if price else "")
    ends = ("run", "time", *(["cost"] if price else []), "attempts", "how it ended")
    tables = [ReportTable("Runs", tuple(head), rows), ReportTable("Time of the whole job", ends, times)]
    return ReportSection("figures", "Figures", notes=[note], tables=tables)


def differing_settings(runs: list[RunData]) -> dict[str, list[str]]:
    """Return the settings in which the runs differ: path, and each run's value."""
    tables = [{row.path: row for row in settings_of(run.config, run.settings)} for run in runs]
    found = {}
    for path in dict.fromkeys(path for table in tables for path in table):
        rows = [table.get(path) for table in tables]
        there = [row for row in rows if row is not None]
        same = len({row.value for row in there}) == 1
        # Skip a field that only some runs' options have, as long as it is at its default.
        if path in NAMES or (same and (len(there) == len(rows) or not any(row.changed for row in there))):
            continue
        found[path] = [row.value if row is not None else "" for row in rows]
    return found


def environment_section(runs: list[RunData]) -> ReportSection:
    """List machine and versions, once for all runs that share them."""
    section = ReportSection("environment", "Environment")
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        found.setdefault(tuple((name, str(value)) for name, value in run.environment.items()), []).append(run.name)
    for pairs, names in found.items():
        who = "All runs" if len(found) == 1 else ", ".join(names)
        if pairs:
            section.tables.append(ReportTable(who, ("item", "value"), list(pairs)))
        else:
            section.notes.append(f"{who}: machine and versions were not recorded.")
    return section


def image_grid(runs: list[RunData]) -> list[Json]:
    """Return the base's picture and each run's last one for each prompt, as data URIs; empty if no run generated
    any."""
    prompts: dict[str, Json] = {}
    for run in runs:
        for image in image_rows.validation_images(run.folder, run.notes):
            if image.is_start:
                continue
            row = prompts.setdefault(image.asked, {"seed": image.seed, "base": None, "runs": {}})
            if image.step == 0:
                row["base"] = row["base"] or image
            else:
                row["runs"][run.name] = image  # ordered by step, so the last one wins
    kept = list(prompts.items())[:IMAGES]
    titles = image_rows.row_titles([asked for asked, _ in kept], ("prompt", "seed"))
    side = image_rows.side_for(sum(1 + len(row["runs"]) for _, row in kept))
    return [
        {
            "prompt": titles[asked],
            "seed": row["seed"],
            "pictures": [
                {"name": name, "step": image.step, "src": image_rows.data_uri(image.file, side)}
                for name, image in [("base", row["base"]), *row["runs"].items()]
                if image is not None
            ],
        }
        for asked, row in kept
    ]
